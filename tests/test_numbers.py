"""Numbers that must agree, over random configs of every topology: the properties of `docs/guards.md`, "Numbers".

Each runs with few examples here and with many under the marker `exhaustive`.
"""

import asyncio
import copy
import inspect
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import strategies as st
from pairs import (
    FAMILIES,
    assert_as_exact,
    assert_close,
    assert_gradients_close,
    in_float64,
    keep_padding,
    largest,
    model,
    pair,
    token_ids,
)
from safetensors.torch import load_file
from strategies import ABSOLUTE, BOOLEANS, CHOICES, WRITERS, Mix, Subject, mixes, property_test, rows_of
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from blockformer.conversion import from_official
from blockformer.demo.search import EncoderMissing, docstrings, embed, encoder_folder
from blockformer.model import attention
from blockformer.model.feed_forward import FeedForward
from blockformer.training import chunked_loss

pytestmark = pytest.mark.portable

AUTO = (AutoModelForMaskedLM, AutoModelForCausalLM, AutoModelForSeq2SeqLM)
LENGTH = 16
LENGTHS = st.lists(st.integers(1, LENGTH), min_size=2, max_size=3)


@property_test(
    12,
    600,
    mix=mixes(WRITERS),
    cuts=st.sets(st.integers(1, LENGTH - 1), max_size=4),
    gap=st.integers(0, 6),
    kind=st.sampled_from(["growing", "dynamic", "static"]),
)
@torch.no_grad()
def test_a_cache_filled_in_any_chunks_gives_the_logits_of_none(mix, cuts, gap, kind):
    subject = Subject(mix)
    ids, mask, source = subject.tokens(2, LENGTH), rows_of([LENGTH - gap, LENGTH], "left"), subject.source(2)
    cache, logits, ends = subject.cache(kind, LENGTH + 3), [], [*sorted(cuts), LENGTH]
    for start, end in zip([0, *ends], ends, strict=False):
        out = subject(ids[:, start:end], mask[:, :end], source, past_key_values=cache, use_cache=True)
        logits.append(out.logits)
    assert_near(torch.cat(logits, dim=1)[mask.bool()], subject, ids, mask, source, use_cache=False)


@property_test(6, 150, mix=mixes(WRITERS), gap=st.integers(0, 6), chunk=st.integers(1, 9))
def test_every_cache_writes_the_same_text(mix, gap, chunk):
    subject = Subject(mix)
    ids, mask, source = subject.tokens(2, 10), rows_of([10 - gap, 10], "left"), subject.source(2)
    plain = subject.write(ids, mask, source, use_cache=False)
    ways = {
        "growing": {},
        "dynamic": {"past_key_values": subject.cache("dynamic", 24)},
        "static": {"past_key_values": subject.cache("static", 24)},
    }
    if not subject.has_two_stacks:  # their prompt is one token
        ways["in chunks"] = {"prefill_chunk_size": chunk}
    for name, settings in ways.items():
        assert torch.equal(subject.write(ids, mask, source, **settings), plain), name


@property_test(
    16,
    600,
    mix=mixes(),
    lengths=st.lists(st.integers(1, LENGTH), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
)
@torch.no_grad()
def test_a_padded_batch_is_its_single_rows_padding_skipped_or_not(mix, lengths, side):
    subject = Subject(mix)
    ids, mask, source = subject.padded(lengths, side)
    with pytest.MonkeyPatch.context() as patch:
        for is_padded in (False, True):
            if is_padded:
                keep_padding(patch)
            subject.model.prepare_for_training()
            batch = subject(ids, mask, source).logits
            for row, real in enumerate(mask.bool()):
                alone = {name: tensor[[row]] for name, tensor in source.items()}
                if "attention_mask" in alone:  # the source of a single run has no padding either
                    alone = {name: tensor[:, alone["attention_mask"][0].bool()] for name, tensor in alone.items()}
                assert_near(batch[row, real], subject, ids[[row]][:, real], None, alone)


@torch.no_grad()
def assert_near(found, subject, ids, mask, source, **keywords):
    """What a subject computes, within the bound; where a mix blows rounding up, as near to float64 as that is."""
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    expected = subject(ids, mask, source, **keywords).logits[real]
    if largest(found - expected) <= 1e-5 * largest(expected):
        assert_close(found, expected)
        return
    with widened(subject, source) as (wide, source):
        exact = wide(ids, mask, source, **keywords).logits[real]
    assert_as_exact(found, expected, exact)


@contextmanager
def widened(subject, source):
    """A subject and what it looks at, both in float64."""
    wide = copy.copy(subject)
    with in_float64(subject.model) as wide.model:
        yield wide, {name: given.double() if given.is_floating_point() else given for name, given in source.items()}


@torch.no_grad()
def assert_is_sdpa(backend, mix, lengths):
    subject = Subject(mix)
    ids, mask, source = subject.padded(lengths)
    subject.model.set_attn_implementation(backend)
    found = subject(ids, mask, source).logits[mask.bool()]
    subject.model.set_attn_implementation("sdpa")
    assert_near(found, subject, ids, mask, source)


@property_test(16, 600, mix=mixes(), lengths=LENGTHS)
def test_eager_is_sdpa(mix, lengths):
    assert_is_sdpa("eager", mix, lengths)


BLOWN_UP = Mix(
    "encoder-decoder",
    {
        "position_type": "relative_bias",
        "relative_bias_per_layer": True,
        "relative_attention_num_buckets": 32,
        "num_hidden_layers": 2,
        "decoder_layers": 3,
        "num_key_value_heads": 2,
        "qk_norm": True,
        "norm_type": "rms_norm",
        "norm_placement": "input",
        "hidden_act": "silu",
        "gated_mlp": True,
        "lm_head_transform": True,
        "tie_word_embeddings": False,
        "share_embeddings": False,
        "decoder_vocab_size": 53,
        "attention_scale": 1.0,
        "embedding_scale": 2.0,
    },
    seed=9998,
)
"""Its float32 logits by sdpa and by eager are 0.8 and 0.3 of the bound from float64, and 1.1 from each other."""


def test_where_rounding_is_blown_up_eager_is_as_near_to_float64(monkeypatch):
    assert_is_sdpa("eager", BLOWN_UP, [12, 1])
    plain = attention.eager_attention_forward

    def slightly_wrong(module, query, key, value, attention_mask, scaling, **kwargs):
        return plain(module, query, key, value, attention_mask, scaling * (1 + 1e-5), **kwargs)

    monkeypatch.setattr(attention, "eager_attention_forward", slightly_wrong)
    with pytest.raises(AssertionError, match="from the exact result"):
        assert_is_sdpa("eager", BLOWN_UP, [12, 1])


@property_test(8, 300, mix=mixes(position_types=ABSOLUTE), lengths=LENGTHS)
def test_flex_is_sdpa(mix, lengths):
    mix.fields.pop("merged_attention", None)  # whose masks flex attention does not take
    with torch.compiler.set_stance("force_eager"):  # the same products; a compiled kernel for each config takes minutes
        assert_is_sdpa("flex_attention", mix, lengths)


@property_test(12, 600, mix=mixes(), chunk=st.integers(1, LENGTH + 2))
@torch.no_grad()
def test_the_feed_forward_network_in_chunks(mix, chunk):
    """Its own output to 1e-6. What later layers make of that rounding is held to the bound of all logits."""
    whole, chunked = Subject(mix), Subject(mix, chunk_size_feed_forward=chunk)
    for one, other in zip(whole.model.modules(), chunked.model.modules(), strict=True):
        if isinstance(one, FeedForward):
            states = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(mix.seed))
            assert_close(other(states), one(states), tolerance=1e-6)
    ids, source = whole.tokens(2, LENGTH), whole.source(2)
    assert_near(chunked(ids, None, source).logits.flatten(0, 1), whole, ids, None, source)


def learn(subject, ids, mask, source, **keywords):
    """The loss and each parameter's gradient after one backward pass."""
    subject.model.zero_grad()
    torch.manual_seed(0)
    labels = ids.masked_fill(ids % 3 == 0, -100)
    prefix = {} if subject.has_two_stacks else {"attention_mask": mask}
    if subject.has_two_stacks:
        loss = subject.model(**source, decoder_attention_mask=mask, labels=labels, **keywords).loss
    else:
        loss = subject.model(ids, **prefix, **source, labels=labels, **keywords).loss
    loss.backward()
    return loss.detach(), {
        name: parameter.grad.clone()
        for name, parameter in subject.model.named_parameters()
        if parameter.grad is not None
    }


def assert_loss_in_chunks(mix, lengths, room):
    subject = Subject(mix)
    subject.model.train()
    ids, mask, source = subject.padded(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "MAX_LOGITS", room * subject.decoder_config.vocab_size)
        loss, gradients = learn(subject, ids, mask, source, return_logits=True)
        in_chunks, found = learn(subject, ids, mask, source, return_logits=False)
    assert_close(in_chunks, loss, 1e-6)
    if all(share <= 1 for share in shares(found, gradients).values()):
        assert_gradients_close(found, gradients)
        return
    with widened(subject, source) as (wide, source):
        _, exact = learn(wide, ids, mask, source, return_logits=True)
    for name, share in shares(found, exact).items():
        if share > 1:
            assert_as_exact(found[name], gradients[name], exact[name])


def shares(found, gradients):
    """name -> how far a gradient is off, as a share of what `assert_gradients_close` allows."""
    assert found.keys() == gradients.keys()
    assert all(gradient.isfinite().all() for gradient in found.values())
    least = 0.1 * max(largest(gradient) for gradient in gradients.values())
    bounds = {name: 1e-5 * max(largest(gradient), least) for name, gradient in gradients.items()}
    return {name: largest(found[name] - gradients[name]) / bound for name, bound in bounds.items() if bound > 0}


@property_test(12, 400, mix=mixes(), lengths=LENGTHS, room=st.integers(1, 9))
def test_the_loss_in_chunks(mix, lengths, room):
    """What a mix makes of rounding is judged by float64: of a key's gradient often little is left but that."""
    assert_loss_in_chunks(mix, lengths, room)


CANCELLED = Mix(
    "encoder-decoder",
    {
        "position_type": "none",
        "num_hidden_layers": 2,
        "decoder_layers": 3,
        "num_key_value_heads": 2,
        "decoder_intermediate_size": 24,
        "qk_norm": "rotated",
        "attention_scale": 1.0,
        "attention_bias": True,
        "attention_output_bias": True,
        "norm_type": "rms_norm",
        "norm_weight": "zero_centered",
        "norm_placement": "input",
        "decoder_norm_placement": "pre",
        "hidden_act": "silu",
        "gated_mlp": False,
        "type_vocab_size": 2,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 7,
        "centered_window": True,
        "merged_attention": True,
        "lm_head_transform": True,
        "tie_word_embeddings": True,
        "share_embeddings": False,
        "decoder_vocab_size": 53,
    },
    seed=5544,
)
"""With AVX2, a query's gradients with the loss in chunks and without are 1.2 and 1.1 of the bound from float64, and 2.3
from each other."""


def test_where_gradients_cancel_those_of_chunks_are_as_near_to_float64(monkeypatch):
    assert_loss_in_chunks(CANCELLED, [7, 1], 1)
    plain = chunked_loss._LinearCrossEntropy.backward
    wrong = staticmethod(lambda ctx, grad: plain(ctx, grad * (1 + 1e-4)))
    monkeypatch.setattr(chunked_loss._LinearCrossEntropy, "backward", wrong)
    with pytest.raises(AssertionError, match="from the exact result"):
        assert_loss_in_chunks(CANCELLED, [7, 1], 1)


@property_test(10, 300, mix=mixes(), lengths=LENGTHS, dropout=st.sampled_from([0.0, 0.2]))
def test_gradient_checkpointing_changes_no_bit(mix, lengths, dropout):
    rates = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), dropout)
    subject = Subject(mix, **rates)
    subject.model.train()
    ids, mask, source = subject.padded(lengths)
    loss, gradients = learn(subject, ids, mask, source)
    subject.model.gradient_checkpointing_enable({"use_reentrant": False})
    again, found = learn(subject, ids, mask, source)
    assert torch.equal(again, loss)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name


@property_test(
    12, 600, mix=mixes(WRITERS), future=st.integers(1, LENGTH - 1), backend=st.sampled_from(["eager", "sdpa"])
)
@torch.no_grad()
def test_a_future_token_changes_no_bit_of_a_past_logit(mix, future, backend):
    subject = Subject(mix)
    subject.model.set_attn_implementation(backend)
    ids, source = subject.tokens(2, LENGTH), subject.source(2)
    changed = ids.clone()
    changed[:, future:] = subject.tokens(2, LENGTH - future, seed=1)
    past, other = (subject(each, None, source).logits for each in (ids, changed))
    assert torch.equal(past[:, :future], other[:, :future])
    assert not torch.equal(past, other)


@property_test(8, 300, mix=mixes(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@torch.no_grad()
def test_saving_keeps_every_bit_the_dtype_and_what_is_tied(mix, dtype):
    subject = Subject(mix)
    subject.model.to(dtype)
    auto_class = next(auto for auto in AUTO if auto.__name__ in subject.config.auto_classes)
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        again = auto_class.from_pretrained(folder, dtype="auto").eval()
        stored = load_file(Path(folder) / "model.safetensors")
    assert type(again) is type(subject.model)
    before, after = subject.model.state_dict(), again.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == dtype
        assert torch.equal(after[name], tensor), name
    own, loaded = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (subject.model, again))
    tied = before.keys() - own
    assert stored.keys() == before.keys() - tied
    assert tied == after.keys() - loaded
    assert len(tied) == subject.config.tie_word_embeddings + (
        subject.has_two_stacks and subject.config.share_embeddings
    )
    ids, source = (
        subject.tokens(2, 8),
        {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in subject.source(2).items()
        },
    )
    expected = subject(ids, None, source).logits
    subject.model = again
    assert torch.equal(subject(ids, None, source).logits, expected)


# Half precision


def kept_in_bfloat16(model, *arguments, **keywords):
    """Of each token, whether the likeliest next one is the same after rounding to bfloat16; [...] of bool."""
    exact = model(*arguments, **keywords).logits
    return copy.deepcopy(model).bfloat16()(*arguments, **keywords).logits.argmax(-1) == exact.argmax(-1), exact


@pytest.mark.parametrize("seeds", [2, pytest.param(40, marks=pytest.mark.exhaustive)])
@torch.no_grad()
def test_bfloat16_keeps_as_many_tokens_as_in_transformers_and_all_that_are_clear(seeds):
    """Random logits lie close together: rounding alone moves some tokens, here as there. None that stands out moves."""
    shares, clear_ones = [], []
    for seed in range(seeds):
        for family in FAMILIES:
            models = pair(family, seed, initializer_range=0.15)
            kept = [kept_in_bfloat16(each, token_ids(8, 64, seed)) for each in models]
            shares.append([share.float().mean() for share, _ in kept])
            best, second = kept[0][1].topk(2).values.unbind(-1)
            clear_ones.append(kept[0][0][best - second > 0.1 * best.abs()])
    ours, theirs = torch.tensor(shares).mean(0).tolist()
    clear = torch.cat(clear_ones).float()
    print(f"kept: ours {ours:.4f}, theirs {theirs:.4f}, clear {clear.mean():.5f} of {len(clear)}")
    assert ours > theirs - 0.005
    assert clear.mean() >= 0.99


@torch.no_grad()
def test_bfloat16_keeps_99_of_100_tokens_of_a_model_that_has_learnt(learnt):
    ours, rows = learnt
    kept, _ = kept_in_bfloat16(ours, rows)
    share = kept.float().mean().item()
    print(f"kept: {share:.4f}")
    assert share >= 0.99


@pytest.fixture(scope="module")
def learnt():
    """A small Qwen3 after 100 steps on the source of a module, and that text [64, 64] in characters."""
    text = inspect.getsource(textwrap)[:4096]
    alphabet = sorted(set(text))
    rows = torch.tensor([alphabet.index(character) for character in text]).view(64, 64)
    ours = model("qwen3", vocab_size=len(alphabet), num_hidden_layers=2, head_dim=16, initializer_range=0.1).train()
    optimizer, generator = torch.optim.AdamW(ours.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(100):
        batch = rows[torch.randint(64, (16,), generator=generator)]
        loss = ours(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 1.5
    return ours.eval(), rows


@torch.no_grad()
def test_bfloat16_moves_the_states_of_a_real_encoder_no_further_than_in_transformers():
    try:
        folder = encoder_folder()
    except EncoderMissing as missing:
        pytest.skip(str(missing))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = sorted((entry.text for entry in docstrings(Path(asyncio.__file__).parent)), key=len)
    texts = [text[:200] for text in found[:: len(found) // 11][:12]]
    models = {"ours": from_official(folder).eval(), "theirs": transformers.BertModel.from_pretrained(folder).eval()}
    exact, moved = embed(models["ours"], tokenizer, texts), {}
    for name, each in models.items():
        rounded = torch.nn.functional.normalize(embed(each.bfloat16(), tokenizer, texts).float(), dim=-1)
        moved[name] = 1 - (rounded * exact).sum(-1).min().item()
    print(f"1 - cosine, at most: {moved}")
    assert moved["ours"] < 1.5 * moved["theirs"]
    assert moved["ours"] < 1e-3


@property_test(6, 200, mix=mixes(["encoder-decoder"], ["relative_bias"]), size=st.sampled_from([1e3, 3e4, 1e6]))
@torch.no_grad()
def test_float16_stays_finite_where_activations_are_large(mix, size):
    """As T5 needs it: down projections in float32, and a clamp after each residual step."""
    plain = {"norm_type": "rms_norm", "norm_placement": "pre", "norm_bias": False, "final_norm": True}
    plain |= {"norm_weight": "plain"} if mix.fields.get("norm_weight") == "none" else {}
    plain |= {"num_hidden_layers": 2, "decoder_layers": 2}  # the states between two layers are seen
    subject = Subject(Mix(mix.topology, {**mix.fields, **plain}, mix.seed), float32_down_proj=True)
    for module in subject.model.modules():
        if isinstance(module, FeedForward):
            module.down_proj.weight.mul_(size)
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        half = type(subject.model).from_pretrained(folder, dtype=torch.float16).eval()
    for name, parameter in half.named_parameters():
        assert parameter.dtype == (torch.float32 if "down_proj" in name else torch.float16), name
    ids, source = subject.tokens(2, LENGTH), subject.source(2)
    subject.model = half
    out = subject(ids, None, source, output_hidden_states=True)
    largest = max(state.abs().max() for state in (*out.encoder_hidden_states, *out.decoder_hidden_states))
    assert out.logits.isfinite().all()
    assert size < 1e6 or largest > 60_000


# The draw of the weights


@pytest.mark.parametrize("seeds", [8, pytest.param(300, marks=pytest.mark.exhaustive)])
@torch.no_grad()
def test_the_draw_is_peaky_and_float32_rounds_below_the_bound(seeds):
    """Against float64 throughout: norms, positions and softmax, which are float32 in the models, widened too."""
    noise, differs = [], []
    for seed in range(seeds):
        mix = Mix("decoder", {"position_type": CHOICES["position_type"][seed % 8], "num_key_value_heads": 2}, seed)
        mix.fields.update({name: (seed >> place) % 2 == 1 for place, name in enumerate(BOOLEANS)})
        subject = Subject(mix)
        ids = subject.tokens(2, LENGTH, seed)
        written = subject.write(ids, torch.ones_like(ids), {}, tokens=8)
        differs.append(not torch.equal(*written))
        found = subject(ids).logits
        with in_float64(subject.model) as subject.model:
            expected = subject(ids, use_cache=False).logits
        noise.append(largest(found - expected) / (1e-5 * largest(expected)))
    print(
        f"shares of the bound: median {sorted(noise)[seeds // 2]:.2f}, largest {max(noise):.2f}; texts differ {differs}"
    )
    assert max(noise) < 1
    assert sum(differs) > 0.7 * seeds
