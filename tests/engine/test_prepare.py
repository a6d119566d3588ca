"""Prepared models, in bfloat16 and with 4-bit weights: the same answers, hooks, adapters, copies."""

import copy
import io

import pairs
import pytest
import torch
from packed_layers import can_pack
from peft import LoraConfig, get_peft_model

import blockformer
from blockformer.engine import choices, runtime
from blockformer.engine.linear import PreparedQuantizedLinear
from blockformer.engine.packed import PackedLinear
from blockformer.model.awq_linear import QuantizedLinear

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True)
def quicker(monkeypatch):
    """Packing judged the quicker way, whatever this machine says of it."""
    if not can_pack(torch.bfloat16):
        pytest.skip("this PyTorch has no packed bfloat16 product here")
    monkeypatch.setattr(choices, "FASTER_HERE", {(choices.PACKED, torch.bfloat16): True})
    monkeypatch.setattr("blockformer.engine.packed._LEAST_WEIGHTS", {torch.bfloat16: 0})


def packed(name="qwen3", **settings):
    """A model in bfloat16, prepared, and the same one as it was."""
    torch.manual_seed(0)
    sizes = {key: pairs.SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = blockformer.preset(
        name, **{**sizes, **TOKENS, "num_attention_heads": 4, "initializer_range": 0.2, **settings}
    )
    kind = "EncoderDecoderForConditionalGeneration" if config.is_encoder_decoder else "DecoderForCausalLM"
    model = getattr(blockformer, f"Blockformer{kind}")(config).bfloat16().eval()
    for key, parameter in model.named_parameters():
        if key.endswith((".bias", "norm.weight")):  # drawn as zeros and ones
            torch.nn.init.normal_(parameter, mean=float(key.endswith("weight")), std=0.3)
    return copy.deepcopy(model).prepare_for_inference(), model


def low(dtype=torch.float32, name="qwen3", **settings):
    """A model with 4-bit weights, prepared, and the same one as it was."""
    config = pairs.config(name, **settings, linear_bits=4, linear_group_size=32)
    torch.manual_seed(0)
    model = blockformer.BlockformerDecoderForCausalLM(config).to(dtype).eval()
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            for words in (module.qweight, module.qzeros):
                words.random_(-(2**31), 2**31)
            module.scales.uniform_(0.01, 0.03)
            if module.bias is not None:
                torch.nn.init.normal_(module.bias)
    return copy.deepcopy(model).prepare_for_inference(), model


def inputs(model, shape=(2, 2)):
    ids = torch.randint(3, pairs.VOCAB, shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}


def prepared_of(model):
    """The layers that multiply in another way than in a plain model."""
    return [module for module in model.modules() if isinstance(module, PackedLinear | PreparedQuantizedLinear)]


def near(found, expected, bound):
    """Within a share of the largest of the expected values."""
    pairs.assert_close(found.float(), expected.float(), bound)


def as_near(found, expected, truth):
    """As near to float32 as the plain model: rounding alone moves single logits by hundredths of the largest."""
    error, usual = ((logits.float() - truth).norm() / truth.norm() for logits in (found, expected))
    assert error <= 1.3 * usual + 1e-3


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {}),  # norms, rotation, grouped heads
        ("qwen3", {"num_key_value_heads": 4, "rope_parameters": None, "position_type": "learned"}),
        ("qwen2", {}),  # biases
        ("gpt2", {}),  # no gate
        ("gpt2", {"qk_norm": True}),  # LayerNorm of queries and keys
        ("t5", {"gated_mlp": True, "decoder_start_token_id": 0}),
        ("marian", {"decoder_start_token_id": 0}),
    ],
)
@torch.no_grad()
def test_the_same_logits_from_packed_weights(name, settings):
    model, plain = packed(name, **settings)
    exact = copy.deepcopy(plain).float()
    assert prepared_of(model)
    found, expected, truth = (each(**inputs(each)).logits for each in (model, plain, exact))
    as_near(found, expected, truth)
    near(found, expected, 0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
@torch.no_grad()
def test_the_same_logits_from_four_bits(dtype, name):
    model, plain = low(dtype, name)
    exact = copy.deepcopy(plain).float()
    for shape in ((1, 1), (2, 2), (2, 16), (2, 17)):  # more than 32 rows are multiplied by plain weights
        found, expected, truth = (each(**inputs(each, shape)).logits for each in (model, plain, exact))
        if dtype is torch.float32:
            near(found, expected, 1e-5)
        else:
            as_near(found, expected, truth)


def test_text():
    """In bfloat16 a rounding may choose another token: the plain model judges the text that was written."""
    model, plain = packed()
    ids = inputs(model, (1, 9))["input_ids"]
    asked = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    for settings in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        found = model.generate(ids, **asked, **settings, output_scores=True, output_logits=True)
        assert found.sequences.shape == (1, 9 + 8)
        with torch.no_grad():
            logits = plain(found.sequences).logits[:, 8:-1]
        if "num_beams" in settings:
            of_each = logits.float().log_softmax(-1).gather(-1, found.sequences[:, 9:, None])
            pairs.assert_close(found.sequences_scores, of_each.mean((1, 2)), 0.06, at_least=pairs.largest(logits))
        else:
            near(torch.stack(found.logits, 1), logits, 0.06)
            assert torch.equal(torch.stack(found.scores, 1).argmax(-1), found.sequences[:, 9:])


def with_grad(model):
    embeds = torch.ones(1, 2, model.config.hidden_size, requires_grad=True)
    model(inputs_embeds=embeds).logits.sum().backward()
    return embeds.grad


def with_autocast(model):
    with torch.no_grad(), torch.autocast("cpu"):
        return model(**inputs(model)).logits


def transformed(model):
    model.set_attn_implementation("eager")
    embeds = torch.ones(1, 2, model.config.hidden_size)
    return torch.func.jvp(lambda states: model(inputs_embeds=states).logits, (embeds,), (embeds,))[1]


@pytest.mark.parametrize(("way", "bound"), [(with_grad, 1e-5), (with_autocast, 0.03), (transformed, 1e-5)])
def test_gradients_autocast_and_transforms_of_four_bits(way, bound):
    near(*(way(each) for each in low()), bound)


@pytest.mark.parametrize("place", ["q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "gate_proj", "up_proj"])
@pytest.mark.parametrize("make", [low, packed])
@torch.no_grad()
def test_a_hook_is_asked_whenever_it_comes(place, make):
    model, _ = make()
    layer = model.model.layers[1]
    part = layer.mlp if place.startswith(("gate", "up")) else layer.self_attn
    seen = []
    handle = getattr(part, place).register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model(**inputs(model))
    assert len(seen) == 1
    handle.remove()
    model(**inputs(model))
    assert len(seen) == 1
    # The same before it is prepared
    count = len(prepared_of(model))
    model.prepare_for_training()
    assert not prepared_of(model)
    getattr(part, place).register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model.prepare_for_inference()
    assert len(prepared_of(model)) == count - (not place.endswith("norm"))
    model(**inputs(model))
    assert len(seen) == 2


@torch.no_grad()
def test_adapters_are_asked():
    model, plain = low()
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)).eval()
    torch.manual_seed(0)
    expected = get_peft_model(plain, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)).eval()
    near(adapted(**inputs(model)).logits, expected(**inputs(model)).logits, 1e-5)


@torch.no_grad()
def test_weights_that_change_are_seen():
    model, plain = low()
    for each in (model, plain):
        mlp = each.model.layers[0].mlp
        mlp.up_proj.scales *= 2
        each.model.layers[1].self_attn.q_norm.weight *= 1.5
        each.model.layers[2].self_attn.k_proj.qweight = plain.model.layers[0].self_attn.k_proj.qweight.clone()
    near(model(**inputs(model)).logits, plain(**inputs(plain)).logits, 1e-5)
    model.prepare_for_inference()
    near(model(**inputs(model)).logits, plain(**inputs(plain)).logits, 1e-5)


@pytest.mark.parametrize("make", [low, packed])
@torch.no_grad()
def test_a_copy_and_a_pickle(make):
    model, _ = make()
    expected = model(**inputs(model)).logits
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert len(prepared_of(other)) == len(prepared_of(model))
        assert torch.equal(other(**inputs(other)).logits, expected)


@torch.no_grad()
def test_a_packed_layer_called_by_itself():
    model, plain = packed("qwen2")
    states = torch.randn(1, 2, model.config.hidden_size).bfloat16()
    for name in ("v_proj", "q_proj", "k_proj"):
        layer, other = (getattr(each.model.layers[0].self_attn, name) for each in (model, plain))
        near(layer(states), other(states), 0.02)
        near(layer(2 * states), other(2 * states), 0.02)
        assert torch.equal(layer.state_dict()["weight"], other.weight)


@torch.no_grad()
def test_compiled_and_exported_graphs_have_plain_operations():
    model, plain = low()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    near(compiled(**inputs(model)).logits, plain(**inputs(plain)).logits, 1e-5)


@torch.no_grad()
def test_float64_takes_plain_weights():
    model, plain = (each.double() for each in low())
    near(model(**inputs(model)).logits, plain(**inputs(plain)).logits, 1e-9)


def test_training_a_prepared_model_names_prepare_for_training(caplog):
    torch.manual_seed(0)
    model = packed()[0]
    if hasattr(runtime.logger.warning_once, "cache_clear"):
        runtime.logger.warning_once.cache_clear()
    assert model.eval() is model
    assert not caplog.records
    ids = torch.ones(1, 4, dtype=torch.long)
    model.train()(ids, labels=ids)
    assert "no weight learns: call prepare_for_training()" in caplog.text
    caplog.clear()
    model.prepare_for_training().train()(ids, labels=ids).loss.backward()
    assert not caplog.records
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.parametrize("prepared_again", [False, True])
def test_an_adapter_that_was_added_meanwhile_learns_and_nothing_else(prepared_again):
    found = []
    for model in packed():
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        if prepared_again:
            model.prepare_for_inference()
        model.prepare_for_training()
        found.append({name for name, parameter in adapted.named_parameters() if parameter.requires_grad})
    assert found[0] == found[1]
    assert all("lora_" in name for name in found[0])
