"""Attention that is not the same in all layers, and vectors that layers take of the tokens.

That both are transformers' is tested by the families that have them (`conversion/test_decoder_families.py`).
"""

import copy

import pytest
import torch
from pairs import assert_close, assert_gradients_close
from transformers import DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig

import blockformer
from blockformer.engine import explain
from blockformer.model.varied_attention import VariedAttention
from blockformer.pictures.words import attention_words

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
VARIED = {
    "attention_by_type": {FULL: {"head_dim": 16, "num_key_value_heads": 1, "keys_as_values": True}},
    "num_shared_kv_layers": 2,
    "value_norm": True,
}
SETTINGS = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": [SLIDING, FULL] * 2,
    "sliding_window": 5,
    "qk_norm": True,
    "attention_scale": 1.0,
    "rope_parameters": ROPE,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    **VARIED,
}
MORE = {"hidden_size_per_layer_input": 6, "intermediate_sizes": [48, 48, 40, 96], "layer_scale": True}


def config_of(**changes):
    return blockformer.BlockformerDecoderConfig(**copy.deepcopy(SETTINGS) | changes)


def model_of(cls=blockformer.BlockformerDecoderForCausalLM, **changes):
    torch.manual_seed(0)
    model = cls(config_of(**changes)).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or name.endswith("scale"):
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return model


def tokens(rows=2, length=19):
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(1))


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


REFUSED = {
    "no such type": ({"attention_by_type": {"chunked": {}}}, "names 'chunked', which layer_types does not"),
    "no dict at all": ({"attention_by_type": [FULL]}, "must be a dict, layer type -> a dict"),
    "parallel": (
        {"layer_scale": True, "residual": "parallel"},
        "layer_scale=True is not supported with residual='parallel': leave one",
    ),
    "no dict": ({"attention_by_type": {FULL: 3}}, "must be a dict, layer type -> a dict"),
    "no such setting": ({"attention_by_type": {FULL: {"heads": 3}}}, "has heads=3: head_dim and num_key_value_heads"),
    "a size of 0": ({"attention_by_type": {FULL: {"head_dim": 0}}}, "has head_dim=0: head_dim"),
    "no flag": ({"attention_by_type": {FULL: {"keys_as_values": 1}}}, "has keys_as_values=1"),
    "groups": (
        {"attention_by_type": {FULL: {"num_key_value_heads": 3}}},
        r"not a multiple of num_key_value_heads \(3\)",
    ),
    "an odd size": ({"attention_by_type": {FULL: {"head_dim": 9}}}, r"head_dim \(9\) must be even"),
    "one rotation": (
        {"rope_parameters": {"rope_theta": 10.0}},
        "heads of several sizes, which rotate at different frequencies",
    ),
    "another rotation": (
        {"rope_parameters": ROPE | {FULL: {"rope_type": "linear", "factor": 2.0}}},
        "another head_dim and rope_type 'linear' is untested: use 'default' or 'proportional'",
    ),
    "too many": ({"num_shared_kv_layers": 3}, "leaves no layer of 'full_attention' that makes keys: make it smaller"),
    "far too many": ({"num_shared_kv_layers": 9}, "leaves no layer of 'full_attention'"),
    "latents": ({"kv_lora_rank": 4, "num_key_value_heads": 4}, "kv_lora_rank"),
    "sinks": ({"attention_sinks": True}, "is not supported with attention_sinks=True: leave one of the two out"),
    "pruned": ({"pruned_heads": {0: [0, 1]}}, "is not supported with pruned_heads="),
    "another norm": ({"qk_norm": "per_head"}, "is not supported with qk_norm='per_head'"),
    "cross-attention": ({"add_cross_attention": True}, "is not supported with add_cross_attention=True"),
    "states": (
        {"layer_types": [SLIDING, FULL, "conv", FULL], "num_shared_kv_layers": 1},
        r"is not supported with layer_types=\[.*'conv'.*\]: leave one of the two out",
    ),
    "positions": ({"position_type": "learned", "rope_parameters": None}, "with position_type='learned': use 'rotary'"),
    "widths": ({"intermediate_sizes": [48, 48]}, "must list a positive integer for each of the 4 layers"),
    "no widths": ({"intermediate_sizes": [48, 0, 48, 48]}, "must list a positive integer"),
    "experts": (
        {"intermediate_sizes": MORE["intermediate_sizes"], "num_experts": 4},
        "not supported with num_experts=4",
    ),
    "inputs": ({"hidden_size_per_layer_input": 6, "token_embedding_size": 16}, "with token_embedding_size=16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        config_of(**changes)
    assert len(str(caught.value).splitlines()) == 1


@torch.no_grad()
def test_a_model_that_looks_both_ways_sees_a_row_as_if_it_were_alone():
    """With keys that later layers read, windows and per-layer embeddings; padding on either side is not seen."""
    model, ids = model_of(blockformer.BlockformerDecoderModel, bidirectional=True, **MORE), tokens()
    alone = model(ids[1:, :12]).last_hidden_state[0]
    for side in (slice(0, 12), slice(7, 19)):
        padded, mask = ids.clone(), torch.ones_like(ids)
        mask[1], padded[1] = 0, 0
        mask[1, side], padded[1, side] = 1, ids[1, :12]
        assert_close(model(padded, attention_mask=mask).last_hidden_state[1, side], alone)
    changed = ids[1:, :12].clone()
    changed[0, -1] += 1
    assert ((model(changed).last_hidden_state[0, 0] - alone[0]).abs() > 1e-4).any()


def test_neutral_settings_are_as_good_as_none():
    config = config_of(attention_by_type={}, intermediate_sizes=[48] * 4, rope_parameters=ROPE, num_shared_kv_layers=0)
    assert (config.attention_by_type, config.intermediate_sizes) == (None, None)
    assert config_of(attention_by_type=None, value_norm=False, num_shared_kv_layers=0).is_varied is False


def test_a_repo_says_it_again(tmp_path):
    model = model_of(**MORE)
    model.save_pretrained(tmp_path)
    again = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path)
    assert {name: getattr(again.config, name) for name in (*VARIED, *MORE)} == {**VARIED, **MORE}
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_layers_hold_what_they_need():
    layers = model_of(**MORE).model.layers
    attentions = [layer.self_attn for layer in layers]
    assert all(isinstance(each, VariedAttention) for each in attentions)
    assert [each.head_dim for each in attentions] == [8, 16, 8, 16]
    assert [each.k_proj is None for each in attentions] == [False, False, True, True]
    assert [each.v_proj is None for each in attentions] == [False, True, True, True]
    assert [each.cached_numbers for each in attentions] == [2 * 2 * 8, 2 * 16, 0, 0]
    assert [layer.mlp.up_proj.out_features for layer in layers] == MORE["intermediate_sizes"]
    sizes, words = zip(*(attention_words(layer.self_attn, layer) for layer in layers), strict=True)
    assert sizes[1] == "4 heads of 16, 1 key/value head"
    assert {"values are the keys", "value norm", "rotary on 25%, proportional"} <= {*words[1]}
    assert "keys and values of an earlier layer" in words[3]


def test_values_by_hand():
    """One head that sees itself only: the output is its own value, the normed and unturned key."""
    model = model_of(layer_types=[FULL] * 4, sliding_window=None, rope_parameters={FULL: ROPE[FULL]}, qk_norm=False)
    part, states = model.model.layers[0].self_attn, torch.randn(1, 1, 32)
    given = model.model.rotary_emb[FULL](states, torch.tensor([[7]]))
    output, _ = part(states, position_embeddings=given, earlier=None)
    value = part.k_proj(states)
    value = value / (value.pow(2).mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
    assert_close(output, part.o_proj(value.repeat(1, 1, 4)))


def test_proportional_frequencies_by_hand():
    rotary = model_of().model.rotary_emb[FULL]
    assert_close(rotary.inv_freq, torch.tensor([1.0, 1e4 ** (-2 / 16), 0, 0, 0, 0, 0, 0]))


def test_vectors_of_tokens_by_hand():
    model = model_of(**MORE, embedding_scale=2.0).model
    part, ids = model.token_inputs, tokens(1, 3)
    states = 2 * model.embed_tokens(ids)
    projected = (part.projection(states) * 32**-0.5).view(1, 3, 4, 6)
    wanted = (part.norm(projected) + part.embed_tokens(ids).view(1, 3, 4, 6) * 6**0.5) / 2**0.5
    assert_close(part(ids, states), wanted)
    layer, vectors = model.layers[2], wanted[:, :, 2]
    gated = layer.end.act_fn(layer.end.input_gate(states)) * vectors
    assert_close(layer.end(states, vectors), (states + layer.end.norm(layer.end.projection(gated))) * layer.end.scale)


@pytest.mark.parametrize("more", [{}, MORE], ids=["varied", "with vectors"])
def test_texts_in_one_row_are_each_by_itself(more):
    model, ids = model_of(**more), tokens(1, 19)
    places = torch.cat((torch.arange(11), torch.arange(8)))[None]
    apart = torch.cat((model(ids[:, :11]).logits, model(ids[:, 11:]).logits), dim=1)
    assert_close(model(ids, position_ids=places, use_cache=False).logits, apart)


@torch.no_grad()
def test_steps_and_crops_and_other_caches_are_exact():
    model, ids = model_of(**MORE), tokens(2, 19)
    whole, cache = model(ids).logits, DynamicCache(config=model.config)
    model(torch.cat((ids[:, :9], ids[:, :4]), dim=1)[:, :4], past_key_values=cache)
    cache.crop(-1)
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((3, 9), (9, 10), (10, 19))]
    assert_close(torch.cat(parts, dim=1), whole[:, 3:])
    given = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **given), model.generate(ids, cache_implementation="static", **given))
    assert torch.equal(model.generate(ids, **given), model.generate(ids, use_cache=False, **given))


@pytest.mark.parametrize("cls", [blockformer.BlockformerDecoderModel, blockformer.BlockformerDecoderForCausalLM])
def test_checkpoints_of_layers_change_no_gradient(cls):
    model, ids = model_of(cls, **MORE).train(), tokens()
    model(ids)[0].float().square().mean().backward()
    plain = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(ids)[0].float().square().mean().backward()
    assert_gradients_close(gradients(model), plain)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=True loses the gradients of 'keys_of_"):
        model(ids)[0].float().square().mean().backward()


def test_reentrant_checkpoints_keep_the_gradients_of_vectors():
    model, ids = model_of(**MORE, num_shared_kv_layers=0).train(), tokens()
    model(ids)[0].float().square().mean().backward()
    plain = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model(ids)[0].float().square().mean().backward()
    assert_gradients_close(gradients(model), plain)


def test_the_factor_of_a_layer_does_not_learn():
    model = model_of(**MORE)
    assert not any(name.endswith(".scale") for name, _ in model.named_parameters())
    assert {name for name in model.state_dict() if name.endswith(".scale")}
    assert torch.equal(blockformer.BlockformerDecoderModel(config_of(**MORE)).layers[0].end.scale, torch.ones(1))


def test_the_table_for_all_layers_learns_of_padding_what_the_official_one_does(tmp_path):
    sizes = {name: SETTINGS[name] for name in SETTINGS if name not in (*VARIED, "qk_norm", "attention_scale")}
    sizes |= {"global_head_dim": 16, "num_kv_shared_layers": 2, "tie_word_embeddings": True}
    sizes |= {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 61}
    torch.manual_seed(0)
    theirs = Gemma4ForCausalLM(Gemma4TextConfig(**sizes)).eval()
    theirs.save_pretrained(tmp_path)
    ours, ids = blockformer.from_official(tmp_path).eval(), tokens()
    ids[:, 5:8] = 0
    for model in (ours, theirs):
        model(ids, labels=ids).loss.backward()
    table, official = ours.model.token_inputs.embed_tokens.weight, theirs.model.embed_tokens_per_layer.weight
    assert not official.grad[0].any()
    assert_close(table.grad, official.grad)


def test_new_tokens_get_rows_for_all_layers():
    model, ids = model_of(**MORE), tokens()
    before = model(ids).logits
    model.resize_token_embeddings(70)
    assert model.model.token_inputs.embed_tokens.weight.shape == (70, 4 * 6)
    assert_close(model(ids).logits[..., :61], before)
    assert model(torch.full((1, 3), 69)).logits.isfinite().all()


def test_a_prepared_model_computes_the_same_and_says_why_it_is_not_compiled():
    model, ids = model_of(**MORE), tokens()
    plain = copy.deepcopy(model)
    blockformer.prepare_for_inference(model)
    assert_close(model(ids).logits, plain(ids).logits)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for beams in (1, 3):
        given = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "num_beams": beams}
        assert torch.equal(model.generate(ids, **given), plain.generate(ids, **given))
    part = next(part for part in explain(model).parts if part.name == "one more token")
    assert part.way.startswith("plain PyTorch")
    assert part.reason == "it is not compiled with attention_by_type"
    with pytest.raises(ValueError, match=r"compile=True is not supported with attention_by_type=.*prepare the model"):
        blockformer.prepare_for_inference(model, compile=True)


def test_padding_is_skipped_in_training_with_vectors_of_tokens():
    kinds = {"layer_types": [FULL] * 4, "sliding_window": None, "rope_parameters": {FULL: ROPE[FULL]}}
    model, ids, mask = model_of(**MORE, **kinds).train(), tokens(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[0, 9:] = mask[1, 17:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    plain = copy.deepcopy(model)
    plain(ids, attention_mask=mask, labels=labels).loss.backward()
    blockformer.prepare_for_training(model)
    model.model.runtime.least_saving = 0
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    assert_gradients_close(gradients(model), gradients(plain))


def test_what_would_change_layers_is_refused_by_name():
    model = model_of(**MORE)
    with pytest.raises(ValueError, match="layers cannot be chosen with num_shared_kv_layers=2"):
        blockformer.reshape(model, layers=[0, 1])
    with pytest.raises(ValueError, match="kv_heads is not supported with attention_by_type="):
        blockformer.reshape(model, kv_heads=1)
    with pytest.raises(ValueError, match="is not supported with pruned_heads="):
        blockformer.prune_heads(model, {0: [0, 1]})
    with pytest.raises(ValueError, match="pass input_ids, not inputs_embeds"):
        model(inputs_embeds=torch.randn(1, 3, 32))


def test_some_layers_of_other_widths_can_be_chosen():
    model = model_of(num_shared_kv_layers=0, intermediate_sizes=MORE["intermediate_sizes"])
    small = blockformer.reshape(model, layers=[1, 2])
    assert small.config.intermediate_sizes == [48, 40]
    assert small.config.layer_types == [FULL, SLIDING]


def test_attention_is_whole_in_each_process():
    plan = config_of(**MORE).base_model_tp_plan
    assert not any("self_attn" in name for name in plan)
    assert plan["layers.*.mlp.up_proj"] == "colwise"


def test_backends_with_one_cache_for_all_layers_are_refused():
    model = model_of()
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(ValueError, match="does not support a cache whose layers are not alike"):
        model(tokens())
