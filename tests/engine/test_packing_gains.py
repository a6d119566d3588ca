"""Which products are measured, beside which, and what is made of the answers."""

import pytest
import torch
from sizes import ONE_LAYER
from torch.nn import functional as F

import blockformer
from blockformer.engine import in_parts, linear, measure, onednn, packing_gains

SIZES = {**ONE_LAYER, "vocab_size": 101}


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    monkeypatch.setattr(measure, "_verdicts", {})
    if not onednn.can_pack(torch.float32):
        pytest.skip("this PyTorch has no packed product here")


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 1024), (2048, 96), (1000, 3000), (1 << 18, 64)])
def test_weights_to_be_timed_tell_where_an_output_stands(rows, outputs, inputs):
    weights = measure.some_weights(rows, outputs, inputs)
    states = measure.random_matrix(rows, inputs)
    assert len(weights[0]) == outputs or (len(weights[0]) % 16 == 0 and len(weights[0]) >= 1024)
    assert sum(weight.numel() for weight in weights) <= max(1 << 23, 1024 * inputs)
    right = F.linear(states, weights[0])
    for shift in (1, 16, 64, len(weights[0]) // 16):
        assert not torch.allclose(right.roll(shift, -1), right, atol=1e-3)


def test_a_wrong_product_is_never_the_quickest(monkeypatch):
    for module in (in_parts, onednn):
        monkeypatch.setattr(module, "product", lambda states, weight: F.linear(states, weight).roll(64, -1))
    for rows in (1, 3, 64):
        assert linear.quickest(rows, 1024, 512) is F.linear


@pytest.mark.parametrize("are_quicker", [{"parts"}, {"onednn"}, {"parts", "onednn"}, set()])
def test_the_quickest_product_is_asked_for_beside_the_others(are_quicker, monkeypatch):
    others = []
    monkeypatch.setattr(in_parts, "is_quicker_for", lambda rows, *_: rows <= 4 and "parts" in are_quicker)
    verdict = lambda rows, outputs, inputs, other: others.append(other) or "onednn" in are_quicker  # noqa: E731
    monkeypatch.setattr(onednn, "is_quicker_for", verdict)
    best = onednn.product if "onednn" in are_quicker else in_parts.product if "parts" in are_quicker else F.linear
    assert linear.quickest(2, 1024, 256) is best
    assert linear.quickest(100, 1024, 256) is (onednn.product if "onednn" in are_quicker else F.linear)
    assert others == [in_parts.product if "parts" in are_quicker else F.linear, F.linear]
    assert linear.quickest(1, 64, 64) is linear.quickest(5, 1024, 256) is F.linear  # too small to be asked about
    assert len(others) == 2


@pytest.mark.parametrize(
    ("rows", "shares", "is_packed"),
    [
        (64, {64: 0.94}, True),
        (64, {64: 0.96}, False),
        (4, {4: 1.04, 16: 0.8}, True),
        (4, {4: 1.1, 16: 0.8}, False),
        (4, {4: 0.5, 16: 0.95}, False),
        (1, {1: 1.04, 4: 1.04, 16: 0.8}, True),
        (1, {1: 1.1, 4: 0.5, 16: 0.5}, False),
        (1, {1: 0.5, 4: 1.1, 16: 0.5}, False),
        (1, {1: 0.5, 4: 0.5, 16: 0.95}, False),
    ],
)
def test_what_a_layer_must_gain_to_be_packed(rows, shares, is_packed, monkeypatch):
    monkeypatch.setattr(packing_gains, "_is_faster", lambda rows, outputs, inputs, share: shares[rows] < share)
    assert packing_gains.is_quicker_packed_for(rows, 8, 16) is is_packed


@pytest.mark.parametrize("outputs", [96, 12288])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_packed_layer_is_timed_beside_the_same_plain_one(outputs, rows, monkeypatch):
    seen, asked = [], []

    def compare(work, other, rounds, share):
        for ours, theirs in zip(work(), other(), strict=True):
            torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=1e-4)
        seen.append(share)
        return True

    monkeypatch.setattr(packing_gains, "is_quicker", compare)
    monkeypatch.setattr(packing_gains, "quickest", lambda *given: asked.append(given) or F.linear)
    assert packing_gains._is_faster(rows, outputs, 2048, 0.9)
    assert seen == [0.9]
    assert asked == [(rows, outputs, 2048)]


def test_rows_of_layers():
    model = blockformer.BlockformerEncoderDecoderForConditionalGeneration(blockformer.preset("bart", **SIZES))
    rows = packing_gains.rows_of_layers(model)
    decoder = model.get_decoder().layers[0]
    assert rows[decoder.self_attn.k_proj] == rows[decoder.cross_attn.q_proj] == rows[model.lm_head] == 4
    assert rows[decoder.cross_attn.k_proj] == rows[decoder.cross_attn.v_proj] == 64
    assert model.get_encoder().layers[0].mlp.up_proj not in rows
    alone = blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", **SIZES))
    assert packing_gains.rows_of_layers(alone)[alone.lm_head] == 1
    encoder = blockformer.BlockformerEncoderForMaskedLM(blockformer.preset("bert", **SIZES))
    assert packing_gains.rows_of_layers(encoder) == {}
