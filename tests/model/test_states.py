"""Layers with a state: the rule in chunks is the rule, and nothing but a row's own text reaches a state."""

import copy

import pytest
import torch
import transformers
from accelerate import cpu_offload
from pairs import assert_close, assert_gradients_close, token_ids
from recurrences import assert_chunks_follow, assert_one_follows, assert_packed_texts_are_apart
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
)

import blockformer
from blockformer.model import states
from blockformer.model.delta_rule import CHUNK, delta_rule_by_chunk, delta_rule_by_token, delta_rule_of_one

STATE, CONV, SCAN, BOTH, FULL = "linear_attention", "conv", "state_space", "attention_and_state_space", "full_attention"
STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
SCANS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
FACTORS = {"mamba_output_norm": "before_gate", "key_multiplier": 0.4, "attention_in_multiplier": 1.3}
FACTORS |= {"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6}
FACTORS |= {"ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.5]}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.1,
    "layer_types": [STATE, FULL, STATE],
}
QWEN = {"norm_weight": "zero_centered", "qk_norm": True, "attention_gate": True}
PLAIN = {"layer_types": [FULL] * 3}
SLIDING, WINDOWS = "sliding_attention", "windows next to states"
LENGTH = 150  # more than two chunks
OF_KIND = {
    STATE: {**STATES, **QWEN},
    CONV: {"layer_types": [CONV, FULL, CONV], "conv_L_cache": 3, "conv_bias": True},
    SCAN: {"layer_types": [SCAN, FULL, SCAN], **SCANS, "mamba_proj_bias": True},
    WINDOWS: {
        "layer_types": [STATE, SLIDING, FULL],
        "sliding_window": 40,
        **STATES,
        "rope_layers": [False, True, False],
    },
    BOTH: {"layer_types": [BOTH, FULL, BOTH], **SCANS, **FACTORS, "mamba_proj_bias": True},
}


def config(kind=STATE, **more):
    return blockformer.BlockformerDecoderConfig(**{**SIZES, **OF_KIND[kind], **more})


def model(kind=STATE, seed=0, **more):
    torch.manual_seed(seed)
    a_model = blockformer.BlockformerDecoderForCausalLM(config(kind, **more)).eval()
    with torch.no_grad():
        for name, parameter in a_model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    return a_model


@pytest.fixture(params=[STATE, CONV, SCAN, BOTH, WINDOWS])
def kind(request):
    return request.param


def official(name):
    """A model of transformers' with layers that keep a state."""
    sizes = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "lfm2":
        return Lfm2ForCausalLM(Lfm2Config(**{**sizes, "layer_types": [CONV, FULL, CONV], "block_multiple_of": 8}))
    if name == "bamba":
        del sizes["layer_types"], sizes["head_dim"]
        return BambaForCausalLM(BambaConfig(**sizes, **SCANS, attn_layer_indices=[1]))
    if name == "falcon_h1":
        del sizes["layer_types"]
        factors = {key: value for key, value in FACTORS.items() if "multiplier" in key}
        return FalconH1ForCausalLM(FalconH1Config(**sizes, **SCANS, **factors, mamba_d_ssm=64))
    if name == "olmo_hybrid":
        del sizes["head_dim"]
        settings = {**sizes, **STATES, "linear_num_key_heads": 4, "rope_parameters": {"rope_theta": None}}
        return OlmoHybridForCausalLM(OlmoHybridConfig(**settings))
    settings = {**SIZES, **STATES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if name == "lara_mini":
        if not hasattr(transformers, "LaraMiniConfig"):
            pytest.skip(f"transformers {transformers.__version__} has no lara_mini")
        settings |= {"layer_types": [STATE, SLIDING, FULL], "sliding_window": 40, "pad_token_id": 0}
        return transformers.LaraMiniForCausalLM(transformers.LaraMiniConfig(**settings))
    return Qwen3NextForCausalLM(Qwen3NextConfig(**settings, mlp_only_layers=[1], pad_token_id=0))


@pytest.fixture(scope="module", params=["qwen3_next", "olmo_hybrid", "lfm2", "bamba", "falcon_h1", "lara_mini"])
def pair(request, tmp_path_factory):
    """A model of transformers', and ours that was converted from it."""
    torch.manual_seed(0)
    theirs = official(request.param).eval()
    folder = tmp_path_factory.mktemp("official")
    theirs.save_pretrained(folder)
    return blockformer.from_official(folder), theirs


def given(length, rows=2, heads=3, keys=8, values=5, seed=0):
    """Unit queries and keys, values, decays and steps of random tokens, and a state, in float64."""
    source = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, rows, heads, length, keys, dtype=torch.float64, generator=source)
    value = torch.randn(rows, heads, length, values, dtype=torch.float64, generator=source)
    decay, step = torch.rand(2, rows, heads, length, dtype=torch.float64, generator=source)
    state = torch.randn(rows, heads, keys, values, dtype=torch.float64, generator=source)
    return (
        torch.nn.functional.normalize(query, dim=-1),
        torch.nn.functional.normalize(key, dim=-1),
        value,
        -decay,
        step,
        state,
    )


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, LENGTH])
def test_chunks_give_outputs_state_and_gradients_of_the_definition(length):
    assert_chunks_follow(delta_rule_by_token, delta_rule_by_chunk, given(length))


@torch.no_grad()
def test_one_token_more_is_the_definition_too():
    assert_one_follows(delta_rule_by_token, delta_rule_of_one, given(1))


def test_sequences_of_a_row_do_not_see_each_other():
    assert_packed_texts_are_apart(delta_rule_by_token, delta_rule_by_chunk, given(LENGTH, rows=1))


def test_a_strong_decay_and_long_texts_stay_finite():
    query, key, value, _, step, state = (each.float() for each in given(4 * CHUNK))
    for decay in (0.0, -30.0, -1e4):
        output, last = delta_rule_by_chunk(query, key, value, torch.full_like(step, decay), step, state)
        wanted, end = delta_rule_by_token(query, key, value, torch.full_like(step, decay), step, state)
        assert_close([output, last], [wanted, end])


@torch.no_grad()
def test_numbers_and_text_are_those_of_transformers(pair):
    ours, theirs = pair
    ids = token_ids(3, LENGTH, vocab=97)
    assert_close(ours(ids).logits, theirs(ids).logits)
    mask = torch.ones_like(ids)
    mask[0, :40] = mask[1, :1] = 0
    named = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    assert_close(ours(ids, **named).logits[mask.bool()], theirs(ids, **named).logits[mask.bool()])
    for more in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"cache_implementation": "static"}):
        job = {"attention_mask": mask[:, :60], "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **more}
        assert torch.equal(ours.generate(ids[:, :60], **job), theirs.generate(ids[:, :60], **job)), more


@torch.no_grad()
def test_padding_on_the_left_changes_nothing(kind):
    a_model = model(kind)
    ids = token_ids(2, LENGTH, vocab=97)
    for gap in (1, 3, CHUNK, CHUNK + 9):
        mask = torch.ones_like(ids)
        mask[0, :gap] = 0
        padded = a_model(ids, attention_mask=mask).logits
        assert_close(padded[:1, gap:], a_model(ids[:1, gap:]).logits)
        assert_close(padded[1:], a_model(ids[1:]).logits)


@torch.no_grad()
@pytest.mark.parametrize("split", [[1] * 9, [2, 1, 1, 5], [CHUNK + 3, 1, 2, 4, CHUNK, 1], [3, LENGTH - 3]])
@pytest.mark.parametrize("pads", [False, True])
def test_texts_come_in_any_parts(kind, split, pads):
    a_model, length = model(kind), sum(split)
    ids, mask = token_ids(2, length, vocab=97), torch.ones(2, length, dtype=torch.long)
    mask[0, : 2 * pads] = 0
    whole = a_model(ids, attention_mask=mask).logits
    cache, parts, end = None, [], 0
    for part in ids.split(split, dim=1):
        end += part.shape[1]
        output = a_model(part, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert_close(torch.cat(parts, dim=1)[mask.bool()], whole[mask.bool()])


@torch.no_grad()
@pytest.mark.parametrize("way", ["position_ids", "cu_seq_lens_q"])
def test_packed_texts_are_as_each_by_itself(kind, way):
    a_model, lengths = model(kind), (70, 1, 2, 77)
    ids = token_ids(1, LENGTH, vocab=97)
    alone = torch.cat([a_model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packed = a_model(ids, use_cache=False, **{way: {"position_ids": positions, "cu_seq_lens_q": starts}[way]}).logits
    assert_close(packed, alone)


def test_padding_and_packed_texts_learn_nothing_of_each_other(kind):
    a_model = model(kind)
    ids = token_ids(1, 12, vocab=97)
    embeds = a_model.get_input_embeddings()(ids).detach().requires_grad_()
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]
    a_model(inputs_embeds=embeds, position_ids=positions, use_cache=False).logits[:, 7:].sum().backward()
    gradient = embeds.grad.abs()
    assert gradient[:, :7].max() < 1e-6 * gradient[:, 7:].max()  # the sum of their decays, which cancels


def test_a_model_learns_the_same_in_one_piece_and_by_checkpointing(kind):
    a_model = model(kind).train()
    ids = token_ids(2, 80, vocab=97)

    def gradients():
        a_model.zero_grad()
        a_model(ids, labels=ids).loss.backward()
        return {name: each.grad.clone() for name, each in a_model.named_parameters()}

    plain = gradients()
    a_model.gradient_checkpointing_enable()
    assert_gradients_close(gradients(), plain)
    assert all(each.any() for each in plain.values())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow(kind, dtype):
    a_model = model(kind, initializer_range=1.0)
    ids = token_ids(2, LENGTH, vocab=97)
    exact, narrow = a_model.double(), copy.deepcopy(a_model).to(dtype)
    found, wanted = narrow(ids, use_cache=True), exact(ids).logits
    assert torch.isfinite(found.logits).all()
    state = found.past_key_values.layers[0].recurrent_states
    state = state[0] if isinstance(state, dict) else state
    assert kind == CONV or state.isfinite().all()
    theirs = (found.logits.double() - wanted).abs().mean() / wanted.abs().mean()
    assert theirs < (0.2 if dtype is torch.float16 else 0.8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(model(kind)(ids).logits).all()


def test_a_fresh_model_has_decays_of_every_rate():
    layers = model().model.layers
    rates = layers[0].self_attn.A_log.exp()
    assert rates.min() > 0
    assert rates.max() <= 16
    assert len(rates.unique()) == len(rates)
    assert torch.equal(layers[0].self_attn.dt_bias, torch.ones_like(rates))
    assert type(layers[0].self_attn).__name__ == "GatedDeltaRule"
    assert type(layers[1].self_attn).__name__ == "Attention"


@torch.no_grad()
def test_caches_that_do_not_fit_are_refused(kind):
    a_model, ids = model(kind), token_ids(2, 6, vocab=97)
    cache = a_model(ids, use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match="past_key_values holds 2 rows, the input has 1: use a cache of the same batch"
    ):
        a_model(ids[:1], past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"\(DynamicCache\) keeps no state for layer 0: make it with DynamicCache\(config"
    ):
        a_model(ids, past_key_values=DynamicCache())
    first = a_model.config.layer_types[0]
    with pytest.raises(ValueError, match=f"head_mask is not supported with layer_types of '{first}'"):
        a_model(ids, head_mask=torch.ones(3, 2))
    stranger = CONV if kind != CONV else SCAN
    other = model(stranger, layer_types=[stranger, FULL, FULL if kind == WINDOWS else stranger])
    with pytest.raises(ValueError, match=r"holds a state of sizes \[.*\] for layer 0, whose sizes are \[.*\]: make it"):
        a_model(ids, past_key_values=other(ids, use_cache=True).past_key_values)
    of_another = config(kind, layer_types=[first] * 2 + [FULL], sliding_window=None)
    if kind != BOTH:  # whose layers keep keys, too
        with pytest.raises(ValueError, match="past_key_values has no keys for layer 1: use DynamicCache"):
            a_model(ids, past_key_values=DynamicCache(config=of_another))
        plain = blockformer.BlockformerDecoderForCausalLM(blockformer.BlockformerDecoderConfig(**SIZES | PLAIN))
        for _ in range(2):
            with pytest.raises(ValueError, match="past_key_values has no keys for layer 0: use DynamicCache"):
                plain(ids, past_key_values=cache)
            blockformer.prepare_for_inference(plain.eval())
    room = StaticCache(config=a_model.config, max_cache_len=8)
    assert_close(a_model(ids, past_key_values=room).logits, a_model(ids).logits)


@torch.no_grad()
def test_packed_rows_with_padding_and_masks_of_pairs_are_refused(kind):
    a_model, ids = model(kind), token_ids(2, 6, vocab=97)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match="position_ids start again in a row where attention_mask hides tokens: pack"):
        a_model(ids, attention_mask=mask, position_ids=positions)
    a_model(ids, attention_mask=mask, position_ids=torch.arange(6)[None])
    whole = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    with pytest.raises(
        ValueError, match=r"attention_mask is \[2, 1, 6, 6\], but some layers keep a state: pass one of"
    ):
        a_model(ids, attention_mask=whole)


@torch.no_grad()
@pytest.mark.parametrize("kind", [STATE, SCAN, BOTH])
def test_what_would_crop_a_state_is_refused(kind):
    a_model, ids = model(kind), token_ids(1, 8, vocab=97)
    for draft in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": model(kind, 1)}, {"assistant_early_exit": 1}):
        with pytest.raises(ValueError, match="not supported with stateful models"):
            a_model.generate(ids, max_new_tokens=3, **draft)
    cache = DynamicCache(config=a_model.config)
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
        with pytest.raises(ValueError, match="past_key_values would be cropped, but a state cannot go back"):
            a_model(ids, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("prepares", [False, True])
def test_a_convolution_goes_back_and_takes_drafts(prepares):
    """As in transformers, whose cache keeps the tokens that a convolution sees until it is cropped."""
    a_model, assistant = model(CONV), model(CONV, 1)
    if not hasattr(DynamicCache, "activate_past_recording"):
        assert a_model._is_stateful
        return
    a_model = a_model.prepare_for_inference() if prepares else a_model
    drafts: list = [{"prompt_lookup_num_tokens": count} for count in (1, 3)]
    drafts += [{"assistant_model": assistant}, {"assistant_early_exit": 2}]
    for length in (1, 2, 9):
        ids = token_ids(1, length, seed=length, vocab=97).repeat(1, 2)
        job = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
        text = a_model.generate(ids, **job)
        for draft in drafts:
            assert torch.equal(a_model.generate(ids, **job, **draft), text), draft
    for length in (1, 2, 8):
        ids, cache = token_ids(2, length + 4, vocab=97), DynamicCache(config=a_model.config)
        cache.activate_past_recording()
        a_model(torch.cat((ids[:, :length], ids[:, :3].flip(1)), dim=1), past_key_values=cache)
        cache.crop(-3)
        last = [a_model(part, past_key_values=cache).logits for part in ids[:, length:].split(2, dim=1)]
        assert_close(torch.cat(last, dim=1), a_model(ids).logits[:, length:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [STATE] * 3}, "add a layer of 'full_attention', whose keys count"),
        (
            {"linear_num_value_heads": 3},
            r"linear_num_value_heads \(3\) is not a multiple of linear_num_key_heads \(2\)",
        ),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive integer, not 0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer above 1, not 1"),
        ({"bidirectional": True}, "not supported with bidirectional=True: leave bidirectional out"),
        ({"add_cross_attention": True}, "not supported with add_cross_attention=True"),
        ({"position_type": "alibi"}, "not supported with position_type='alibi': use 'rotary'"),
        ({"layer_types": [FULL] * 3}, "has no field 'linear_num_key_heads'"),
        ({"layer_types": [STATE, FULL, CONV]}, "add a layer of 'full_attention', whose keys count"),
        ({"linear_norm_placement": "post"}, "linear_norm_placement must be one of pre, output, pre_output"),
        ({"linear_norm_eps": 0}, "linear_norm_eps must be a positive number, not 0"),
    ],
)
def test_configs_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_a_window_is_refused_where_the_library_mixes_up_masks(monkeypatch):
    monkeypatch.setattr(states, "KNOWS_KEYS", False)
    with pytest.raises(ValueError, match=r"makes wrong masks for a window next to them\. Install a newer release"):
        config(WINDOWS)
    assert config(STATE).sliding_window is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [CONV] * 3}, "layer_types names 'conv': add a layer of 'full_attention'"),
        ({"conv_L_cache": 1}, "conv_L_cache must be an integer above 1, not 1"),
        ({"linear_num_key_heads": 2}, "has no field 'linear_num_key_heads'"),
        ({"bidirectional": True}, "layer_types names 'conv', which is not supported with bidirectional=True"),
    ],
)
def test_convolutions_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        config(CONV, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [SCAN] * 3}, "layer_types names 'state_space': add a layer of 'full_attention'"),
        ({"mamba_n_groups": 3}, r"mamba_n_heads \(4\) is not a multiple of mamba_n_groups \(3\)"),
        ({"mamba_d_conv": 1}, "mamba_d_conv must be an integer above 1, not 1"),
        ({"mamba_hidden_act": "sillu"}, "mamba_hidden_act must be one of"),
        ({"conv_bias": True}, "has no field 'conv_bias'"),
        ({"add_cross_attention": True}, "layer_types names 'state_space', which is not supported with add_cross"),
    ],
)
def test_state_spaces_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        config(SCAN, **fields)


def test_a_misspelt_layer_type_is_told():
    with pytest.raises(ValueError, match="Did you mean 'linear_attention'"):
        blockformer.BlockformerDecoderConfig(num_hidden_layers=2, layer_types=["linear_atention", FULL])


def test_only_decoders_keep_states():
    with pytest.raises(ValueError, match="which needs a decoder"):
        blockformer.BlockformerEncoderConfig(num_hidden_layers=2, layer_types=[STATE, FULL])


@torch.no_grad()
def test_offloaded_layers_are_brought_for_each_call(kind):
    """Accelerate's hooks bring the weights of a module that is called."""
    ours, ids = model(kind), token_ids(2, 20, vocab=97)
    logits, text = ours(ids).logits, ours.generate(ids, max_new_tokens=6, do_sample=False)
    cpu_offload(ours)
    assert torch.equal(ours(ids).logits, logits)
    assert torch.equal(ours.generate(ids, max_new_tokens=6, do_sample=False), text)


def test_prepared_models_leave_such_layers_as_they_are(kind):
    a_model = model(kind)
    ids = token_ids(2, 20, vocab=97)
    wanted = a_model(ids).logits.detach()
    text = a_model.generate(ids, max_new_tokens=6, do_sample=False)
    prepared = a_model.prepare_for_inference()
    assert_close(prepared(ids).logits, wanted)
    assert torch.equal(prepared.generate(ids, max_new_tokens=6, do_sample=False), text)
    kinds = [type(layer).__name__ for layer in prepared(ids, use_cache=True).past_key_values.layers]
    own = "LinearAttentionAndFullAttentionLayer" if kind == BOTH else "LinearAttentionLayer"
    usual = [own, "DynamicLayer", own]
    assert kinds == ([own, "DynamicSlidingWindowLayer", "DynamicLayer"] if kind == WINDOWS else usual)


@pytest.mark.slow
def test_an_exported_convolution_reads_texts_of_any_length():
    ours, sizes = model(CONV), {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=128)}
    batch = {"input_ids": token_ids(2, 9, vocab=97), "use_cache": False}
    shapes = {"input_ids": sizes, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(ours, (), batch, dynamic_shapes=shapes, strict=False).module()
        for rows, length in ((3, 2), (1, 3), (2, 20)):
            ids = token_ids(rows, length, seed=4, vocab=97)
            assert_close(program(input_ids=ids, use_cache=False).logits, ours(ids).logits)


@torch.no_grad()
def test_a_state_is_as_large_as_its_layer_says(kind):
    a_model = model(kind)
    for length in (1, 5, 70):
        layers = a_model(token_ids(1, length, vocab=97), use_cache=True).past_key_values.layers
        for layer, held in zip(a_model.model.layers, layers, strict=True):
            if layer.layer_type in (FULL, SLIDING):
                continue
            states = [getattr(held, name) for name in ("conv_states", "recurrent_states")]
            states = [each for part in states for each in (part.values() if isinstance(part, dict) else [part])]
            states = sum(each.nbytes for each in states if each is not None)
            assert states == getattr(layer.self_attn, "state_space", layer.self_attn).state_bytes(4)


@torch.no_grad()
def test_layers_with_a_state_may_have_their_norms_elsewhere():
    a_model = model(norm_placement="output", linear_norm_placement="pre")
    names = [[name for name in layer._modules if name.endswith("_norm")] for layer in a_model.model.layers]
    pre, output = (["self_attn_pre_norm", "mlp_pre_norm"], ["self_attn_output_norm", "mlp_output_norm"])
    assert names == [pre, output, pre]
