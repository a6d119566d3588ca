"""What a prepared model does on a GPU, with a kernel of plain operators in the place of PyTorch's, on the CPU."""

import copy

import pytest
import torch
from pairs import assert_as_exact, assert_close, in_float64, token_ids
from sizes import STRONG
from torch.nn import functional as F

import blockformer
from blockformer import preset
from blockformer.engine import accelerator
from blockformer.engine.prepare import _prepare_on_accelerator
from blockformer.engine.runtime import AcceleratorRuntime, LoadedRuntime

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
    monkeypatch.setattr(accelerator, "DEVICE", "cpu")
    monkeypatch.setattr(accelerator, "_DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(accelerator, "kernel", lambda: made)
    return seen


def make(family, **settings):
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0} if family == "marian" else {}
    config = preset(family, **{**STRONG, **tokens, **settings})
    kind = (
        "EncoderDecoderModel" if config.is_encoder_decoder else "DecoderModel" if config.is_decoder else "EncoderModel"
    )
    model = getattr(blockformer, f"Blockformer{kind}")(config).eval()
    other = copy.deepcopy(model)
    _prepare_on_accelerator(other, compile=False)
    return model, other


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


@torch.no_grad()
def test_sequences_in_a_row_are_known_without_reading_them(calls, monkeypatch):
    plain, quick = make("qwen3")
    ids, starts = token_ids(1, 12, vocab=97), torch.tensor([0, 3, 5, 12])
    expected = [plain(ids[:, a:b], use_cache=False).last_hidden_state for a, b in ((0, 3), (3, 5), (5, 12))]
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7, "max_length_k": 7, "use_cache": False}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "max", lambda *_: pytest.fail("the lengths are read"))
        patch.setattr(torch.Tensor, "tolist", lambda *_: pytest.fail("the lengths are read"))
        patch.setattr(accelerator, "kernel", lambda: lambda query, *_, scale, window_size: calls.append(1) or query)
        sequences = {"cu_seq_lens_q": starts, "max_length_q": 7}
        found = accelerator.unpadding_of(quick, torch.zeros(1, 12, 32), None, None, sequences)
        assert found.starts.dtype is torch.int32
        states = torch.randn(1, 12, 4)
        assert torch.equal(found.scatter(found.gather(states)), states)
    for each in (given, {name: value for name, value in given.items() if "max" not in name}):
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
        assert bool(calls) == ("head_mask" in more)
        calls.clear()
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
    monkeypatch.setattr(accelerator, "_DTYPES", (torch.bfloat16,))
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


def test_without_the_kernel_nothing_is_skipped(monkeypatch):
    monkeypatch.setattr(accelerator, "DEVICE", "cpu")
    monkeypatch.setattr(accelerator, "kernel", lambda: None)
    _, quick = make("bert")
    given = batch(quick)
    assert accelerator.unpadding_of(quick, torch.zeros(3, 9, 32).bfloat16(), given["attention_mask"], None, {}) is None


def on_meta(family="qwen3"):
    config = preset(family, **STRONG)
    kind = "DecoderForCausalLM" if config.is_decoder else "EncoderModel"
    with torch.device("meta"):
        return getattr(blockformer, f"Blockformer{kind}")(config)


def test_elsewhere_than_on_the_cpu_a_prepared_model_has_that_runtime_and_loses_it_again():
    model = on_meta()
    model.prepare_for_inference()
    assert type(model.model.runtime) is AcceleratorRuntime
    assert type(model.runtime) is LoadedRuntime
    model.prepare_for_training()
    assert type(model.model.runtime) is LoadedRuntime


@pytest.mark.parametrize("before", [None, "offloaded"])
def test_compiling_there_is_a_static_cache(before, monkeypatch):
    monkeypatch.setattr(accelerator, "COMPILES", ("meta",))
    model = on_meta()
    model.generation_config.cache_implementation = before
    for _ in range(2):
        model.prepare_for_inference(compile=True)
        assert model.generation_config.cache_implementation == "static"
    model.prepare_for_inference()
    assert model.generation_config.cache_implementation == before
    model.prepare_for_inference(compile=True).prepare_for_training()
    assert model.generation_config.cache_implementation == before
    with pytest.raises(ValueError, match="is for models that write text; this BlockformerEncoderModel does not"):
        on_meta("bert").prepare_for_inference(compile=True)
    with pytest.raises(ValueError, match="a model on the CPU that writes text"):
        model.prepare_for_inference(compile=True, head_bits=8)


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
        assert accelerator._runs_kernel.__wrapped__(device) is runs
    assert accelerator._runs_kernel.__wrapped__(torch.device("cpu"))
