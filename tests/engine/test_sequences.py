"""Sequences of an unpadded row attend at once or one by one, with the same result as each by itself."""

import pytest
import torch
from pairs import assert_close, token_ids
from sizes import STRONG
from torch.nn import functional as F

from blockformer import BlockformerEncoderDecoderForConditionalGeneration, preset
from blockformer.engine import attention
from blockformer.engine.unpadding import Unpadding, attend_side_by_side

pytestmark = pytest.mark.portable

LENGTHS = {"mixed": [3, 1, 5, 2], "equal": [4, 4, 4], "one": [7], "empty": [3, 0, 5]}


def attend(query, key, value, lengths, is_causal=False, bias=None, **settings):
    unpadding = Unpadding((len(lengths), max(lengths)), None, lengths)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = is_causal, query.shape[1] // key.shape[1]
    module.has_relative_terms = bias is not None
    unpadding = unpadding if bias is None else unpadding.with_bias(bias)
    return attend_side_by_side(module, query, key, value, unpadding, scaling=0.3, **settings)


@pytest.mark.parametrize("way", ["causal", "bias", "plain"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_each_sequence_attends_to_itself(lengths, way):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, sum(lengths), heads, 8, requires_grad=True) for heads in (6, 2, 2))
    states = [each.transpose(1, 2) for each in (query, key, value)]  # [1, heads, N, D]
    bias = torch.randn(1, 6, max(lengths), max(lengths)) if way == "bias" else None
    output = attend(*states, lengths, way == "causal", bias)
    expected = []
    for query_part, *parts in zip(*(each.split(lengths, 2) for each in states), strict=True):
        keys, values = (part.repeat_interleave(3, 1) for part in parts)
        mask = None if bias is None else bias[..., : keys.shape[2], : keys.shape[2]]
        attended = F.scaled_dot_product_attention(query_part, keys, values, mask, 0, way == "causal", scale=0.3)
        expected.append(attended.transpose(1, 2))
    expected = torch.cat(expected, 1)
    assert output.is_contiguous()
    assert_close(output, expected)
    ours, theirs = (torch.autograd.grad(each.square().sum(), (query, key, value)) for each in (output, expected))
    assert_close(ours, theirs)


def test_dropout_takes_its_share_of_every_sequence():
    """Of values that are all 1, what is left of a row's weights: 1 on average, and 0 or 2 where a token sees itself."""
    torch.manual_seed(0)
    lengths = [1, 8] * 100
    query, key, value = (torch.randn(1, 4, 900, 8), torch.randn(1, 4, 900, 8), torch.ones(1, 4, 900, 8))
    output = attend(query, key, value, lengths, dropout=0.5)[..., 0]  # [1, N, H]
    assert abs(output.mean() - 1) < 0.05
    alone = output[0, torch.arange(900) % 9 == 0]
    assert set(alone.flatten().tolist()) == {0.0, 2.0}
    assert output.std() > 0.3


@torch.no_grad()
def test_the_default_device_is_of_no_matter():
    query, key, value = (torch.randn(1, 4, 9, 8) for _ in range(3))
    with torch.device("meta"):
        found = attend(query, key, value, [5, 3, 1], True)
    assert_close(found, attend(query, key, value, [5, 3, 1], True))


@pytest.mark.parametrize("lengths", [[3, 2], [3, 3], [3, 0, 1]])
def test_a_bias_of_a_batch_that_is_wider_than_its_longest_sequence(lengths):
    query, key, value = (torch.randn(1, 4, sum(lengths), 8) for _ in range(3))
    bias = torch.randn(1, 4, 5, 5)
    found, expected = (attend(query, key, value, lengths, bias=each) for each in (bias, bias[..., :3, :3]))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["marian", "t5"])
@torch.no_grad()
def test_an_encoder_that_generate_runs_attends_at_once(family, monkeypatch):
    seen = []

    def counted(module, query, key, value, unpadding, **how):
        seen.append(unpadding.lengths)
        return attend_side_by_side(module, query, key, value, unpadding, **how)

    monkeypatch.setattr(attention, "attend_side_by_side", counted)
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    model = BlockformerEncoderDecoderForConditionalGeneration(preset(family, **{**STRONG, **tokens})).eval()
    ids, mask = token_ids(2, 6, vocab=97), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids[1:, :4], **asked)
    assert not seen
    model.prepare_for_inference()
    assert torch.equal(model.generate(ids, attention_mask=mask, **asked)[1:], expected)
    assert seen == [[6, 4]] * 2
