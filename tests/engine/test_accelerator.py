"""What a prepared model does on a GPU, with a kernel of plain operators in the place of PyTorch's, on the CPU."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from pairs import assert_as_exact, assert_close, in_float64, keep_padding, token_ids
from sizes import STRONG
from torch.nn import functional as F
from transformers import StaticCache

import blockformer
from blockformer import preset
from blockformer.engine import attention, runtime
from blockformer.engine.prepare import _prepare_on_accelerator, _take_out
from blockformer.engine.runtime import AcceleratorRuntime, TrainingRuntime
from blockformer.model import stack
from blockformer.model.attention import Attention

FAMILIES = ["bert", "modernbert", "qwen3", "gpt2", "marian", "t5"]


def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """As `varlen_attn` of PyTorch 2.13."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype is torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    output = torch.empty_like(query)
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        one = [each[start:stop].transpose(0, 1)[None] for each in (query, key, value)]
        is_causal = window_size == (-1, 0)
        found = F.scaled_dot_product_attention(*one, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        output[start:stop] = found[0].transpose(0, 1)
    return output


def attend_before(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None):
    """As an older `varlen_attn`, which knows neither windows nor shared keys."""
    window = (-1, 0) if is_causal else (-1, -1)
    return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window)


@pytest.fixture(params=[attend, attend_before], ids=["today", "before"])
def calls(request, monkeypatch):
    """The CPU taken for a GPU; gives how many tokens each call of the kernel had."""
    seen = []

    def counted():
        def kernel(*args, **kwargs):
            seen.append(len(args[0]))
            return request.param(*args, **kwargs)

        kernel.__wrapped__ = request.param  # whose arguments are looked at
        return kernel

    made = counted()
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(attention, "_DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(runtime, "_LEAST_WORK", 0)
    monkeypatch.setattr(attention, "kernel", lambda: made)
    return seen


def make(family, head="Model", compile=False, **settings):
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0} if family == "marian" else {}
    config = preset(family, **{**STRONG, **tokens, **settings})
    kind = "EncoderDecoder" if config.is_encoder_decoder else "Decoder" if config.is_decoder else "Encoder"
    model = getattr(blockformer, f"Blockformer{kind}{head}")(config).eval()
    other = copy.deepcopy(model)
    _prepare_on_accelerator(other, compile=compile)
    return model, other


def unpadding_of(model, hidden_states, attention_mask, **named):
    """What the runtime of a model finds for these inputs."""
    inputs = SimpleNamespace(hidden_states=hidden_states, attention_mask=attention_mask, named=named)
    return model.runtime.unpadding(model, inputs)


def batch(model, rows=3, length=9):
    ids, mask = token_ids(rows, length, vocab=97), torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows):
        mask[row, length - 2 * row :] = 0
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    more |= {"use_cache": False} if model.config.is_decoder or model.config.is_encoder_decoder else {}
    return {"input_ids": ids, "attention_mask": mask, **more}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padding_is_skipped_where_attention_is_plain(family, calls):
    plain, quick = make(family)
    given = batch(plain)
    expected, found = (model(**given).last_hidden_state for model in (plain, quick))
    real = slice(None) if plain.config.is_encoder_decoder else given["attention_mask"].bool()
    with in_float64(plain) as wide:
        assert_as_exact(found[real], expected[real], wide(**given).last_hidden_state[real])
    is_plain = family in ("bert", "qwen3", "gpt2", "marian")
    tokens = int(given["attention_mask"].sum())
    assert set(calls) == ({tokens} if is_plain else set())


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_gradients_are_those_of_the_padded_run(family):
    plain, quick = make(family)
    given, gradients = batch(plain), []
    real = given["attention_mask"].bool()
    factors = torch.randn(int(real.sum()), plain.config.hidden_size)
    for model in (plain, quick):
        (model(**given).last_hidden_state[real] * factors).sum().backward()
        gradients.append(model.layers[0].self_attn.q_proj.weight.grad)
    assert_close(*gradients, 1e-4)


def prompts(lengths, side="left", length=9):
    """Prompts of so many tokens, padded on one side."""
    places = torch.arange(length)
    places = length - 1 - places if side == "left" else places
    mask = (places[None] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": token_ids(len(lengths), length, vocab=97) * mask, "attention_mask": mask}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@torch.no_grad()
def test_a_prompt_fills_the_cache_in_the_padded_form(family, side, calls):
    plain, quick = make(family)
    given = prompts([9, 4, 7], side)
    real = given["attention_mask"].bool()
    expected, found = (model(**given, use_cache=True) for model in (plain, quick))
    assert calls == [20] * len(quick.layers)
    with in_float64(plain) as wide:
        exact = wide(**given, use_cache=True)
    assert_as_exact(found.last_hidden_state[real], expected.last_hidden_state[real], exact.last_hidden_state[real])
    assert found.past_key_values.get_seq_length() == 9
    for layers in zip(*(outputs.past_key_values.layers for outputs in (found, expected, exact)), strict=True):
        for name in ("keys", "values"):
            states = [getattr(layer, name).transpose(1, 2) for layer in layers]
            assert states[0].shape == states[1].shape
            assert_as_exact(*(each[real] for each in states))
            assert not states[0][~real].any()
    calls.clear()
    more = {"input_ids": token_ids(3, 1, vocab=97), "attention_mask": F.pad(given["attention_mask"], (0, 1), value=1)}
    steps = [model(**more, past_key_values=outputs.past_key_values) for model, outputs in
             ((plain, expected), (quick, found))]  # fmt: skip
    assert_close(steps[1].last_hidden_state, steps[0].last_hidden_state)
    assert not calls


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2", "marian"])
@torch.no_grad()
def test_generate_reads_prompts_without_their_padding(family, compile, calls):
    head = "ForConditionalGeneration" if family == "marian" else "ForCausalLM"
    plain, quick = make(family, head, compile)
    given = prompts([9, 4, 7], "right" if family == "marian" else "left")
    asked = {**given, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(quick.generate(**asked), plain.generate(**asked))
    assert calls == ([] if family == "gemma2" else [20] * 2)  # of Marian its encoder's layers
    calls.clear()
    assert torch.equal(quick.generate(**asked, num_beams=2), plain.generate(**asked, num_beams=2))
    # The loop for compiled steps reads a prompt once for all beams.
    assert calls == {"gemma2": [], "marian": [20] * 2}.get(family, [20 if compile else 40] * 2)


@torch.no_grad()
def test_what_a_cache_holds_already_is_not_a_prompt(calls):
    plain, quick = make("qwen3")
    given = prompts([9, 4, 7])
    both = [StaticCache(plain.config, max_cache_len=16), StaticCache(plain.config, max_cache_len=16)]
    for _ in range(2):  # after a reset nobody knows that it is empty without reading it
        outputs = [model(**given, past_key_values=cache) for model, cache in zip((plain, quick), both, strict=True)]
        real = given["attention_mask"].bool()
        assert_close(outputs[1].last_hidden_state[real], outputs[0].last_hidden_state[real])
        for cache in both:
            cache.reset()
    assert calls == [20] * 2
    assert quick.runtime.takes_prompts(None)
    assert not quick.runtime.takes_prompts(object())  # a cache of another kind
    calls.clear()
    assert_close(*(model(**given, use_cache=True, output_hidden_states=True).hidden_states[1][real]
                   for model in (quick, plain)))  # fmt: skip
    assert not calls


@torch.no_grad()
def test_without_a_kernel_sequences_are_padded_for_attention(monkeypatch):
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(attention, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(runtime, "_LEAST_WORK", 0)
    monkeypatch.setattr(attention, "kernel", attention.kernel.__wrapped__)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    for family in ("bert", "qwen3"):
        plain, quick = make(family)
        given = batch(plain)
        real = given["attention_mask"].bool()
        assert_close(quick(**given).last_hidden_state[real], plain(**given).last_hidden_state[real])


@torch.no_grad()
def test_sequences_in_a_row_are_known_without_reading_them(calls, monkeypatch):
    plain, quick = make("qwen3")
    ids, starts = token_ids(1, 12, vocab=97), torch.tensor([0, 3, 5, 12])
    expected = [plain(ids[:, a:b], use_cache=False).last_hidden_state for a, b in ((0, 3), (3, 5), (5, 12))]
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7, "max_length_k": 7, "use_cache": False}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "max", lambda *_: pytest.fail("the lengths are read"))
        patch.setattr(torch.Tensor, "tolist", lambda *_: pytest.fail("the lengths are read"))
        patch.setattr(attention, "kernel", lambda: lambda query, *_, scale, window_size: calls.append(1) or query)
        found = unpadding_of(quick, torch.zeros(1, 12, 32), None, cu_seq_lens_q=starts, max_length_q=7)
        assert found.starts.dtype is torch.int32
        states = torch.randn(1, 12, 4)
        assert torch.equal(found.scatter(found.gather(states)), states)
    without_length = {name: value for name, value in given.items() if "max" not in name}
    for each in (given, without_length, {**given, "use_cache": True}, {**given, "seq_idx": ids.int()}):
        calls.clear()
        assert_close(quick(ids, **each).last_hidden_state, torch.cat(expected, 1))
        assert calls == [12] * len(quick.layers)


@torch.no_grad()
def test_what_asks_for_more_than_sequences_runs_padded(calls, monkeypatch):
    plain, quick = make("bert")
    given = batch(plain)
    real = given["attention_mask"].bool()
    for more in ({"output_hidden_states": True}, {"head_mask": torch.ones(2, 4)}):
        assert_close(quick(**given, **more).last_hidden_state[real], plain(**given, **more).last_hidden_state[real])
        assert not calls
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    quick(**given)
    monkeypatch.delenv("BLOCKFORMER_FAST")
    quick.set_attn_implementation("eager")
    quick(**given)
    for settings in (
        {"attn_logit_softcapping": 5.0},
        {"attention_sinks": True},
        {"head_dim": 4, "num_attention_heads": 8},
    ):
        plain, quick = make("qwen3", **settings)
        given = batch(plain)
        real = given["attention_mask"].bool()
        assert_close(quick(**given).last_hidden_state[real], plain(**given).last_hidden_state[real])
    assert not calls


@torch.no_grad()
def test_another_dtype_than_the_kernel_s_runs_padded(calls, monkeypatch):
    monkeypatch.setattr(attention, "_DTYPES", (torch.bfloat16,))
    plain, quick = make("bert")
    given = batch(plain)
    quick(**given)
    assert not calls
    quick.bfloat16()(**given)
    assert calls
    calls.clear()
    quick.float()
    with torch.autocast("cpu", torch.bfloat16):
        quick(**given)
    assert calls


@pytest.mark.parametrize("family", ["bert", "qwen3", "gpt2", "marian"])
@torch.no_grad()
def test_without_the_kernel_only_attention_is_padded(family, monkeypatch):
    """In float32, for heads that it does not take, on older devices and in older PyTorch."""
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(runtime, "_LEAST_WORK_OF_FLOAT32", 0)
    monkeypatch.setattr(runtime, "_LEAST_SHARE", 0)
    monkeypatch.setattr(attention, "kernel", lambda: None)
    seen, attend = [], attention.attend_side_by_side

    def counted(module, query, *args, **kwargs):
        seen.append(query.shape[2])
        return attend(module, query, *args, **kwargs)

    monkeypatch.setattr(attention, "attend_side_by_side", counted)
    plain, quick = make(family)
    for given in (batch(plain), {**batch(plain), **prompts([4, 9, 6])}):
        seen.clear()
        expected, found = (model(**given).last_hidden_state for model in (plain, quick))
        real = slice(None) if plain.config.is_encoder_decoder else given["attention_mask"].bool()
        with in_float64(plain) as wide:
            assert_as_exact(found[real], expected[real], wide(**given).last_hidden_state[real])
        assert set(seen) == {int(given["attention_mask"].sum())}


@torch.no_grad()
def test_a_mask_without_padding_is_read_once(calls, monkeypatch):
    """The library, which would read it again to make its own masks, gets none."""
    given, seen = {}, []
    plain, quick = make("bert")
    given = {**batch(plain), "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    expected = plain(**given).last_hidden_state
    monkeypatch.setattr(stack, "check_inputs", lambda *_: False)  # as on a device whose masks are not read for checks
    masks = stack.encoder_masks
    monkeypatch.setattr(
        stack,
        "encoder_masks",
        lambda config, states, mask, *more: seen.append(mask) or masks(config, states, mask, *more),
    )
    assert torch.equal(quick(**given).last_hidden_state, expected)
    assert seen == [None]
    assert not calls


@torch.no_grad()
def test_a_mask_without_padding_says_that_each_row_is_one_text(calls, monkeypatch):
    """Whatever the positions are: without a mask, some of them would mean several texts in a row."""
    plain, quick = make("qwen3")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(3, -1)
    given = {**batch(plain), "attention_mask": torch.ones(3, 9, dtype=torch.long), "position_ids": positions}
    expected = plain(**given).last_hidden_state
    without = plain(**{**given, "attention_mask": None}).last_hidden_state
    assert (expected - without).abs().max() > 1e-2
    monkeypatch.setattr(stack, "check_inputs", lambda *_: False)  # as on a device whose masks are not read for checks
    assert_close(quick(**given).last_hidden_state, expected)
    assert not calls


@torch.no_grad()
def test_small_batches_are_computed_as_they_are(calls, monkeypatch):
    """The host takes longer than the device there."""
    _, quick = make("bert")
    given = batch(quick)
    work = given["input_ids"].numel() * quick.config.hidden_size**2
    for least, runs in ((work + 1, False), (work, True)):
        monkeypatch.setattr(runtime, "_LEAST_WORK", least)
        quick(**given)
        assert bool(calls) is runs


@torch.no_grad()
def test_a_little_padding_stays_where_attention_is_padded_anyway(monkeypatch):
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(runtime, "_LEAST_WORK_OF_FLOAT32", 0)
    _, quick = make("bert")
    states, mask = torch.zeros(4, 10, 32), torch.ones(4, 10, dtype=torch.long)
    for padding, skips in ((9, False), (10, True)):
        mask[:2, 10 - padding // 2 :], mask[2, 10 - padding % 2 :] = 0, 0
        assert (unpadding_of(quick, states, mask) is not None) is skips
        mask.fill_(1)


@pytest.fixture
def flexes(monkeypatch):
    """The CPU taken for a GPU, flex attention uncompiled; gives the shape of the queries of each of its calls."""
    seen, flex = [], attention.flex_attention

    def counted(query, *args, **kwargs):
        seen.append(tuple(query.shape))
        return flex(query, *args, **kwargs)

    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(attention, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(attention, "_MANY_SCORES", 40 * 40)
    monkeypatch.setattr(attention, "_has_triton", lambda: True)
    monkeypatch.setattr(attention, "_flex", lambda: counted)
    keep_padding(monkeypatch)
    with torch.compiler.set_stance("force_eager"):
        yield seen


WINDOW_FIRST = ["sliding_attention", "full_attention"]
WIDE = {"head_dim": 16, "num_key_value_heads": 2}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated")
@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma2", {"attn_logit_softcapping": 2.0, "sliding_window": 13}),
        ("qwen3", {"attention_sinks": True, "sliding_window": 13, "layer_types": WINDOW_FIRST}),
        ("qwen3", {"attn_logit_softcapping": 2.0, "attention_sinks": True}),
        ("t5gemma", {"attn_logit_softcapping": 2.0, "sliding_window": 13}),
    ],
)
@torch.no_grad()
def test_long_contexts_with_caps_or_sinks_hold_no_matrix_of_scores(family, settings, padded, flexes):
    plain, quick = make(family, **{**WIDE, **settings})
    for model in (plain, quick):
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.arange(4.0) - 1)
    given = prompts([45, 31, 38] if padded else [45] * 3, padded or "left", 45)
    given |= {"decoder_input_ids": given["input_ids"]} if family == "t5gemma" else {"use_cache": False}
    real = given["attention_mask"].bool()
    expected, found = (model(**given).last_hidden_state for model in (plain, quick))
    if family == "t5gemma":
        real = torch.ones_like(real)
    with in_float64(plain) as wide:
        assert_as_exact(found[real], expected[real], wide(**given).last_hidden_state[real])
    assert found.isfinite().all()
    stacks = 2 if family == "t5gemma" else 1
    assert flexes == [(3, 4, 45, 16)] * 2 * stacks
    flexes.clear()
    quick(**{name: value[:, :39] if isinstance(value, torch.Tensor) else value for name, value in given.items()})
    assert not flexes


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated")
@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_long_prompts_with_caps_or_sinks_fill_the_cache(family, compile, flexes):
    settings = {"gemma2": {"attn_logit_softcapping": 2.0}, "gpt_oss": {"num_experts": 4, "num_experts_per_tok": 2}}
    plain, quick = make(family, "ForCausalLM", compile, **WIDE, **settings[family], sliding_window=13)
    asked = {**prompts([45, 31, 38], length=45), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(quick.generate(**asked), plain.generate(**asked))
    assert flexes == [(3, 4, 45, 16)] * 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_long_contexts_under_autocast_whose_norms_widen_queries(flexes, monkeypatch):
    monkeypatch.setattr(attention, "_DTYPES", (torch.bfloat16,))
    plain, quick = make("qwen3", **WIDE, attn_logit_softcapping=2.0)
    given = {"input_ids": token_ids(2, 45, vocab=97), "use_cache": False}
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (model(**given).last_hidden_state for model in (plain, quick))
    assert flexes == [(2, 4, 45, 16)] * 2
    with in_float64(plain) as wide:
        assert_as_exact(found, expected, wide(**given).last_hidden_state)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_packed_rows_and_readied_masks_of_long_contexts(flexes, monkeypatch):
    plain, quick = make("gemma2", **WIDE, attn_logit_softcapping=2.0, sliding_window=13)
    ids, places = token_ids(2, 45, vocab=97), torch.cat([torch.arange(20), torch.arange(25)])[None].expand(2, -1)
    given = {"input_ids": ids, "position_ids": places, "use_cache": False}
    assert_close(*(model(**given).last_hidden_state for model in (quick, plain)))
    given = {"input_ids": ids, "use_cache": False}
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    quick(**given)
    monkeypatch.delenv("BLOCKFORMER_FAST")
    flexes.clear()
    masks = dict.fromkeys(("full_attention", "sliding_attention"), torch.ones(45, 45).tril().bool()[None, None])
    assert_close(*(model(**given, attention_mask=masks).last_hidden_state for model in (quick, plain)))
    monkeypatch.setattr(attention, "_has_triton", lambda: False)
    quick(**given)
    monkeypatch.setattr(attention, "_has_triton", lambda: True)
    monkeypatch.setitem(attention.ALL_ATTENTION_FUNCTIONS, "sdpa", attention.plain)
    quick(**given)
    monkeypatch.setitem(attention.ALL_ATTENTION_FUNCTIONS, "sdpa", attention.sdpa_attention)
    quick.double()(**given)
    quick.float().set_attn_implementation("eager")
    quick(**given)
    assert not flexes


def on_meta(family="qwen3"):
    config = preset(family, **STRONG)
    kind = "DecoderForCausalLM" if config.is_decoder else "EncoderModel"
    with torch.device("meta"):
        return getattr(blockformer, f"Blockformer{kind}")(config)


def test_elsewhere_than_on_the_cpu_a_prepared_model_has_that_runtime_and_loses_it_again():
    model = on_meta()
    model.prepare_for_inference()
    assert type(model.model.runtime) is type(model.runtime) is AcceleratorRuntime
    model.prepare_for_training()
    assert type(model.model.runtime) is type(model.runtime) is TrainingRuntime


def test_a_prepared_model_says_where_padding_is_skipped():
    model = on_meta().prepare_for_inference()
    padding = next(part for part in blockformer.explain(model).parts if part.name == "padding")
    assert padding.way == "skipped on the GPU in large batches"


def test_a_batch_of_nothing_is_refused(calls):
    _, quick = make("bert")
    for given, message in (
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"the input is empty \(shape \[0, 4\]\)"),
        ({"input_ids": token_ids(1, 4, vocab=97), "cu_seq_lens_q": torch.tensor([0])}, "cu_seq_lens_q must be"),
    ):
        with pytest.raises(ValueError, match=message):
            quick(**given)
    nobody = quick(token_ids(2, 4, vocab=97), torch.zeros(2, 4, dtype=torch.long)).last_hidden_state
    assert nobody.isfinite().all()
    assert not calls


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
def test_shared_keys_are_not_repeated_for_a_token(compile, monkeypatch):
    monkeypatch.setattr(attention, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(attention, "has_kernel_for_shared_keys", lambda device: True)
    plain, quick = make("qwen3", "ForCausalLM", compile, num_attention_heads=4, num_key_value_heads=2)
    lengths, library_s = [], attention.plain

    def plainly(module, query, *given, **settings):
        lengths.append(query.shape[2])
        return library_s(module, query, *given, **settings)

    monkeypatch.setattr(attention, "plain", plainly)
    prompt = {**prompts([9, 4, 7]), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = plain.generate(**prompt)
    assert lengths == [9] * 2 + [1] * 2 * 5
    lengths.clear()
    assert torch.equal(quick.generate(**prompt), expected)
    assert 1 not in lengths
    assert type(quick.model.layers[0].self_attn) is attention.SharingAttention
    _take_out(quick)
    assert type(quick.model.layers[0].self_attn) is Attention


def test_compiling_leaves_the_generation_settings_alone(monkeypatch, tmp_path):
    """So that a saved repo says nothing of it, and drafts, which need a cache that can be cropped, are taken."""
    monkeypatch.setattr(attention, "DEVICE", "meta")
    model = on_meta()
    before = model.generation_config.to_dict()
    model.prepare_for_inference(compile=True)
    assert model.runtime.decoding.by_graphs
    assert model.generation_config.to_dict() == before
    model.prepare_for_training()
    assert type(model.runtime) is TrainingRuntime
    with pytest.raises(ValueError, match="is for models that write text; this BlockformerEncoderModel does not"):
        on_meta("bert").prepare_for_inference(compile=True)


def test_it_explains_itself(monkeypatch):
    monkeypatch.setattr(attention, "has_kernel_for_shared_keys", lambda device: True)
    _, model = make("qwen3", "ForCausalLM", compile=True)
    parts = {part.name: f"{part.way} {part.reason}" for part in blockformer.explain(model).parts}
    assert "CUDA graph" in parts["one more token"]
    assert "prepare_for_inference" not in "".join(parts.values())
    assert "not repeated" in parts["attention"]
    assert "large batches" in parts["padding"]
    model.prepare_for_training()
    parts = {part.name: f"{part.way} {part.reason}" for part in blockformer.explain(model).parts}
    assert "compile=True" in parts["one more token"]


def test_where_nothing_compiles_it_says_so():
    with pytest.raises(ValueError, match="the model is on 'meta': prepare it without compile=True"):
        on_meta().prepare_for_inference(compile=True)


def test_older_devices_compute_the_padding(monkeypatch):
    device = torch.device("cuda:0")
    for hip, capability, runs in (
        (None, (9, 0), True),
        (None, (8, 0), True),
        (None, (7, 5), False),
        ("6", (9, 4), False),
    ):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert attention._runs_kernel.__wrapped__(device) is runs
    assert attention._runs_kernel.__wrapped__(torch.device("cpu"))


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "qwen3", "marian"])
def test_a_full_batch_is_computed_as_it_is(family, calls, monkeypatch):
    model, other = make(family)
    batch = {"input_ids": token_ids(3, 9) % 97, "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    batch |= {"decoder_input_ids": token_ids(3, 4) % 97} if family == "marian" else {}
    monkeypatch.setattr(stack, "check_inputs", lambda *given: False)  # a GPU's masks are not read there
    assert_close(other(**batch).last_hidden_state, model(**batch).last_hidden_state)
    assert not calls
    batch["attention_mask"][1, :4] = 0
    other(**batch)
    assert calls
