"""4-bit weights in a prepared model: the same products as by plain ones, and copies that follow the weights."""

import copy
import io

import pairs
import pytest
import torch
from pairs import assert_close
from quantized_layers import packed_bits_win, prepared_of

from blockformer.engine import four_bits, measure
from blockformer.engine.four_bits import PreparedQuantizedLinear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def packed_wins(monkeypatch):
    """The packed copy judged the quicker way, whatever this machine says of it."""
    monkeypatch.setattr(measure, "_verdicts", {**measure._verdicts, **packed_bits_win()})


@pytest.mark.parametrize("fast", ["1", "0"])
@pytest.mark.parametrize("group", [32, 64, 48, -1])
@pytest.mark.parametrize("shape", [(192,), (1, 192), (2, 5, 192), (3, 40, 192), (0, 192)])
@torch.no_grad()
def test_one_layer(monkeypatch, fast, group, shape):
    monkeypatch.setenv("BLOCKFORMER_FAST", fast)
    for bias in (True, False):
        layer, plain = prepared_of(48, 192, group, bias)
        states = torch.randn(shape)
        assert_close(layer(states), plain(states))
        has_packed = fast == "1" and group in (32, 64) and 0 < states.numel() <= 32 * 192
        assert (layer._copy is not None) == has_packed


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_under_autocast_it_computes_in_the_smaller_dtype(bias):
    layer, plain = prepared_of(32, 64, 32, bias)
    states = torch.randn(3, 64)
    four_bits._has_product.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(states).dtype == plain(states).dtype == torch.bfloat16
    assert layer._copy is not None


@torch.no_grad()
def test_the_packed_copy_follows_the_weights():
    layer, _ = prepared_of(64, 64, 32)
    other, plain = prepared_of(64, 64, 32, seed=1)
    states = torch.randn(2, 64)
    layer(states)
    layer(states.bfloat16())  # its rounded scales are not those of float32
    layer.load_state_dict(other.state_dict())
    pairs.assert_close(layer(states), plain(states))
    assert copy.deepcopy(layer)._copy is None
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(states), layer(states))
    layer.to(torch.float64)
    assert layer._copy is None
    assert layer.scales.dtype == torch.float16


@torch.no_grad()
def test_the_packed_copy_follows_weights_that_come_to_lie_at_the_same_place():
    layer = PreparedQuantizedLinear(512, 1024, False, 32)
    states = torch.randn(2, 512)
    for _ in range(5):
        other = torch.randint(-(2**31), 2**31, layer.qweight.shape, dtype=torch.int32)
        layer.qweight = None
        layer.qweight = other.clone()
        expected = states @ layer.dequantized(torch.float32)
        pairs.assert_close(layer(states) / expected.abs().max(), expected / expected.abs().max())


@pytest.mark.parametrize("fault", [AttributeError("no such product"), None])
def test_where_pytorch_has_no_such_product_or_another_one(monkeypatch, fault):
    def product(self, states):
        if fault is not None:
            raise fault
        return torch.zeros(len(states), 16)

    monkeypatch.setattr(four_bits._Packed, "product", product)
    four_bits._has_product.cache_clear()
    try:
        layer, plain = prepared_of(48, 192, 32)
        with torch.no_grad():
            states = torch.randn(2, 192)
            pairs.assert_close(layer(states), plain(states))
        assert layer._copy is None
    finally:
        four_bits._has_product.cache_clear()


@torch.no_grad()
def test_a_replica_for_one_call_has_no_copy_of_its_weights():
    layer, plain = prepared_of(32, 64, 32)
    replica = layer._replicate_for_data_parallel()
    replica._parameters = dict(layer._parameters)
    states = torch.randn(3, 64)
    pairs.assert_close(replica(states), plain(states))
    assert replica._copy is None


@torch.no_grad()
def test_without_a_packed_product_that_gains_weights_are_made_for_the_call(monkeypatch):
    lose = dict.fromkeys(packed_bits_win(), False)
    monkeypatch.setattr(measure, "_verdicts", {**measure._verdicts, **lose})
    layer, plain = prepared_of(64, 64, 32)
    states = torch.randn(1, 64)
    assert_close(layer(states), plain(states))
    assert layer._copy is None
