"""Relative keys against their formula."""

import pytest
import torch
from pairs import assert_close

from blockformer import BlockformerDecoderConfig
from blockformer.model.relative_keys import RelativeKeys


@pytest.mark.parametrize("and_keys", [False, True])
def test_relative_keys_follow_the_formula(and_keys):
    """score[t, s] = q_t . e[t - s], and with keys also + k_s . e[t - s]; grouped heads share their key's term."""
    config = BlockformerDecoderConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=5,
        position_type="relative_key_query" if and_keys else "relative_key",
    )
    relative = RelativeKeys(config)
    query, key = torch.randn(2, 4, 3, 6), torch.randn(2, 2, 8, 6)
    places = torch.tensor([5, 6, 7])
    scores = relative(query, key, places)
    for head in range(4):
        for t in range(3):
            for s in range(8):
                distance = max(-4, min(4, int(places[t]) - s))
                vector = relative.embedding.weight[distance + 4]
                expected = query[:, head, t] @ vector
                if and_keys:
                    expected = expected + key[:, head // 2, s] @ vector
                assert_close(scores[:, head, t, s], expected)
