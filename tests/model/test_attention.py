"""Attention: windows, cross-attention and its cache, masked heads, sinks, on every backend."""

import copy

import pairs
import pytest
import torch
from pairs import assert_close, left_padded, pair, token_ids
from sizes import STRONG
from test_axes import HEADS, LAYERS, SIZES, VOCAB, WIDTH, bert_decoders

import blockformer
from blockformer import BlockformerDecoderConfig, BlockformerDecoderModel
from blockformer.model.attention import Attention
from blockformer.model.axes import axes

TOPOLOGIES = {
    "qwen3": BlockformerDecoderModel,
    "bert": blockformer.BlockformerEncoderModel,
    "t5": blockformer.BlockformerEncoderDecoderModel,
}


@pytest.mark.portable
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_mixed_sliding_and_full_layers(backend):
    ours, theirs = pair(
        "qwen3", sliding_window=8, layer_types=["full_attention", "sliding_attention", "sliding_attention"]
    )
    ours.set_attn_implementation(backend)
    ids = token_ids(2, 40)
    assert_close(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", TOPOLOGIES)
def test_a_row_that_is_all_padding_is_finite_in_every_dtype(family, dtype):
    torch.manual_seed(0)
    config = blockformer.preset(family, **{**STRONG, "initializer_range": 0.2})
    a_model = TOPOLOGIES[family](config).eval().to(dtype)
    a_model.set_attn_implementation("eager")
    ids = token_ids(2, 6, vocab=96)
    given = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 6, [0] * 6])}
    given |= {"decoder_input_ids": ids} if family == "t5" else {}
    states = a_model(**given).last_hidden_state
    alone = a_model(**{name: each[:1] for name, each in given.items()}).last_hidden_state
    states.float().square().sum().backward()
    assert states.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in a_model.parameters() if weight.grad is not None)
    assert_close(states[:1], alone, 1e-5 if dtype in (torch.float64, torch.float32) else 0.02)


@pytest.mark.portable
def test_cross_keys_are_projected_once_and_reused():
    ours, _ = bert_decoders()
    ids, states = token_ids(2, 12, vocab=VOCAB), torch.randn(2, 9, WIDTH)
    whole = ours(ids, encoder_hidden_states=states).last_hidden_state
    calls = []
    for layer in ours.layers:
        layer.cross_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))
    first = ours(ids[:, :7], encoder_hidden_states=states, use_cache=True)
    rest = ours(ids[:, 7:], encoder_hidden_states=states, past_key_values=first.past_key_values, use_cache=True)
    assert_close(torch.cat((first.last_hidden_state, rest.last_hidden_state), dim=1), whole)
    assert len(calls) == LAYERS


@pytest.mark.portable
def test_self_and_cross_attentions_are_captured_apart():
    ours, theirs = bert_decoders()
    for model in (ours, theirs):
        model.set_attn_implementation("eager")
    ids, states = token_ids(2, 12, vocab=VOCAB), torch.randn(2, 9, WIDTH)
    arguments = {"encoder_hidden_states": states, "output_attentions": True, "output_hidden_states": True}
    mine, official = ours(ids, **arguments), theirs(ids, **arguments)
    for kind in ("attentions", "cross_attentions", "hidden_states"):
        assert len(mine[kind]) == len(official[kind])
        for one, other in zip(mine[kind], official[kind], strict=True):
            assert_close(one, other)


@torch.no_grad()
def test_a_head_mask_reaches_cross_attention_unless_that_has_its_own():
    """In a decoder alone, as in the first article's layer: a head's columns of both projections are as if zero."""
    ours, _ = bert_decoders()
    ids, source = token_ids(2, 7, vocab=VOCAB), torch.randn(2, 5, ours.config.hidden_size)
    mask, ones = torch.ones(LAYERS, HEADS), torch.ones(LAYERS, HEADS)
    mask[1, 2] = 0
    both = ours(ids, encoder_hidden_states=source, head_mask=mask).last_hidden_state
    own = ours(ids, encoder_hidden_states=source, head_mask=mask, cross_attn_head_mask=ones).last_hidden_state
    layer = ours.layers[1]
    columns = slice(2 * ours.config.head_dim, 3 * ours.config.head_dim)
    layer.self_attn.o_proj.weight[:, columns] = 0
    assert_close(own, ours(ids, encoder_hidden_states=source).last_hidden_state)
    layer.cross_attn.o_proj.weight[:, columns] = 0
    assert_close(both, ours(ids, encoder_hidden_states=source).last_hidden_state)
    assert not torch.allclose(both, own)


@pytest.mark.portable
def test_head_mask_silences_a_head_on_every_backend():
    model = BlockformerDecoderModel(BlockformerDecoderConfig(**SIZES, initializer_range=0.3)).eval()
    ids, head_mask = token_ids(2, 9, vocab=VOCAB), torch.ones(LAYERS, HEADS)
    head_mask[1, 2] = 0
    sdpa = model(ids, head_mask=head_mask).last_hidden_state
    model.set_attn_implementation("eager")
    assert_close(model(ids, head_mask=head_mask).last_hidden_state, sdpa)
    with torch.no_grad():
        model.layers[1].self_attn.v_proj.weight[2 * 12 : 3 * 12] = 0
    assert_close(model(ids).last_hidden_state, sdpa)


@pytest.mark.parametrize("position_type", ["relative_bias", "relative_key"])
def test_relative_terms_refuse_a_backend_that_takes_none(position_type):
    model = BlockformerDecoderModel(BlockformerDecoderConfig(**SIZES, position_type=position_type)).eval()
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match="use 'sdpa' or 'eager'"):
        model(token_ids(1, 5, vocab=VOCAB))


@pytest.mark.parametrize("way", ["sdpa", "prepared"])
def test_sinks_take_their_share_on_every_way(way):
    """A sink is one more key of which the value is 0: written out as such, for padded rows and windows."""
    settings = {"attention_sinks": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    config = blockformer.BlockformerDecoderConfig(**{**pairs.SIZES, "num_hidden_layers": 2, **settings})
    torch.manual_seed(0)
    ours = blockformer.BlockformerDecoderForCausalLM(config).eval()
    for layer in ours.model.layers:
        layer.self_attn.sinks.data.normal_(std=2.0)
    plain = copy.deepcopy(ours)
    ids, mask = left_padded(3, 9)
    found = []
    for layer in plain.model.layers:
        layer.self_attn.register_forward_hook(lambda module, given, output: found.append((module, output[1])))
    plain.set_attn_implementation("eager")
    expected = plain(ids, attention_mask=mask).logits[mask.bool()]
    for module, probabilities in found:
        share = 1 - probabilities.sum(-1)[0]  # of the sinks, in the row without padding, [H, T]
        assert ((share > 0) & (share < 1)).all()
        assert (share.mean(-1)[module.sinks.argmax()] > share.mean(-1)[module.sinks.argmin()]).all()
    if way == "prepared":
        ours.prepare_for_inference()
    assert_close(ours(ids, attention_mask=mask).logits[mask.bool()], expected)
    text = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(ours.generate(ids, **text), plain.generate(ids, **text))


@torch.no_grad()
@pytest.mark.portable
@pytest.mark.parametrize("way", ["eager", "sdpa", "prepared"])
@pytest.mark.parametrize("name", ["qwen3", "bert", "t5"])
def test_a_gate_is_its_formula(name, way):
    """Hooks on a model without one: what the output projection reads, times the sigmoid of a product of the states."""
    settings = {**pairs.SIZES, "num_key_value_heads": 4, "decoder_start_token_id": 0}
    known = {field: settings[field] for field in settings if field in axes(type(blockformer.preset(name)))}
    plain, gated = (
        TOPOLOGIES[name](blockformer.preset(name, **known, attention_gate=is_gated)) for is_gated in (False, True)
    )
    left = plain.eval().load_state_dict(gated.eval().state_dict(), strict=False)
    gates = [key.removesuffix(".gate_proj.weight") for key in left.unexpected_keys if "self_attn.gate_proj" in key]
    assert (left.missing_keys, len(gates)) == ([], len(left.unexpected_keys))
    assert len(gates) == 3 * (1 + plain.config.is_encoder_decoder)
    for place in gates:
        attention, weight, read = plain.get_submodule(place), gated.get_submodule(place).gate_proj.weight, []
        attention.register_forward_pre_hook(
            lambda _, args, given, read=read: read.append(given["hidden_states"]), with_kwargs=True
        )
        attention.o_proj.register_forward_pre_hook(
            lambda _, given, read=read, weight=weight: (given[0] * torch.sigmoid(read.pop() @ weight.T),)
        )
    for model in (plain, gated):
        model.set_attn_implementation("eager" if way == "eager" else "sdpa")
        if name == "t5":  # whose unscaled attention makes much of rounding
            model.double()
    if way == "prepared":
        gated.prepare_for_inference()
    ids, mask = left_padded(3, 9)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if plain.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = token_ids(len(ids), 7)
    seen = slice(None) if plain.config.is_encoder_decoder else mask.bool()
    assert_close(*(model(**inputs).last_hidden_state[seen] for model in (gated, plain)))


@pytest.mark.parametrize(
    ("fields", "backend", "what"),
    [
        ({"attention_sinks": True}, "vllm", "attention sink"),
        ({"attn_logit_softcapping": 5.0}, "paged|sdpa", "soft cap of scores"),
        ({"pruned_heads": {0: [1]}}, "vllm", "layer of fewer heads"),
        ({"position_type": "relative_bias"}, "vllm", "relative position term"),
        ({"position_type": "relative_bias"}, "paged|eager", "relative position term"),
    ],
)
def test_a_backend_that_knows_nothing_of_a_layer_is_refused_when_it_is_made(fields, backend, what):
    """And in `forward`, as before: the backend may be set on the config later."""
    config = BlockformerDecoderConfig(**SIZES, **fields)
    layer = Attention(config, 0, is_causal=True)
    config._attn_implementation_internal = backend
    with pytest.raises(ValueError, match=f"does not support a {what}; use 'sdpa' or 'eager'"):
        Attention(config, 0, is_causal=True)
    with pytest.raises(ValueError, match=f"does not support a {what}; use 'sdpa' or 'eager'"):
        layer(torch.zeros(1, 3, config.hidden_size))
