"""`generate()`: each way of decoding gives the text and the logits of transformers' own model of the same weights."""

import copy
import inspect

import pytest
import torch
import transformers
from packaging.version import Version
from pairs import FAMILIES, SIZES, assert_close, left_padded, model, pair, token_ids
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    StaticCache,
    TextStreamer,
)
from transformers.cache_utils import DynamicLayer

import blockformer

pytestmark = pytest.mark.versions

STEPS = 24
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
WINDOWS = {"full": {}, "mixed": MIXED, "sliding": {**MIXED, "layer_types": ["sliding_attention"] * 3}}


def text_of(a_model, ids, mask=None, steps=STEPS, seed=5, **settings):
    """The tokens that `generate` adds."""
    torch.manual_seed(seed)
    settings = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "attention_mask": mask} | settings
    return a_model.generate(ids, **settings)


def assert_same_text(ours, theirs, ids, mask=None, **settings):
    """Both give the same tokens, and the prompt decides which."""
    written = text_of(ours, ids, mask, **settings)
    assert torch.equal(written, text_of(theirs, ids, mask, **settings))
    rows = written[:, ids.shape[1] :]
    assert len(torch.unique(rows, dim=0)) == len(rows), "a test whose rows all say the same proves little"
    return written


@pytest.mark.portable
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family):
    assert_same_text(*pair(family), *left_padded(3, 9))


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_with_a_tied_head(tied):
    assert_same_text(*pair(tie_word_embeddings=tied), token_ids(2, 9))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 3.0, "top_k": 0},
        {"temperature": 2.0, "top_k": 7},
        {"temperature": 2.0, "top_k": 0, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.3, "num_return_sequences": 2},
    ],
    ids=["temperature", "top_k", "top_p", "all"],
)
def test_sampling_draws_the_same_text_from_the_same_seed(settings):
    ours, theirs = pair()
    ids, mask = left_padded(3, 9)
    written = assert_same_text(ours, theirs, ids, mask, do_sample=True, **settings)
    assert not torch.equal(written, text_of(ours, ids, mask, do_sample=True, seed=6, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3},
        {"num_beams": 3, "early_stopping": True, "min_new_tokens": 0, "length_penalty": 0.2},
        {"num_beams": 3, "do_sample": True, "temperature": 2.0},
        {"num_beams": 4, "cache_implementation": "static"},
        {"num_beams": 4, "use_cache": False},
    ],
    ids=["beams", "several", "early", "sampled", "static", "no cache"],
)
@pytest.mark.parametrize("windows", ["full", "mixed"])
def test_beams(windows, settings):
    ours, theirs = pair(**WINDOWS[windows])
    assert_same_text(ours, theirs, *left_padded(2, 9), **settings)


@pytest.mark.parametrize("draft", ["assistant", "prompt lookup"])
def test_assisted_decoding_changes_no_token(draft):
    ours, theirs = pair(seed=3)
    # Repeated, so that the look-up finds something; the assistant shares most of the model's weights for the same end.
    ids = token_ids(1, 6).repeat(1, 4)
    plain = text_of(ours, ids)
    if draft == "assistant":
        helpers = pair(num_hidden_layers=1, seed=3)
        for a_model, helper in zip((ours, theirs), helpers, strict=True):
            assert torch.equal(text_of(a_model, ids, assistant_model=helper), plain)
        assert torch.equal(text_of(ours, ids, assistant_model=copy.deepcopy(ours)), plain)
    else:
        assert torch.equal(text_of(ours, ids, prompt_lookup_num_tokens=3), plain)
        assert torch.equal(text_of(theirs, ids, prompt_lookup_num_tokens=3), plain)


def test_a_text_that_holds_the_padding_token_is_drafted():
    """transformers then takes it for padding, at the end of what the drafting model reads."""
    ours, theirs = pair()
    ids = token_ids(1, 9)
    plain = text_of(ours, ids, eos_token_id=None)
    for pad in set(plain[0, 9:].tolist()) - set(ids[0].tolist()):
        for a_model in (ours, theirs):
            helper = copy.deepcopy(a_model)
            helper.generation_config.num_assistant_tokens = 1
            settings = {"assistant_model": helper, "pad_token_id": pad, "eos_token_id": None}
            assert torch.equal(text_of(a_model, ids, **settings), plain)


def logits_of(a_model, ids, mask, **settings):
    out = text_of(a_model, ids, mask, return_dict_in_generate=True, output_logits=True, **settings)
    return out, torch.stack(out.logits, dim=1)


CACHES = {
    "growing": lambda config: {},
    "dynamic": lambda config: {"past_key_values": DynamicCache(config=config)},
    "dynamic, bare": lambda config: {"past_key_values": DynamicCache()},
    "static": lambda config: {"cache_implementation": "static"},
    "static, given": lambda config: {"past_key_values": StaticCache(config=config, max_cache_len=64)},
    "none": lambda config: {"use_cache": False},
    "in chunks": lambda config: {"prefill_chunk_size": 4},
}


@pytest.mark.portable
@pytest.mark.parametrize(
    ("cache", "windows"), [*((cache, "mixed") for cache in CACHES), ("dynamic", "full"), ("static", "full")]
)
def test_every_cache_gives_the_logits_of_transformers(cache, windows):
    ours, theirs = pair(initializer_range=0.25, **WINDOWS[windows])
    ids, mask = left_padded(3, 11)
    out, logits = logits_of(ours, ids, mask, **CACHES[cache](ours.config))
    their_out, their_logits = logits_of(theirs, ids, mask)
    assert torch.equal(out.sequences, their_out.sequences)
    assert_close(logits, their_logits)


CAPPED = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.portable
@pytest.mark.parametrize("cache", ["growing", "dynamic", "static", "static, given"])
@pytest.mark.parametrize("family", CAPPED)
def test_every_cache_works_with_soft_caps_and_sinks(tmp_path, family, cache):
    config_class, model_class, settings = CAPPED[family]
    torch.manual_seed(0)
    theirs = model_class(config_class(**{**SIZES, **settings, **MIXED, "initializer_range": 0.15})).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).eval()
    assert ours.config._attn_implementation == "sdpa"
    for ids, mask in ((token_ids(3, 11), None), left_padded(3, 11)):
        out, logits = logits_of(ours, ids, mask, **CACHES[cache](ours.config))
        their_out, their_logits = logits_of(theirs, ids, mask)
        assert torch.equal(out.sequences, their_out.sequences)
        assert_close(logits, their_logits)


def test_mistral_slides_in_every_layer():
    ours, theirs = pair("mistral", sliding_window=5)
    ids, mask = left_padded(2, 12)
    for settings in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        assert_same_text(ours, theirs, ids, mask, **settings)


def test_a_cache_of_the_user_stays_the_users():
    ours = model()
    cache = DynamicCache(config=ours.config)
    out = text_of(ours, token_ids(1, 5), past_key_values=cache, return_dict_in_generate=True)
    assert out.past_key_values is cache
    assert cache.get_seq_length() == 5 + STEPS - 1
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}


@pytest.mark.parametrize("windows", ["full", "mixed"])
def test_a_conversation_goes_on_from_its_cache(windows):
    ours, theirs = pair(**WINDOWS[windows])
    first, second = token_ids(1, 7, seed=1), token_ids(1, 5, seed=2)
    reply = text_of(ours, first, return_dict_in_generate=True)
    history = torch.cat([reply.sequences, second], dim=1)
    answer = text_of(ours, history, past_key_values=reply.past_key_values)
    assert torch.equal(answer, text_of(theirs, history))


def outgrowing(folder):
    """A Phi-3 of ours and transformers' with the same weights, whose frequencies are others beyond 16 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    rope |= {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    torch.manual_seed(0)
    config = Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=16)
    theirs = Phi3ForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    return blockformer.from_official(folder).eval(), theirs


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}],
    ids=["greedy", "beams", "static cache", "drafts"],
)
def test_a_text_that_outgrows_the_frequencies_of_its_keys_is_read_again(tmp_path, settings, prepared):
    """From some length on all tokens turn by other frequencies, so cached keys are made anew, as in Phi-3's class."""
    ours, theirs = outgrowing(tmp_path)
    ours = ours.prepare_for_inference() if prepared else ours
    ids, mask = left_padded(3, 9) if "prompt_lookup_num_tokens" not in settings else (token_ids(1, 9), None)
    whole = {"num_beams": settings.get("num_beams", 1), "use_cache": False}
    assert torch.equal(text_of(ours, ids, mask, **settings), text_of(theirs, ids, mask, **whole))


def test_where_a_text_outgrows_its_keys_padding_does_not_count(tmp_path):
    ours, _ = outgrowing(tmp_path)
    ids, padding = token_ids(1, 9), torch.zeros(1, 5, dtype=torch.long)
    mask = torch.cat((padding, torch.ones_like(ids)), dim=1)
    written = text_of(ours, torch.cat((padding, ids), dim=1), mask)
    assert torch.equal(written[:, 5:], text_of(ours, ids, use_cache=False))


def test_a_conversation_outgrows_the_frequencies_of_its_cache(tmp_path):
    ours, _ = outgrowing(tmp_path)
    reply = text_of(ours, token_ids(1, 7, seed=1), steps=6, return_dict_in_generate=True)
    history = torch.cat([reply.sequences, token_ids(1, 5, seed=2)], dim=1)
    answer = text_of(ours, history, past_key_values=reply.past_key_values)
    assert torch.equal(answer, text_of(ours, history, use_cache=False))


def test_two_questions_share_the_cache_of_one_prompt():
    ours, theirs = pair()
    prompt = token_ids(1, 9, seed=1)
    with torch.no_grad():
        prefix = ours(prompt).past_key_values
    for seed in (2, 3):
        question = torch.cat([prompt, token_ids(1, 4, seed=seed)], dim=1)
        answer = text_of(ours, question, past_key_values=copy.deepcopy(prefix))
        assert torch.equal(answer, text_of(theirs, question))
    assert prefix.get_seq_length() == 9


@pytest.mark.portable
def test_a_left_padded_row_reads_like_a_single_one():
    ours = model()
    ids, mask = left_padded(3, 9)
    batch, logits = logits_of(ours, ids, mask)
    for row in range(3):
        alone = ids[row : row + 1, mask[row].bool()]
        single, single_logits = logits_of(ours, alone, None)
        assert torch.equal(batch.sequences[row, 9:], single.sequences[0, alone.shape[1] :])
        assert_close(logits[row], single_logits[0])


def test_right_padded_prompts_are_refused():
    ours, (ids, mask) = model(), left_padded(2, 9)
    with pytest.raises(ValueError, match="padding_side"):
        text_of(ours, ids.flip(1), mask.flip(1))


def test_prompts_as_embeddings():
    ours, theirs = pair()
    embeddings = ours.get_input_embeddings()(token_ids(2, 6)).detach()
    settings = {"inputs_embeds": embeddings, "max_new_tokens": STEPS, "do_sample": False}
    written = ours.generate(**settings)
    assert torch.equal(written, theirs.generate(**settings))
    assert torch.equal(written, ours.generate(token_ids(2, 6), max_new_tokens=STEPS, do_sample=False)[:, 6:])


def test_streaming_gives_the_text_piece_by_piece(tiny_tokenizer):
    class Pieces(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            pieces.append(text)

    pieces = []
    ours = model(vocab_size=len(tiny_tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=0)
    prompt = tiny_tokenizer("def insort(a, x):\n    return ", return_tensors="pt")
    written = ours.generate(
        **prompt, do_sample=False, max_new_tokens=STEPS, streamer=Pieces(tiny_tokenizer, skip_prompt=True)
    )
    assert "".join(pieces) == tiny_tokenizer.decode(written[0, prompt.input_ids.shape[1] :])
    assert len(pieces) > 2


def test_any_token_of_an_eos_list_ends_a_row_and_only_pad_follows():
    ours, theirs = pair()
    ids, mask = left_padded(4, 9)
    plain = text_of(ours, ids, mask)[:, 9:]
    ends = [int(plain[0, 3]), int(plain[1, 6])]
    stop = {"eos_token_id": ends, "min_new_tokens": 0}
    written = assert_same_text(ours, theirs, ids, mask, **stop)[:, 9:]
    for row in range(4):
        stops = [place for place, token in enumerate(plain[row].tolist()) if token in ends]
        length = stops[0] + 1 if stops else STEPS
        assert torch.equal(written[row, :length], plain[row, :length])
        assert (written[row, length:] == 0).all()
    assert (written[0, 4:] == 0).all()


def test_without_a_pad_token_finished_rows_repeat_the_end():
    ours, theirs = pair(pad_token_id=None)
    ids = token_ids(2, 9)
    end = int(text_of(ours, ids)[0, 11])
    written = assert_same_text(ours, theirs, ids, torch.ones_like(ids), eos_token_id=end, min_new_tokens=0)
    assert (written[0, 11:] == end).all()


def test_the_config_may_list_several_ends():
    ours = model(eos_token_id=[2, 5])
    assert ours.generation_config.eos_token_id == [2, 5]


@pytest.mark.portable
def test_captured_states_of_a_generation():
    ours, theirs = pair()
    for a_model in (ours, theirs):
        a_model.set_attn_implementation("eager")
    settings = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    out, their_out = (text_of(a_model, token_ids(2, 6), steps=4, **settings) for a_model in (ours, theirs))
    assert len(out.hidden_states) == 4
    for step, their_step in zip(out.hidden_states, their_out.hidden_states, strict=True):
        for states, expected in zip(step, their_step, strict=True):  # of the size of a whole residual stream
            assert_close(states, expected)
    assert_close(out.attentions, their_out.attentions)


@pytest.mark.parametrize("attention", ["sdpa", "paged|eager"])
@pytest.mark.parametrize("windows", ["full", "mixed"])
def test_continuous_batching(windows, attention):
    """`generate_batch` packs rows of any length into one; it needs every keyword argument to reach the attention."""
    if windows == "mixed" and Version(transformers.__version__) < Version("5.11"):
        pytest.skip("with windows in some layers, transformers 5.5.0 and 5.10.4 write another text, their models too")
    ours, theirs = pair(**WINDOWS[windows])
    prompts = [token_ids(1, length, seed=length)[0].tolist() for length in (5, 12, 3)]
    singles = {}
    for prompt in prompts:
        written = text_of(theirs, torch.tensor([prompt]), min_new_tokens=0)
        singles[tuple(prompt)] = written[0, len(prompt) :].tolist()
    settings = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=2, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16)
    for a_model in (ours, theirs):
        a_model.set_attn_implementation(attention)
        results = a_model.generate_batch(prompts, generation_config=settings, continuous_batching_config=batching)
        assert {tuple(result.prompt_ids): result.generated_tokens for result in results.values()} == singles


@pytest.mark.parametrize("caps", [{"attn_logit_softcapping": 2.0}, {"attention_sinks": True}])
def test_continuous_batching_with_caps_and_sinks(caps):
    """Their attention is eager, and reads keys of earlier tokens too."""
    ours = model(**caps)
    for layer in ours.model.layers if "attention_sinks" in caps else ():
        torch.nn.init.normal_(layer.self_attn.sinks, std=3.0, generator=torch.Generator().manual_seed(0))
    prompts = [token_ids(1, length, seed=length)[0].tolist() for length in (5, 12, 3)]
    singles = {tuple(prompt): text_of(ours, torch.tensor([prompt]), min_new_tokens=0) for prompt in prompts}
    settings = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=2, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16)
    for result in ours.generate_batch(
        prompts, generation_config=settings, continuous_batching_config=batching
    ).values():
        assert result.generated_tokens == singles[tuple(result.prompt_ids)][0, len(result.prompt_ids) :].tolist()


@pytest.mark.parametrize("position_type", ["alibi", "relative_bias", "relative_key"])
def test_continuous_batching_is_refused_with_relative_positions(position_type):
    settings = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=2, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16)
    (result,) = (
        model(position_type=position_type, rope_parameters=None)
        .generate_batch([[5, 6, 7]], generation_config=settings, continuous_batching_config=batching)
        .values()
    )
    assert "generate_batch does not say where keys are" in result.error


def with_other_sizes(kind):
    """A model some of whose layers have keys or values of another size than its config says."""
    if kind == "pruned_heads":
        return blockformer.prune_heads(model(num_key_value_heads=4), {0: [1, 2]})
    if kind == "latent values":
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
        return model(kv_lora_rank=24, num_key_value_heads=4, v_head_dim=20, rope_parameters=rope, qk_norm=False)
    return model(**MIXED, attention_by_type={"full_attention": {"num_key_value_heads": 1}})


@pytest.mark.parametrize("kind", ["pruned_heads", "latent values", "attention_by_type"])
def test_continuous_batching_is_refused_with_keys_of_several_sizes(kind):
    settings = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=2, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16)
    given = {"generation_config": settings, "continuous_batching_config": batching}
    (result,) = with_other_sizes(kind).generate_batch([[5, 6, 7]], **given).values()
    assert result.error == "generate_batch needs keys and values of one size in all layers: use generate."


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_encoder_states_reach_the_cross_attention(settings):
    ours = model(add_cross_attention=True, initializer_range=0.3)
    ids = token_ids(2, 5)
    states, seen = torch.randn(2, 7, 64), torch.ones(2, 7, dtype=torch.long)
    seen[1, 4:] = 0
    given = {"encoder_hidden_states": states, "encoder_attention_mask": seen}
    projected = []
    hook = ours.model.layers[0].cross_attn.k_proj.register_forward_hook(lambda *_: projected.append(1))
    written = text_of(ours, ids, steps=8, **given, **settings)
    hook.remove()
    assert len(projected) == 1
    assert torch.equal(written, text_of(ours, ids, steps=8, use_cache=False, **given, **settings))
    assert not torch.equal(written, text_of(ours, ids, steps=8, **given | {"encoder_hidden_states": -states}))
    if not settings:
        text = ids
        for _ in range(8):
            with torch.no_grad():
                logits = ours(text, **given).logits[:, -1]
            logits[:, 2] = -torch.inf  # min_new_tokens
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(written, text)


def test_gradients_of_a_text_whose_loop_runs_without_its_decorator():
    gradients = []
    for each in pair():
        settings = {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        output = inspect.unwrap(each.generate)(each, token_ids(2, 7), **settings)
        torch.stack(output.scores).logsumexp(-1).sum().backward()
        gradients.append(each.get_input_embeddings().weight.grad)
    assert_close(*gradients)


def test_longer_than_the_learned_positions_is_refused_before_the_first_step(monkeypatch):
    ours = model(position_type="learned", rope_parameters=None, max_position_embeddings=16)
    ids, mask = left_padded(2, 10)
    assert text_of(ours, ids, mask, steps=6).shape == (2, 16)
    ids[0, :3], mask[0, :3] = 0, 0
    # Padding takes no positions: both rows have room for three tokens more.
    assert text_of(ours, ids, mask, steps=10).shape == (2, 20)
    monkeypatch.setattr(ours.model, "forward", None)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        text_of(ours, token_ids(2, 10), steps=8)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"num_beams": 0}, {"top_k": -1}])
def test_settings_without_a_meaning_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        text_of(model(), token_ids(1, 4), do_sample=True, **wrong)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty"):
        text_of(model(bos_token_id=None), torch.zeros(1, 0, dtype=torch.long))


def test_a_static_cache_that_is_too_small_is_refused_before_the_first_step(monkeypatch):
    ours = model()
    cache = StaticCache(config=ours.config, max_cache_len=16)
    with torch.no_grad():
        ours(token_ids(1, 9), past_key_values=cache)
        with pytest.raises(ValueError, match="max_cache_len"):
            ours(token_ids(1, 8), past_key_values=cache)
        ours(token_ids(1, 7), past_key_values=cache)
    monkeypatch.setattr(ours.model, "forward", None)
    with pytest.raises(ValueError, match="max_cache_len"):
        text_of(ours, token_ids(1, 9), past_key_values=StaticCache(config=ours.config, max_cache_len=16))


def test_a_text_drafted_with_the_first_layers_is_the_plain_text():
    ours, theirs = pair()
    ids, lengths = token_ids(1, 9), []
    ours.model.layers[0].register_forward_pre_hook(lambda *_: lengths.append(1))
    ours.model.layers[2].register_forward_pre_hook(lambda *_: lengths.append(3))
    plain = text_of(ours, ids)
    for count in (1, 2, 3):
        lengths.clear()
        assert torch.equal(assert_same_text(ours, theirs, ids, assistant_early_exit=count), plain)
        drafted = lengths.count(1) - lengths.count(3)
        assert drafted > 0 if count < 3 else drafted == 0
        assert ours.config.num_hidden_layers == 3
        assert torch.equal(text_of(ours, ids), plain)


@pytest.mark.parametrize("windows", ["mixed", "sliding"])
def test_a_text_drafted_with_the_first_layers_of_a_windowed_model(windows):
    ours, theirs = pair(**WINDOWS[windows])
    assert torch.equal(
        assert_same_text(ours, theirs, token_ids(1, 9), assistant_early_exit=1), text_of(ours, token_ids(1, 9))
    )


def test_an_error_while_drafting_leaves_the_model_whole():
    ours = model()
    ids = token_ids(1, 9)
    plain = text_of(ours, ids)

    def interrupt(*_):
        if ours.config.num_hidden_layers == 1:
            raise KeyboardInterrupt

    hook = ours.model.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        text_of(ours, ids, assistant_early_exit=1)
    hook.remove()
    assert ours.config.num_hidden_layers == 3
    assert torch.equal(text_of(ours, ids), plain)


@pytest.mark.parametrize("count", [0, -1, 4, True, 1.0])
def test_drafting_with_layers_that_are_not_there_is_refused_before_the_first_step(count, monkeypatch):
    ours = model()
    monkeypatch.setattr(ours.model, "forward", None)
    with pytest.raises(ValueError, match="assistant_early_exit must be an integer from 1 to 3"):
        text_of(ours, token_ids(1, 9), assistant_early_exit=count)


def test_an_encoder_decoder_refuses_to_draft_with_its_first_layers():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = blockformer.preset("bart", decoder_start_token_id=2, **sizes)
    ours = blockformer.BlockformerEncoderDecoderForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="only decoders draft"):
        text_of(ours, token_ids(1, 9, vocab=99), assistant_early_exit=1)
    assert ours.config.num_hidden_layers == 2
