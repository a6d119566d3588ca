"""The relative bias against that of T5."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from blockformer import BlockformerDecoderConfig
from blockformer.model.relative_bias import RelativeBias


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 40), (6, 10)])
def test_relative_buckets_are_those_of_t5(bidirectional, buckets, distance):
    config = BlockformerDecoderConfig(
        position_type="relative_bias",
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
    )
    distances = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional, buckets, distance)
    assert torch.equal(RelativeBias(config, bidirectional).bucket(distances), theirs)


def test_relative_bias_of_a_cached_step_is_the_last_row():
    bias = RelativeBias(BlockformerDecoderConfig(position_type="relative_bias"), bidirectional=False)
    whole = bias(torch.arange(9), 9)
    assert whole.shape == (1, 8, 9, 9)
    assert torch.equal(bias(torch.tensor([8]), 9), whole[:, :, 8:])
