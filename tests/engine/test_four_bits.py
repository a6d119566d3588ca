"""4-bit weights in a prepared model: the same products as by plain ones, and copies that follow the weights."""

import copy
import io
import threading

import pairs
import pytest
import torch
from pairs import assert_close
from quantized_layers import low_of, prepared_of
from quantized_layers import prepared_pair as pair

from blockformer.engine import four_bits
from blockformer.engine.four_bits import PreparedQuantizedLinear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


@pytest.mark.parametrize("rows", [1, 7, 32, 33])
@torch.no_grad()
def test_in_bfloat16_as_exact_as_a_plain_layer(rows):
    layer, plain = prepared_of(256, 512, 128)
    states = torch.randn(rows, 512).bfloat16()
    exact, found = plain(states.float()), layer(states).float()
    of_plain = (plain.bfloat16()(states).float() - exact).norm() / exact.norm()
    error = (found - exact).norm() / exact.norm()
    assert found.dtype == torch.float32
    assert error < 1.2 * of_plain
    assert error < 3e-3


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


def test_threads_share_a_model():
    model, _ = pair()
    ids = pairs.token_ids(1, 6)
    with torch.no_grad():
        expected = copy.deepcopy(model)(ids).logits
    found = []

    def work():
        with torch.no_grad():
            found.append(model(ids).logits)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(logits, expected) for logits in found)


@torch.no_grad()
def test_compiled_exported_and_mapped():
    layer, plain = prepared_of(32, 64, 32)
    states = torch.randn(3, 64)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    pairs.assert_close(compiled(states), plain(states))
    pairs.assert_close(torch.export.export(layer, (states,)).module()(states), plain(states))
    pairs.assert_close(torch.func.vmap(layer)(states), plain(states))
    _, tangent = torch.func.jvp(layer, (states,), (torch.ones_like(states),))
    pairs.assert_close(tangent, torch.ones_like(states) @ plain.weight.t())


@torch.no_grad()
def test_a_replica_for_one_call_has_no_copy_of_its_weights():
    layer, plain = prepared_of(32, 64, 32)
    replica = layer._replicate_for_data_parallel()
    replica._parameters = dict(layer._parameters)
    states = torch.randn(3, 64)
    pairs.assert_close(replica(states), plain(states))
    assert replica._copy is None


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_model_is_its_plain_twin(family):
    model, plain = pair(family)
    ids, mask = pairs.left_padded(3, 40)
    with torch.no_grad():
        pairs.assert_close(model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
    texts = [m.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False) for m in (model, plain)]
    assert torch.equal(*texts)
    assert len({tuple(row[40:].tolist()) for row in texts[0]}) == 3
    assert model.num_parameters() == plain.num_parameters() > model.num_parameters(only_trainable=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_and_loaded_to_the_bit_whatever_the_dtype(tmp_path, dtype):
    model, _ = pair()
    kept = {name: tensor.clone() for module in low_of(model) for name, tensor in module.state_dict().items()}
    model.generate(pairs.token_ids(1, 4), max_new_tokens=2)
    model = model.to(dtype)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert {module.scales.dtype for module in low_of(loaded)} == {torch.float16}
    assert all(torch.equal(kept[name], low_of(loaded)[-1].state_dict()[name]) for name in kept)
