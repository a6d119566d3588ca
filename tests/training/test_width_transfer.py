"""muP: rates and fresh weights by width, and that neither activations nor the best rate grow with it."""

import math

import pytest
import torch
from narrow_models import NARROW, USUALLY, arguments, models_of, names_of, of_width, small
from peft import LoraConfig, get_peft_model
from transformers import Trainer

import blockformer
from blockformer import adamw, mup_groups, mup_model, optimizer_groups
from blockformer.presets import PRESETS

LM = blockformer.BlockformerDecoderForCausalLM


def drawn(model_class, *args):
    torch.manual_seed(0)
    return model_class(*args)


def rates_of(model, groups):
    return {name: group["lr"] for group, names in zip(groups, names_of(model, groups), strict=True) for name in names}


# Formulas


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("width", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("initializer_range", [0.02, None])
def test_fresh_weights_and_rates_are_those_of_table_3(width, tied, initializer_range):
    settings = {"tie_word_embeddings": tied, "initializer_range": initializer_range}
    base, config = (of_width("gpt2", each, **settings) for each in (16, width))
    growth = width / 16
    model, plain = drawn(mup_model, LM, config, base), drawn(LM, config)
    hidden = growth**-0.5 if initializer_range else 1.0
    head = 1 / growth if initializer_range else growth**-0.5
    rates = rates_of(model, groups := mup_groups(model, base, 0.5, 0.1))
    for (name, weight), drawn_weight in zip(model.named_parameters(), plain.parameters(), strict=True):
        is_matrix = weight.dim() == 2 and "embed" not in name
        factor = (head if "lm_head" in name else hidden) if is_matrix else 1.0
        torch.testing.assert_close(weight, factor * drawn_weight)
        assert rates[name] == (0.5 / growth if is_matrix else 0.5), name
    assert model.config.logit_scale == (1 / growth if tied else 1.0)
    for group, names in zip(groups, names_of(model, groups), strict=True):
        decays = any(dict(model.named_parameters())[name].dim() == 2 for name in names)
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.05 if decays else 0.0)  # the same share a step


def test_each_matrix_grows_with_its_own_inputs():
    """The inputs of a down projection are the inner states, which may grow otherwise than the residual stream."""
    base = of_width("qwen3", 16)
    model = mup_model(LM, of_width("qwen3", 32, intermediate_size=128), base)
    rates = rates_of(model, mup_groups(model, base, 1.0, 0.0))
    layer = {name.split("layers.0.")[1]: rate for name, rate in rates.items() if "layers.0." in name}
    assert layer["mlp.up_proj.weight"] == layer["self_attn.o_proj.weight"] == 1 / 2
    assert layer["mlp.down_proj.weight"] == 1 / 4


def test_experts_are_hidden_and_their_router_is_a_head():
    base, config = of_width("qwen3_moe", 16), of_width("qwen3_moe", 64)
    model, plain = drawn(mup_model, LM, config, base), drawn(LM, config)
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    factors = {name: (weight.std() / was.std()).item() for (name, weight), was in pairs if ".mlp." in name}
    rates = rates_of(model, mup_groups(model, base, 1.0, 0.0))
    for name, factor in factors.items():
        assert rates[name] == 1 / 4
        assert factor == pytest.approx(1 / 4 if name.endswith("mlp.gate.weight") else 1 / 2)
    assert len(factors) == 6


def test_biases_of_experts_are_vectors():
    base, config = of_width("gpt_oss", 16), of_width("gpt_oss", 32)
    model = mup_model(LM, config, base)
    rates = rates_of(model, mup_groups(model, base, 1.0, 0.0))
    assert {rate for name, rate in rates.items() if "bias" in name} == {1.0}


@pytest.mark.parametrize("heads", [1, 2])
def test_keys_and_values_that_all_heads_share_are_hidden(heads):
    base, config = (of_width("llama", width, num_key_value_heads=heads) for width in (16, 64))
    model, plain = drawn(mup_model, LM, config, base), drawn(LM, config)
    for name in ("k_proj", "v_proj", "q_proj"):
        ours, theirs = (getattr(each.model.layers[0].self_attn, name).weight for each in (model, plain))
        torch.testing.assert_close(ours, theirs / 2)


@pytest.mark.parametrize("size", [128, 512])
def test_latent_vectors_are_hidden_whether_they_grow_or_not(size):
    base = of_width("deepseek_v3", 16)
    config = of_width("deepseek_v3", 64, kv_lora_rank=size, q_lora_rank=3 * size // 2)
    model, plain = drawn(mup_model, LM, config, base), drawn(LM, config)
    rates = rates_of(model, mup_groups(model, base, 1.0, 0.0))
    grown = size / 128
    for name in ("kv_a_proj", "q_a_proj", "k_rope_proj", "k_proj", "v_proj", "q_proj", "o_proj"):
        ours, theirs = (getattr(each.model.layers[0].self_attn, name).weight for each in (model, plain))
        growth = grown if name in ("k_proj", "v_proj", "q_proj") else 4
        torch.testing.assert_close(ours, theirs / growth**0.5)
        assert rates[f"model.layers.0.self_attn.{name}.weight"] == 1 / growth


@pytest.mark.parametrize("heads", [8, 32])
def test_maps_into_a_state_are_hidden_and_its_rates_are_heads(heads):
    """Whether heads grow in number or not; a step and a decay are one number of all states."""
    base = of_width("qwen3_5_text", 16)
    config = of_width("qwen3_5_text", 64, linear_num_value_heads=heads, linear_num_key_heads=heads // 2)
    model, plain = drawn(mup_model, LM, config, base), drawn(LM, config)
    rates = rates_of(model, mup_groups(model, base, 1.0, 0.0))
    as_head = ("in_proj_b", "in_proj_a") if heads == base.linear_num_value_heads else ()
    for name in ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "conv1d"):
        ours, theirs = (getattr(each.model.layers[0].self_attn, name).weight for each in (model, plain))
        growth = {"out_proj": heads / 8, "conv1d": 1}.get(name, 4)
        torch.testing.assert_close(ours, theirs / (growth if name in as_head else growth**0.5))
        assert rates[f"model.layers.0.self_attn.{name}.weight"] == 1 / growth


@pytest.mark.parametrize("heads", [2, 8])
def test_maps_into_a_state_space_are_hidden_and_its_steps_are_heads(heads):
    base = of_width("bamba", 16, mamba_n_heads=2, mamba_d_head=8)
    config = of_width("bamba", 64, mamba_n_heads=heads, mamba_d_head=8)
    model, plain = drawn(mup_model, LM, config, base), drawn(LM, config)
    rates = rates_of(model, mup_groups(model, base, 1.0, 0.0))
    as_head = ("in_proj_dt",) if heads == base.mamba_n_heads else ()
    for name in ("in_proj_z", "in_proj_v", "in_proj_k", "in_proj_q", "in_proj_dt", "out_proj", "conv1d"):
        ours, theirs = (getattr(each.model.layers[0].self_attn, name).weight for each in (model, plain))
        growth = {"out_proj": heads / 2, "conv1d": 1}.get(name, 4)
        torch.testing.assert_close(ours, theirs / (growth if name in as_head else growth**0.5))
        assert rates[f"model.layers.0.self_attn.{name}.weight"] == 1 / growth


@pytest.mark.parametrize(("scale", "expected"), [(None, 8**-0.5 / 4), (0.5, 0.125)])
def test_scores_of_wider_heads_shrink_as_their_size(scale, expected):
    base = of_width("qwen3", 16, attention_scale=scale)
    model = mup_model(LM, of_width("qwen3", 64, num_attention_heads=2, num_key_value_heads=1, head_dim=32), base)
    assert model.config.attention_scale == pytest.approx(expected)
    assert model.model.layers[0].self_attn.scaling == pytest.approx(expected)
    assert mup_model(LM, of_width("qwen3", 64), base).config.attention_scale == scale


@pytest.mark.parametrize("preset", ["gemma", "t5", "marian"])
def test_multipliers_of_the_width_are_the_bases(preset):
    """A preset takes them from its width; a head that is tied shrinks with the width instead."""
    base, config = (of_width(preset, width, tie_word_embeddings=True) for width in (16, 64))
    model_class = next(type(each) for each in models_of(config) if each.can_generate())
    model = mup_model(model_class, config, base)
    assert model.config.embedding_scale == base.embedding_scale
    assert model.config.logit_scale == base.logit_scale / 4
    assert config == of_width(preset, 64, tie_word_embeddings=True), "the caller's config stays as it is"


# Every model


@pytest.mark.parametrize(
    "preset",
    [pytest.param(preset, marks=[] if preset in USUALLY else pytest.mark.exhaustive) for preset in sorted(PRESETS)],
)
def test_every_model_has_a_rate_for_each_weight(preset):
    """At the base's width nothing is another; at others each weight is in one group, vectors at the rate itself."""
    base = small(preset)
    same = {"attention_by_type": base.attention_by_type} if getattr(base, "attention_by_type", None) else {}
    config = small(preset, **{name: 2 * NARROW[name] for name in ("hidden_size", "head_dim")}, **same)
    for model in models_of(base):
        fresh, plain = (
            drawn(make, *args) for make, *args in ((mup_model, type(model), base, base), (type(model), base))
        )
        for (name, weight), expected in zip(fresh.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(weight, expected), name
        groups, expected = mup_groups(fresh, base, 0.5, 0.1), optimizer_groups(fresh, 0.1)
        assert names_of(fresh, groups) == names_of(fresh, expected)
        assert [{**group, "lr": 0.5} for group in expected] == groups
        wide = mup_model(type(model), config, base)
        rates = rates_of(wide, mup_groups(wide, base, 0.5, 0.1))
        assert rates.keys() == dict(wide.named_parameters()).keys()
        assert set(rates.values()) <= {0.5, 0.25}
        assert all(rates[name] == 0.5 for name, weight in wide.named_parameters() if weight.dim() == 1)


def test_what_a_base_is_not_is_refused():
    base = of_width("qwen3", 16)
    for wrong, text in (
        (of_width("qwen3", 32, num_hidden_layers=3), "differ in layer_types, num_hidden_layers"),
        (of_width("qwen3", 32, vocab_size=63), "differ in vocab_size"),
        (of_width("bert", 32), "the base is a BlockformerDecoderConfig"),
    ):
        with pytest.raises(ValueError, match=text):
            mup_model(LM, wrong, base)
    mup_model(LM, of_width("qwen3", 32, use_cache=False, pad_token_id=5), base)  # these are no matter of weights
    tied = of_width("qwen3", 16, tie_word_embeddings=True)
    model = LM(of_width("qwen3", 32, tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"logit_scale is 1.0, and must be 0.5 with this base: make it with mup_model"):
        adamw(model, 1e-3, 0.1, base=tied)
    adapted = get_peft_model(LM(base), LoraConfig(r=2, task_type="CAUSAL_LM"))
    for wrong in (adapted, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=f"not a {type(wrong).__name__}: leave base out"):
            adamw(wrong, 1e-3, 0.1, base=base)


def test_a_saved_model_goes_on_with_its_base(tmp_path):
    """What the width changes of the model is in its config, so a loaded one needs nothing but the base."""
    base = of_width("qwen3", 16, tie_word_embeddings=True)
    model = mup_model(LM, of_width("qwen3", 64, tie_word_embeddings=True), base)
    model.save_pretrained(tmp_path)
    again = LM.from_pretrained(tmp_path)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(model.eval()(ids).logits, again(ids).logits)
    rates = [group["lr"] for group in adamw(again, 1e-2, 0.1, base=base).param_groups]
    assert rates == [1e-2, 1e-2 / 4, 1e-2]


# Training


def changes(model_class, preset, width, base, rate, make=adamw, **settings):
    """Mean sizes of what some steps change: each layer's states, its queries, and the logits."""
    config = of_width(preset, width, **settings)
    model = drawn(model_class, config) if base is None else drawn(mup_model, model_class, config, base)
    optimizer = make(model, rate, 0.0, base=base)
    ids = torch.randint(3, 61, (8, 24), generator=torch.Generator().manual_seed(1))
    seen = {}

    def watch(name):
        return lambda module, inputs, output: seen.__setitem__(name, output.detach())

    for name, module in model.named_modules():
        if type(module).__name__ == "Layer" or name.endswith(("q_proj", "lm_head")):
            module.register_forward_hook(watch(name))
    first = None
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        first = first or dict(seen)
    return {name: (seen[name] - states).abs().mean().item() for name, states in first.items()}


@pytest.mark.parametrize(
    ("model_class", "preset", "settings", "rate"),
    [
        pytest.param(LM, "qwen3", {}, 1e-2, id="qwen3"),
        pytest.param(LM, "qwen3", {"tie_word_embeddings": True}, 1e-2, id="tied", marks=pytest.mark.exhaustive),
        pytest.param(LM, "qwen3_moe", {"output_router_logits": True}, 1e-2, id="experts"),
        pytest.param(LM, "deepseek_v2", {"mlp_layer_types": ["dense"] * 2}, 1e-2, id="latent"),
        pytest.param(LM, "gpt2", {}, 1e-2, id="gpt2", marks=pytest.mark.exhaustive),
        pytest.param(
            blockformer.BlockformerEncoderForMaskedLM, "bert", {}, 1e-2, id="bert", marks=pytest.mark.exhaustive
        ),
        pytest.param(blockformer.BlockformerEncoderDecoderForConditionalGeneration, "t5", {}, 1e-2, id="t5"),
    ],
)
def test_steps_change_activations_as_much_at_every_width(model_class, preset, settings, rate):
    """The coordinate check of the article: with the ordinary parametrization each doubling multiplies the change."""
    base = of_width(preset, 32, **settings)
    ours = [changes(model_class, preset, width, base, rate, **settings) for width in (32, 128, 512)]
    plain = [changes(model_class, preset, width, None, rate, **settings) for width in (32, 512)]
    assert ours[0] == plain[0]
    for name, at_base in ours[0].items():
        for changed in ours[1:]:
            assert 0.4 < changed[name] / at_base < 1.6, (name, changed[name], at_base)
        if name.endswith("self_attn.q_proj"):
            assert plain[1][name] > 3 * at_base, name


def test_a_run_at_the_base_is_the_ordinary_one(tmp_path):
    """Bit for bit, in `Trainer`."""
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 61, (24, 12))]
    base = of_width("qwen3", 16, tie_word_embeddings=True)

    def run(**with_base):
        model = drawn(mup_model, LM, base, base) if with_base else drawn(LM, base)
        optimizer = adamw(model, 1e-2, 0.1, **with_base)
        own = arguments(tmp_path, max_steps=4, per_device_train_batch_size=4, lr_scheduler_type="cosine")
        Trainer(model, own, train_dataset=rows, optimizers=(optimizer, None)).train()
        return model.state_dict()

    expected = run()
    for name, weight in run(base=base).items():
        assert torch.equal(weight, expected[name]), name


def cosine(step, steps, warmup):
    return step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def warmup_stable_decay(step, steps, warmup, decay=4):
    """Up, level, and down along a half cosine in the last steps."""
    if step < steps - decay:
        return min(1.0, step / warmup)
    return 0.5 * (1 + math.cos(math.pi * (step - (steps - decay)) / decay))


@pytest.mark.parametrize("make", [adamw, blockformer.muon])
@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [("cosine", {}, cosine), ("warmup_stable_decay", {"num_decay_steps": 4}, warmup_stable_decay)],
)
def test_schedules_of_transformers_move_all_rates_together(make, name, settings, expected, tmp_path):
    if make is not adamw and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    base = of_width("qwen3", 16)
    model = mup_model(LM, of_width("qwen3", 32), base)
    optimizer = make(model, 1e-2, 0.1, base=base)
    peaks = [group["lr"] for group in optimizer.param_groups]
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 61, (24, 12))]
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]))
    own = arguments(tmp_path, max_steps=12, warmup_steps=3, lr_scheduler_type=name, lr_scheduler_kwargs=settings)
    Trainer(model, own, train_dataset=rows, optimizers=(optimizer, None)).train()
    for step, rates in enumerate(seen):
        assert rates == pytest.approx([peak * expected(step, 12, 3) for peak in peaks]), step
    assert len(seen) == 12
