"""Linear maps with 4-bit weights: the layout, the products, and all that a model does with them."""

import copy
import threading

import pairs
import pytest
import torch
from awq_layout import quantize, tensors, words
from hypothesis import given
from hypothesis import strategies as st
from pairs import assert_close
from peft import LoraConfig, get_peft_model
from quantized_layers import SIZES, layer_of, low_of, pair, prepared_of, prepared_pair
from safetensors.torch import save_file

import blockformer
from blockformer.engine.linear import unpack
from blockformer.model import awq_linear
from blockformer.model.awq_linear import QuantizedLinear, dequantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))
def test_the_order_of_the_layout(rows, eights, seed):
    numbers = torch.randint(16, (rows, 8 * eights), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpack(words(numbers)), numbers.half())


@pytest.mark.parametrize("group", [16, 64, -1])
def test_the_weight_that_is_meant(group):
    parts, meant = tensors(torch.randn(24, 128), group)
    assert torch.equal(dequantize(**parts, dtype=torch.float32).t(), meant)
    numbers, zeros, scales = quantize(torch.randn(24, 128), group)
    for dtype in DTYPES[1:]:
        size = 128 // len(scales)
        exact = (numbers - zeros.repeat_interleave(size, 0)).to(dtype) * scales.to(dtype).repeat_interleave(size, 0)
        assert torch.equal(dequantize(words(numbers), words(zeros), scales, dtype), exact)


@pytest.mark.parametrize("group", [32, 64, 48, -1])
@pytest.mark.parametrize("shape", [(192,), (1, 192), (2, 5, 192), (3, 40, 192), (0, 192)])
@torch.no_grad()
def test_one_layer(group, shape):
    for bias in (True, False):
        layer, plain = layer_of(48, 192, group, bias)
        states = torch.randn(shape)
        assert_close(layer(states), plain(states))


@pytest.mark.parametrize("make", [layer_of, prepared_of])
@pytest.mark.parametrize("rows", [1, 7, 32, 33])
@torch.no_grad()
def test_in_bfloat16_as_exact_as_a_plain_layer(rows, make):
    layer, plain = make(256, 512, 128)
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
    layer, plain = layer_of(32, 64, 32, bias)
    states = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(states).dtype == plain(states).dtype == torch.bfloat16


@pytest.mark.parametrize("make", [pair, prepared_pair])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_model_is_its_plain_twin(family, make):
    model, plain = make(family)
    ids, mask = pairs.left_padded(3, 40)
    with torch.no_grad():
        pairs.assert_close(model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
    texts = [m.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False) for m in (model, plain)]
    assert torch.equal(*texts)
    assert len({tuple(row[40:].tolist()) for row in texts[0]}) == 3
    assert model.num_parameters() == plain.num_parameters() > model.num_parameters(only_trainable=True)


def test_other_topologies_have_none_and_read_older_repos_that_say_so():
    for config_class in (blockformer.BlockformerEncoderConfig, blockformer.BlockformerEncoderDecoderConfig):
        assert "linear_bits" not in config_class(linear_bits=None, linear_group_size=128).to_dict()
        with pytest.raises(ValueError, match="has no field 'linear_bits'"):
            config_class(linear_bits=4)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_pass_through_and_are_those_of_the_twin(checkpointing):
    model, plain = pair(tie_word_embeddings=True)
    ids = pairs.token_ids(2, 20)
    for part in (model, plain):
        part.train()
        if checkpointing:
            part.gradient_checkpointing_enable()
        part(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        pairs.assert_close(parameter.grad, plain.get_parameter(name).grad, 1e-4)


def test_nothing_of_the_plain_weight_is_kept_for_the_way_back():
    layer, _ = layer_of(64, 96, 32)
    states = torch.randn(4, 96, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
        layer(states).sum().backward()
    assert not saved
    assert states.grad.abs().sum() > 0


def test_lora_learns_on_top_and_goes_away_again(tmp_path):
    model, _ = pair()
    ids = pairs.token_ids(2, 12)
    before = model(ids).logits.detach()
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    losses = pairs.train(tuned, ids, steps=8, rate=0.5)
    assert losses[-1] < losses[0] - 0.1
    tuned.save_pretrained(tmp_path)
    with tuned.disable_adapter():
        assert torch.equal(tuned(ids).logits, before)
    after = tuned(ids).logits
    fresh, _ = pair()
    from peft import PeftModel

    assert torch.equal(PeftModel.from_pretrained(fresh, tmp_path).eval()(ids).logits, tuned.eval()(ids).logits)
    assert not torch.equal(after, before)


@pytest.mark.parametrize("make", [pair, prepared_pair])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_and_loaded_to_the_bit_whatever_the_dtype(tmp_path, dtype, make):
    model, _ = make()
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


@pytest.mark.parametrize("make", [pair, prepared_pair])
def test_threads_share_a_model(make):
    model, _ = make()
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


@pytest.mark.parametrize("make", [layer_of, prepared_of])
def test_compiled_exported_and_mapped(make):
    layer, plain = make(32, 64, 32)
    states = torch.randn(3, 64)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    pairs.assert_close(compiled(states), plain(states))
    pairs.assert_close(torch.export.export(layer, (states,)).module()(states), plain(states))
    pairs.assert_close(torch.func.vmap(layer)(states), plain(states))
    _, tangent = torch.func.jvp(layer, (states,), (torch.ones_like(states),))
    pairs.assert_close(tangent, torch.ones_like(states) @ plain.weight.t())


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.int64, torch.uint8], ids=str)
def test_packed_weights_of_another_dtype_are_refused(tmp_path, kind):
    model, _ = pair()
    names = ["model.layers.0.mlp.up_proj.qweight", "model.layers.1.self_attn.k_proj.qzeros"]
    state = {name: tensor.to(kind) if name in names else tensor for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (
        lambda: type(model).from_pretrained(tmp_path),
        lambda: type(model).from_pretrained(None, config=model.config, state_dict=state),
    ):
        with pytest.raises(ValueError, match="not int32") as refusal:
            load()
        assert all(name in str(refusal.value) for name in names)


def test_other_integers_are_no_packed_weights(tmp_path):
    class Counting(blockformer.BlockformerDecoderForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("steps", torch.tensor(7))

    Counting(pair()[0].config).save_pretrained(tmp_path)
    assert Counting.from_pretrained(tmp_path).steps == 7


@pytest.mark.versions
def test_offloaded_to_disk(tmp_path):
    model, _ = pair()
    model.save_pretrained(tmp_path / "m")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    loaded = type(model).from_pretrained(
        tmp_path / "m",
        device_map={**places, "model.rotary_emb": "cpu", "lm_head": "cpu"},
        offload_folder=tmp_path / "o",
        offload_buffers=True,
    )
    ids = pairs.token_ids(1, 6)
    with torch.no_grad():
        pairs.assert_close(loaded(ids).logits, model(ids).logits)
    assert low_of(loaded)[-1].qweight.device.type == "meta"
    # Nothing is prepared where the weights are to leave.
    loaded.prepare_for_inference()
    assert {type(module) for module in low_of(loaded)[7:]} == {QuantizedLinear}
    with torch.no_grad():
        pairs.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.versions
def test_only_weights_of_4_bits_are_read_from_the_disk_in_their_own_dtypes(tmp_path):
    """transformers up to 5.12 has accelerate read every tensor in the model's dtype."""
    from accelerate import dispatch_model

    model, _ = pair("qwen2")  # with biases
    model.save_pretrained(tmp_path)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".layers.1." in name}
    file = {"safetensors_file": str(tmp_path / "model.safetensors"), "dtype": "bfloat16"}
    index = {name: dict(file) for name in own}
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.1.self_attn": "disk", "model.layers.1.mlp.up_proj": "disk", "model.rotary_emb": "cpu"}
    places |= {name.rpartition(".")[0]: "disk" for name in own if "self_attn." not in name}
    dispatch_model(model, places, offload_index=index, offload_dir=tmp_path, offload_buffers=True)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            module.after_loading(name)
    wanted = {"qweight": "int32", "qzeros": "int32", "scales": "float16"}
    kinds = {name: entry["dtype"] for name, entry in index.items()}
    assert kinds == {name: wanted.get(name.rpartition(".")[2], "bfloat16") for name in own}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linear_bits": 8}, "linear_bits must be 4, or None for plain weights, not 8"),
        ({"linear_bits": True}, "linear_bits must be 4"),
        ({"linear_bits": 4, "linear_group_size": 0}, "linear_group_size must be a positive integer, or -1, not 0"),
        (
            {"linear_bits": 4, "linear_group_size": 24},
            r"hidden_size \(64\) is not a multiple",
        ),
        (
            {"linear_bits": 4, "linear_group_size": 64},
            r"intermediate_size \(96\) is not a multiple",
        ),
        ({"linear_bits": 4, "linear_group_size": 32, "head_dim": 10}, r"head_dim \(40\) is not a multiple"),
        ({"linear_bits": 4, "linear_group_size": -1, "intermediate_size": 90}, r"\(90\) is not a multiple of 8"),
        ({"linear_bits": 4, "linear_group_size": 32, "float32_down_proj": True}, "supported with float32_down_proj"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        pairs.config(**{**SIZES, **settings})


@pytest.mark.parametrize("make", [layer_of, prepared_of])
@pytest.mark.parametrize("rows", [1, 40])
@torch.no_grad()
def test_where_a_cpu_has_no_bfloat16_products_are_in_float32(rows, make, monkeypatch):
    layer, _ = make(48, 512, 128, bias=True)
    layer, states = layer.bfloat16(), torch.randn(rows, 512).bfloat16()
    exact = states.double() @ layer.dequantized(torch.bfloat16).double() + layer.bias.double()
    for slow in ({torch.float16}, {torch.float16, torch.bfloat16}):
        monkeypatch.setattr(awq_linear, "_SLOW_ON_CPU", slow)
        found = layer.plain_product(states)
        assert found.dtype is torch.bfloat16
        assert (found - exact).abs().max() <= 2**-7 * exact.abs().max()
