"""4-bit weights in a prepared model: the same products as by plain ones, and copies that follow the weights."""

import copy
import io

import pairs
import pytest
import torch
from quantized_layers import prepared_of

from blockformer.engine import linear
from blockformer.engine.linear import PreparedQuantizedLinear


def assert_near(found, expected):
    assert found.dtype is torch.bfloat16
    pairs.assert_close(found.float(), expected.float(), 0.02)


@pytest.mark.parametrize("fast", ["1", "0"])
@pytest.mark.parametrize("group", [32, 64, 48, -1])
@pytest.mark.parametrize("shape", [(192,), (1, 192), (2, 5, 192), (3, 40, 192)])
@torch.no_grad()
def test_one_layer(monkeypatch, fast, group, shape):
    monkeypatch.setenv("BLOCKFORMER_FAST", fast)
    for bias in (True, False):
        layer, plain = prepared_of(48, 192, group, bias)
        layer.bfloat16()
        states = torch.randn(shape).bfloat16()
        assert_near(layer(states), plain(states.float()))
        has_packed = fast == "1" and group in (32, 64) and states.numel() <= 32 * 192
        assert (layer._copy is not None) == has_packed
        assert layer(torch.randn(0, 192).bfloat16()).shape == (0, 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@torch.no_grad()
def test_other_dtypes_have_plain_weights_made_for_the_call(dtype):
    layer, plain = prepared_of(32, 64, 32)
    states = torch.randn(3, 64)
    pairs.assert_close(layer(states.to(dtype)).float(), plain(states), 1e-2 if dtype is torch.float16 else 1e-5)
    assert layer._copy is None


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_under_autocast_it_computes_in_the_smaller_dtype(bias):
    layer, plain = prepared_of(32, 64, 32, bias)
    states = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(layer(states), plain(states))
    assert layer._copy is None


@torch.no_grad()
def test_the_packed_copy_follows_the_weights():
    layer, _ = prepared_of(64, 64, 32)
    other, plain = prepared_of(64, 64, 32, seed=1)
    states = torch.randn(2, 64).bfloat16()
    layer(states)
    layer.load_state_dict(other.state_dict())
    assert_near(layer(states), plain(states.float()))
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
    states = torch.randn(2, 512).bfloat16()
    for _ in range(5):
        other = torch.randint(-(2**31), 2**31, layer.qweight.shape, dtype=torch.int32)
        layer.qweight = None
        layer.qweight = other.clone()
        assert_near(layer(states), states.float() @ layer.dequantized(torch.float32))


@pytest.mark.parametrize("change", ["another's first call", "a cast"])
@torch.no_grad()
def test_another_thread_in_the_middle_of_a_call_takes_no_copy_away(change, monkeypatch):
    layer, plain = prepared_of(64, 64, 32)
    usual = linear.PackedCopy.refresh

    def refreshed(self):
        usual(self)
        if change == "a cast":
            layer.to(torch.float32)
        else:
            vars(layer)["_copy"] = linear.PackedCopy(layer)

    monkeypatch.setattr(linear.PackedCopy, "refresh", refreshed)
    states = torch.randn(2, 64).bfloat16()
    assert_near(layer(states), plain(states.float()))


@torch.no_grad()
def test_where_pytorch_has_no_such_matmul(monkeypatch):
    monkeypatch.setattr(linear, "_IS_THERE", False)
    layer, plain = prepared_of(48, 192, 32)
    states = torch.randn(2, 192).bfloat16()
    assert_near(layer(states), plain(states.float()))
    assert layer._copy is None


@torch.no_grad()
def test_a_replica_for_one_call_has_no_copy_of_its_weights():
    layer, plain = prepared_of(32, 64, 32)
    replica = layer._replicate_for_data_parallel()
    replica._parameters = dict(layer._parameters)
    states = torch.randn(3, 64).bfloat16()
    assert_near(replica(states), plain(states.float()))
    assert replica._copy is None
