"""Every preset of a decoder: one way to compute is as good as another, training adds up, and the library finds its way.

What the numbers must be is the business of `conversion/test_decoder_families.py`.
"""

import copy
import re

import pytest
import torch
from packed_layers import can_pack, pack_whatever_can_be, packed_of
from pairs import assert_close, assert_gradients_close, left_padded
from sizes import STRONG
from torch import nn

import blockformer
from blockformer import BlockformerDecoderConfig, BlockformerDecoderForCausalLM
from blockformer.engine.graphs import Prompt, Steps, room_for
from blockformer.engine.step import StepLayers, uncompiled_field
from blockformer.engine.step_functions import StepFunctions
from blockformer.training import chunked_loss

WITHOUT_MLP_WIDTH = {name: value for name, value in STRONG.items() if name != "intermediate_size"}
WITHOUT_MLP_WIDTH["initializer_range"] = 0.4
WINDOW, LENGTH = 6, 20
DECODERS = [name for name, (config_class, _) in blockformer.PRESETS.items() if config_class is BlockformerDecoderConfig]
# Whatever a model of these presets has that those of Llama and GPT-2 do not, is in the ordinary suite.
SPECIAL = (
    *("gemma2", "gemma3_text", "olmo", "olmo2", "granite", "cohere2", "smollm3", "nemotron", "stablelm", "falcon"),
    *("bloom", "phi", "exaone4", "qwen3_5_text", "olmo_hybrid", "lfm2", "nemotron_h", "falcon_h1"),
)
CALM = {"gpt_neo": 0.3, "glm4_moe_lite": 0.2}
STATEFUL = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lara_mini", "olmo_hybrid", "lfm2", "lfm2_moe")
CALM |= dict.fromkeys(STATEFUL, 0.1)
CALM |= dict.fromkeys(("bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"), 0.1)
"""Presets in which larger weights make 1e-5 of the logits out of rounding, and the deviation that they have.

Scores without a scale, latent experts, states.
"""
WITH_STATE = {"linear_attention", "conv", "state_space"}
CASES = [pytest.param(name, marks=[] if name in SPECIAL else pytest.mark.exhaustive) for name in DECODERS]


def model_of(name, **settings):
    """A small model of a preset, its norms and biases random too."""
    config = blockformer.preset(name, **WITHOUT_MLP_WIDTH)
    inner = {} if config.intermediate_size == 4 * 32 else {"intermediate_size": 48}
    window = {} if config.sliding_window is None else {"sliding_window": WINDOW}
    per_head = {"qk_norm": "per_head", "norm_bias": False} if name == "stablelm" else {}
    calm = {"initializer_range": CALM[name]} if name in CALM else {}
    torch.manual_seed(0)
    own = {**WITHOUT_MLP_WIDTH, **inner, **window, **per_head, **calm, **settings}
    model = BlockformerDecoderForCausalLM(blockformer.preset(name, **own)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def written(model, ids, mask):
    return model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_same_numbers_and_text(name, monkeypatch):
    model = model_of(name)
    ids, mask = left_padded(3, LENGTH)
    ids = ids % 97
    real = mask.bool()
    plain = model(ids, attention_mask=mask).logits
    skipping = copy.deepcopy(model).prepare_for_training()
    assert_close(skipping(ids, attention_mask=mask, use_cache=False).logits[real], plain[real])
    pack_whatever_can_be(monkeypatch)
    prepared = copy.deepcopy(model).prepare_for_inference()
    assert bool(packed_of(prepared)) == can_pack(torch.float32)
    assert_close(prepared(ids, attention_mask=mask).logits[real], plain[real])
    assert torch.equal(written(prepared, ids, mask), written(model, ids, mask))
    cache, parts = None, []
    for part in ids[:1].split([9, 1, 1, 9], dim=1):
        output = prepared(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert_close(torch.cat(parts, dim=1), plain[:1])
    model.set_attn_implementation("eager")
    assert_close(model(ids, attention_mask=mask).logits[real], plain[real])


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_in_bfloat16_a_prepared_model_is_as_near(name, monkeypatch):
    pack_whatever_can_be(monkeypatch)
    model = model_of(name)
    ids, mask = left_padded(3, LENGTH)
    ids, real = ids % 97, mask.bool()
    exact = model(ids, attention_mask=mask).logits[real]
    narrow = model.to(torch.bfloat16)
    errors = [(narrow(ids, attention_mask=mask).logits[real].float() - exact).abs().mean()]
    narrow.prepare_for_inference()
    assert bool(packed_of(narrow)) == can_pack(torch.bfloat16)
    errors.append((narrow(ids, attention_mask=mask).logits[real].float() - exact).abs().mean())
    assert errors[1] < 1.5 * errors[0]


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_the_functions_that_are_compiled_compute_the_next_token(name):
    model = model_of(name)
    if model.config.kv_lora_rank is not None:  # its steps are not compiled on a CPU
        with pytest.raises(ValueError, match="latent attention"):
            model.prepare_for_inference(compile=True)
        return
    if (field := uncompiled_field(model.config)) is not None:
        with pytest.raises(ValueError, match=field):
            model.prepare_for_inference(compile=True)
        return
    ids, mask = left_padded(3, LENGTH)
    ids = ids % 97
    cache = model.model.new_cache()
    model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
    functions = StepFunctions(model, rows=3, copied=StepLayers(3, model.dtype, {}))
    prompt = Prompt(cache, mask[:, :-1].bool(), (mask.sum(-1, keepdim=True) - 1).clamp(min=0))
    steps = Steps(functions, prompt, room_for(LENGTH + 1), 97)
    steps.begin(prompt, ids[:, :-1], [], 0)
    steps.ids.copy_(ids[:, -1:])
    steps.advance(LENGTH, greedy=False)
    assert_close(steps.logits, model(ids, attention_mask=mask).logits[:, -1:])


@pytest.mark.parametrize("name", CASES)
def test_accumulated_steps_are_one_large_one(name, monkeypatch):
    model = model_of(name, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0).train()
    ids, mask = left_padded(4, LENGTH)
    ids = ids % 97
    labels = ids.masked_fill(mask == 0, -100)
    count = int((labels[:, 1:] != -100).sum() - sum(int(row[:-1].sum() < row[1:].sum()) for row in mask))

    def gradients(batches):
        model.zero_grad()
        losses = [
            model(ids[rows], attention_mask=mask[rows], labels=labels[rows], num_items_in_batch=count).loss
            for rows in batches
        ]
        torch.stack(losses).sum().backward()
        return sum(loss.item() for loss in losses), {
            key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None
        }

    whole, expected = gradients([slice(0, 4)])
    parts, found = gradients([slice(0, 1), slice(1, 4)])
    assert_close(parts, whole)
    assert_gradients_close(found, expected)
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS", 97 * 5)
    chunks, found = gradients([slice(0, 4)])
    assert_close(chunks, whole)
    assert_gradients_close(found, expected)
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(expected)


@pytest.mark.parametrize("name", CASES)
def test_what_the_library_is_told_of_a_model_is_there(name):
    """The plan of tensor parallelism names modules and weights, and the usual targets of LoRA are linear maps."""
    model = model_of(name)
    modules = dict(model.model.named_modules())
    parts = {**modules, **dict(model.model.named_parameters())}
    for pattern, style in model.config.base_model_tp_plan.items():
        found = [each for each in parts if re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), each)]
        assert found, pattern
        if style in ("colwise", "rowwise"):
            assert all(isinstance(parts[each], nn.Linear | nn.Parameter) for each in found)
    config = model.config
    whole = config.attention_sinks or config.kv_lora_rank or config.num_key_value_heads == 1 or config.is_varied
    is_split = config.qk_norm in (True, False, "rotated") and not whole
    assert ("layers.*.self_attn.q_proj" in config.base_model_tp_plan) == is_split
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    changed = [each for each, module in adapted.named_modules() if hasattr(module, "lora_A")]
    assert len(changed) == 2 * sum(kind not in WITH_STATE for kind in config.layer_types)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"norm_weight": "none", "norm_type": "layer_norm", "norm_bias": True},
            "norm_weight='none' needs norm_bias=False",
        ),
        ({"norm_weight": "fancy"}, "norm_weight must be one of"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be a positive number"),
        ({"attn_logit_softcapping": 9.0, "position_type": "alibi"}, "softcapping needs a decoder-only model"),
        ({"attn_logit_softcapping": 9.0, "add_cross_attention": True}, "softcapping needs a decoder-only model"),
        ({"attention_sinks": True, "add_cross_attention": True}, "attention_sinks needs a decoder-only model"),
        ({"rope_layers": [True]}, "rope_layers must list a bool for each layer"),
        ({"rope_layers": [1, 0]}, "rope_layers must list a bool for each layer"),
        ({"rope_layers": [True, False], "position_type": "none"}, "rope_layers must list a bool for each layer"),
        ({"query_growth": 0.1}, "query_growth needs original_max_position_embeddings: add it"),
        ({"query_growth": 0.1, "position_type": "learned"}, "query_growth is set but position_type is 'learned'"),
        ({"query_growth": -1}, "query_growth must be a positive number"),
        ({"qk_norm": "heads"}, "qk_norm must be one of true, false, per_head, projection, rotated"),
        ({"clip_qkv": -1.0}, "clip_qkv must be a positive number"),
        ({"residual_multiplier": 0}, "residual_multiplier must be a positive number"),
        ({"position_type": "alibi", "sliding_window": 4}, "sliding_window is not supported"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockformerDecoderConfig(**WITHOUT_MLP_WIDTH, **fields)


def test_alibi_is_a_decoders():
    with pytest.raises(ValueError, match="'alibi' needs a decoder"):
        blockformer.BlockformerEncoderConfig(position_type="alibi")


def test_a_backend_without_caps_is_refused():
    model = model_of("gemma2")
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(ValueError, match="does not support a soft cap of scores"):
        model(torch.tensor([[3, 4]]), attention_mask={"full_attention": None, "sliding_attention": None})
