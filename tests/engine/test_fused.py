"""Layers that are one product in a prepared model: the same answers, and every reason to call them one by one."""

import copy
import functools
import io

import pairs
import pytest
import torch
from peft import LoraConfig, get_peft_model
from quantized_layers import packed_bits_win

import blockformer
from blockformer.awq_linear import QuantizedLinear
from blockformer.engine import measure
from blockformer.engine.four_bits import PreparedQuantizedLinear
from blockformer.engine.fused import FusedFourBits, FusedProduct, can_fuse
from blockformer.engine.packed import HalfCopy, PackedLinear, PackedRows, PackedWeight

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True)
def quicker(monkeypatch):
    """The second copy judged the quicker way, whatever this machine says of it."""
    weight = torch.ones(8, 8, dtype=torch.bfloat16)
    try:
        PackedWeight(weight, second_copy=True).product(weight[:1], None)
    except (AttributeError, RuntimeError, NotImplementedError):
        pytest.skip("this PyTorch has no packed bfloat16 product here, or no FBGEMM")
    verdicts = {"packed, torch.bfloat16": True, "copy": True, **packed_bits_win()}
    monkeypatch.setattr(measure, "_verdicts", {**measure._verdicts, **verdicts})
    monkeypatch.setattr("blockformer.engine.packed._LEAST_WEIGHTS", {torch.bfloat16: 0})


@pytest.fixture
def products(monkeypatch):
    """The layers of each fused product that is computed."""
    made: list[tuple] = []

    def count(kind):
        multiply = kind._multiply

        def counted(self, states):
            found = multiply(self, states)
            if found is not None:
                made.append(self.layers)
            return found

        monkeypatch.setattr(kind, "_multiply", counted)

    count(FusedProduct)
    count(FusedFourBits)
    return made


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
    return copy.deepcopy(model).prepare_for_inference(second_copy=True), model


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
    return copy.deepcopy(model).prepare_for_inference(second_copy=True), model


def inputs(model, shape=(2, 2)):
    ids = torch.randint(3, pairs.VOCAB, shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}


def fused_of(model):
    return {module.fused for module in model.modules() if getattr(module, "fused", None) is not None}


def near(found, expected, bound):
    """Within a share of the largest of the expected values."""
    pairs.assert_close(found.float(), expected.float(), bound)


def as_near(found, expected, truth):
    """As near to float32 as the plain model: rounding alone moves single logits by hundredths of the largest."""
    error, usual = ((logits.float() - truth).norm() / truth.norm() for logits in (found, expected))
    assert error <= 1.3 * usual + 1e-3


@pytest.mark.parametrize(
    ("name", "settings", "of_a_layer"),
    [
        ("qwen3", {}, 2),  # norms, rotation, grouped heads
        ("qwen3", {"num_key_value_heads": 4, "rope_parameters": None, "position_type": "learned"}, 2),
        ("qwen2", {}, 2),  # biases
        ("gpt2", {}, 1),  # no gate
        ("gpt2", {"qk_norm": True}, 1),  # LayerNorm of queries and keys
        ("t5", {"gated_mlp": True, "decoder_start_token_id": 0}, 2),
        ("marian", {"decoder_start_token_id": 0}, 1),
    ],
)
@torch.no_grad()
def test_the_same_logits_from_packed_weights(name, settings, of_a_layer, products):
    model, plain = packed(name, **settings)
    exact = copy.deepcopy(plain).float()
    layers = model.config.num_hidden_layers * (2 if model.config.is_encoder_decoder else 1)
    assert len(fused_of(model)) == of_a_layer * layers
    found, expected, truth = (each(**inputs(each)).logits for each in (model, plain, exact))
    assert len(products) == of_a_layer * layers
    as_near(found, expected, truth)
    near(found, expected, 0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
@torch.no_grad()
def test_the_same_logits_from_four_bits(dtype, name, products):
    model, plain = low(dtype, name)
    exact = copy.deepcopy(plain).float()
    for shape in ((1, 1), (2, 2), (2, 16), (2, 17)):  # more than 32 rows are multiplied by plain weights
        products.clear()
        found, expected, truth = (each(**inputs(each, shape)).logits for each in (model, plain, exact))
        assert len(products) == (2 * model.config.num_hidden_layers if shape != (2, 17) else 0)
        if dtype is torch.float32:
            near(found, expected, 1e-5)
        else:
            as_near(found, expected, truth)


def test_four_bits_are_held_once():
    model, _ = low()
    with torch.no_grad():
        model(**inputs(model))
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        apart = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
        assert all(each._copy is None for each in apart)
        assert attention.o_proj._copy is not None


def test_packed_weights_are_held_twice_at_most():
    model, _ = packed(tie_word_embeddings=True)
    joined = {layer for each in fused_of(model) for layer in each.layers}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            assert isinstance(module.packed, PackedRows) == (module in joined)
            assert module.packed.whole.copy is not None
    for each in fused_of(model):
        assert len({layer.packed.whole for layer in each.layers}) == 1


def test_text(products):
    """In bfloat16 a rounding may choose another token: the plain model judges the text that was written."""
    model, plain = packed()
    ids = inputs(model, (1, 9))["input_ids"]
    asked = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    for settings in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        products.clear()
        found = model.generate(ids, **asked, **settings, output_scores=True, output_logits=True)
        assert products
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
    embeds = torch.randn(1, 2, model.config.hidden_size, requires_grad=True)
    model(inputs_embeds=embeds).logits.sum().backward()
    assert embeds.grad.abs().sum() > 0


def with_autocast(model):
    with torch.no_grad(), torch.autocast("cpu"):
        model(**inputs(model))


def transformed(model):
    model.set_attn_implementation("eager")
    embeds = torch.randn(1, 2, model.config.hidden_size)
    torch.func.jvp(lambda states: model(inputs_embeds=states).logits, (embeds,), (embeds,))


@pytest.mark.parametrize("way", [with_grad, with_autocast, transformed])
def test_what_wants_single_layers_gets_them(way, products):
    model, _ = low()
    way(model)
    assert not products


def test_without_fast_paths(products, monkeypatch):
    model, _ = low()
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    with torch.no_grad():
        model(**inputs(model))
    assert not products
    assert not fused_of(low()[0])


@pytest.mark.parametrize("place", ["q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "gate_proj", "up_proj"])
@pytest.mark.parametrize("make", [low, packed])
@torch.no_grad()
def test_a_hook_is_asked_whenever_it_comes(place, make, products):
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
    assert len(products) == 4 * model.config.num_hidden_layers
    # The same before it is prepared
    model.prepare_for_training()
    assert not fused_of(model)
    getattr(part, place).register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model.prepare_for_inference(second_copy=True)
    assert len(fused_of(model)) == 2 * model.config.num_hidden_layers - (not place.endswith("norm"))
    model(**inputs(model))
    assert len(seen) == 2


@torch.no_grad()
def test_a_layer_called_by_itself_sees_states_that_have_changed_in_place():
    model, plain = low()
    states = torch.randn(1, 2, model.config.hidden_size)
    for part in (model, plain):
        attention = part.model.layers[0].self_attn
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            layer(states)
    states.mul_(2)
    near(*(part.model.layers[0].self_attn.k_proj(states) for part in (model, plain)), 1e-5)


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
    assert len(fused_of(model)) == 6
    before = fused_of(model)  # held, so that none of the new ones takes the address of an old one
    model.prepare_for_inference()
    assert len(fused_of(model) - before) == 2  # made anew where the weights are others
    near(model(**inputs(model)).logits, plain(**inputs(plain)).logits, 1e-5)


@pytest.mark.parametrize("make", [low, packed])
@torch.no_grad()
def test_a_copy_and_a_pickle(make, products):
    model, _ = make()
    expected = model(**inputs(model)).logits
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        attention = other.model.layers[0].self_attn
        assert attention.q_proj.fused.layers == (attention.q_proj, attention.k_proj, attention.v_proj)
        products.clear()
        assert torch.equal(other(**inputs(other)).logits, expected)
        assert len(products) == 6


def test_the_state_dict_knows_nothing_of_it():
    model, plain = low()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in plain.state_dict().items())
    assert not fused_of(model.prepare_for_training())


def test_what_is_not_fused():
    fuses = functools.partial(can_fuse, dtype=torch.float32)
    some, other = (PreparedQuantizedLinear(64, 64, bias, 32) for bias in (True, False))
    assert fuses((other, copy.deepcopy(other)))
    assert not fuses(())
    assert not fuses((some, other))  # a bias in one of them
    assert not fuses((other, PreparedQuantizedLinear(64, 64, False, 64)))  # other groups
    assert not fuses((other, torch.nn.Linear(64, 64, bias=False)))
    assert not fuses((PreparedQuantizedLinear(48, 8, False, 16),) * 2)  # no product for such groups
    meta = copy.deepcopy(other).to("meta")
    assert not fuses((meta, meta))
    visited = copy.deepcopy(other)
    visited._is_replica = True
    assert not fuses((visited, visited))


def one_has_a_bias(attention):
    attention.k_proj.bias = torch.nn.Parameter(torch.zeros(attention.k_proj.out_features, dtype=torch.bfloat16))


def one_is_of_another_dtype(attention):
    attention.k_proj.float()


def two_share_a_weight(attention):
    attention.k_proj.weight = attention.v_proj.weight


def one_is_not_dense(attention):
    attention.k_proj.weight.data = attention.k_proj.weight.data.t().contiguous().t()


@pytest.mark.parametrize("change", [one_has_a_bias, one_is_of_another_dtype, two_share_a_weight, one_is_not_dense])
def test_what_is_not_packed_together(change):
    _, model = packed()
    attention = model.model.layers[0].self_attn
    change(attention)
    model.prepare_for_inference()
    assert not any(isinstance(layer, PackedLinear) and layer.fused for layer in attention.children())
    assert len(fused_of(model)) == 2 * model.config.num_hidden_layers - 1


def test_layers_that_are_called_with_other_states_too_are_not_packed_together():
    torch.manual_seed(0)
    config = blockformer.preset("deberta-v2", **{**pairs.SIZES, "num_key_value_heads": None}, type_vocab_size=0)
    model = blockformer.BlockformerEncoderModel(config).bfloat16().prepare_for_inference()
    assert isinstance(model.layers[0].self_attn.q_proj, PackedLinear)
    assert not fused_of(model)


@torch.no_grad()
def test_a_packed_layer_called_by_itself():
    model, plain = packed("qwen2")
    states = torch.randn(1, 2, model.config.hidden_size).bfloat16()
    for name in ("v_proj", "q_proj", "k_proj"):
        layer, other = (getattr(each.model.layers[0].self_attn, name) for each in (model, plain))
        near(layer(states), other(states), 0.02)
        near(layer(2 * states), other(2 * states), 0.02)
        assert torch.equal(layer.state_dict()["weight"], other.weight)


@pytest.mark.parametrize("shape", [(1, 1), (2, 40)], ids=str)
@torch.no_grad()
def test_nothing_is_held_after_a_step(shape, products):
    """Of many tokens that would be as much memory as the layers' states."""
    model, _ = packed()
    model(**inputs(model, shape))
    assert len(products) == len(fused_of(model)) > 0
    for each in fused_of(model):
        assert {name for name, value in vars(each._last).items() if value is not None} == set()


@torch.no_grad()
def test_compiled_and_exported_graphs_have_plain_operations():
    model, plain = low()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    near(compiled(**inputs(model)).logits, plain(**inputs(plain)).logits, 1e-5)


def test_numbers_that_a_copy_would_change():
    """States are never scaled up, so that no infinity comes of it."""
    weight = torch.full((8, 8), 2.0**15, dtype=torch.bfloat16)
    assert HalfCopy.of(weight) is None
    assert HalfCopy.of(weight * 0.99).product(torch.full((1, 8), 3e38, dtype=torch.bfloat16), None).isinf().all()


def test_weights_are_held_twice_at_most_after_a_hook_too():
    model, _ = packed()
    model.prepare_for_training()
    attention = model.model.layers[0].self_attn
    handle = attention.q_proj.register_forward_hook(lambda *_: None)
    model.prepare_for_inference(second_copy=True)
    assert attention.k_proj.packed.copy is not None
    model.prepare_for_training()
    handle.remove()
    model.prepare_for_inference(second_copy=True)
    assert fused_of(attention)
    assert attention.k_proj.packed.whole is attention.q_proj.packed.whole


def test_moved_weights_leave_nothing_behind():
    model, _ = low()
    model.float()
    assert len(fused_of(model)) == 6
    model.to("meta")
    assert not fused_of(model)


@torch.no_grad()
def test_float64_takes_plain_weights(products):
    model, plain = (each.double() for each in low())
    near(model(**inputs(model)).logits, plain(**inputs(plain)).logits, 1e-9)
    assert not products


def test_a_copy_where_the_layout_is_not_there(monkeypatch):
    model, _ = packed()
    monkeypatch.setattr(HalfCopy, "is_there", lambda: False)
    other = copy.deepcopy(model)
    assert other.model.layers[0].self_attn.q_proj.packed.whole.copy is None
    assert other.lm_head.packed.copy is None
    with torch.no_grad():
        near(other(**inputs(other)).logits, model(**inputs(model)).logits, 0.05)
