"""Whether a GPU answers rightly, and how fast: the first thing to run where there is one.

Usage: python benchmarks/gpu.py [--output FOLDER] [--minutes N] [--tiny]

It needs torch and transformers, no network and no installation of this project. Every way is compared with float64 on
the CPU and with transformers' own class on the device, and what waits for the device is counted. Then encoders,
decoding and a training step are timed, both libraries taking turns. It writes `gpu.json` and `gpu.md`. Without a GPU it
checks what a CPU can, and times nothing. It ends with status 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers.generation import StoppingCriteria, StoppingCriteriaList

ROOT = Path(__file__).resolve().parent.parent
# Times as far from float64 as transformers' class that ours may be.
_MOST = 4
_ROWS, _LENGTH = 4, 24
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def project():
    """The package, from this checkout, with its conversion."""
    sys.path.insert(0, str(ROOT / "src"))
    import blockformer

    if importlib.util.find_spec("blockformer.conversion") is None:
        place = ROOT / "conversion"
        spec = importlib.util.spec_from_file_location(
            "blockformer.conversion", place / "__init__.py", submodule_search_locations=[str(place)]
        )
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return blockformer


@dataclass(frozen=True)
class Check:
    """An answer: how far it is from float64, as a share of the largest value, ours and transformers'."""

    family: str
    way: str
    dtype: str
    ours: float
    theirs: float
    is_right: bool
    note: str = ""


@dataclass(frozen=True)
class Time:
    """A piece of work, in milliseconds or megabytes: the best and the median, ours and transformers'."""

    work: str
    dtype: str
    unit: str
    ours: tuple[float, float]
    theirs: tuple[float, float]

    @property
    def ratio(self) -> float:
        return self.theirs[1] / self.ours[1]


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 120}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def official_models() -> dict[str, Callable[[], transformers.PreTrainedModel]]:
    """Small models of every topology, of transformers' own classes; the weights are random and large.

    Gemma 2's attention is eager: in some releases (5.17) its default, "sdpa", leaves the soft caps out.
    """
    gated = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "initializer_range": 0.2, **TOKENS}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             {"layers": 2, "ffn_dim": 96, "attention_heads": 4}.items()}  # fmt: skip
    last = {"pad_token_id": 119, "decoder_start_token_id": 119, "eos_token_id": 0, "forced_eos_token_id": 0}
    return {
        "bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**SIZES, intermediate_size=96, initializer_range=0.2)
        ),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **gated)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=120, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, **TOKENS
            )
        ),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(
                **SIZES, **gated, sliding_window=16, query_pre_attn_scalar=16, attn_implementation="eager"
            )
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=120, decoder_start_token_id=0
            )
        ),
        "marian": lambda: transformers.MarianMTModel(
            transformers.MarianConfig(
                **sides, **last, d_model=64, vocab_size=120, init_std=0.2, max_position_embeddings=256
            )
        ),
    }


def converted(peer: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Ours with the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        return project().from_official(folder)


def inputs_of(model, device: str) -> dict[str, torch.Tensor]:
    """A padded batch, a decoder's on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 118, (_ROWS, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    is_decoder = not model.config.is_encoder_decoder and model.can_generate()
    for row in range(1, _ROWS):
        mask[row, (slice(4 * row) if is_decoder else slice(_LENGTH - 4 * row, None))] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids[:, :7].contiguous()
    elif is_decoder:  # without them, transformers counts the padding
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return {name: tensor.to(device) for name, tensor in batch.items()}


@torch.no_grad()
def logits(model, device: str, **more) -> torch.Tensor:
    """Of the real tokens, on the CPU."""
    batch = inputs_of(model, device)
    found = model(**batch, **more).logits
    mask = None if "decoder_input_ids" in batch else batch["attention_mask"].bool()
    return (found if mask is None else found[mask]).double().cpu()


@torch.no_grad()
def exact_logits(peer) -> torch.Tensor:
    """The same by transformers' class in float64, row by row without padding: no mask has a part in it."""
    model, batch = copy.deepcopy(peer).double(), inputs_of(peer, "cpu")
    found = []
    for row in range(_ROWS):
        real = batch["attention_mask"][row].bool()
        one = {"input_ids": batch["input_ids"][row : row + 1, real]}
        if "decoder_input_ids" in batch:
            one["decoder_input_ids"] = batch["decoder_input_ids"][row : row + 1]
        found.append(model(**one).logits[0])
    return torch.stack(found) if "decoder_input_ids" in batch else torch.cat(found)


def checks(device: str, names: list[str]) -> Iterator[Check]:
    """Every way of every family in every dtype, compared with float64 and transformers' class."""
    for name in names:
        torch.manual_seed(0)
        peer = official_models()[name]().eval()
        ours = converted(peer).eval()
        exact = exact_logits(peer)
        for label, dtype in DTYPES.items():
            theirs, plain = peer.to(device, dtype), copy.deepcopy(ours).to(device, dtype)
            usual = _error(logits(theirs, device), exact)
            for way, prepare in _ways(name, device).items():
                yield _check(
                    name, way, label, usual, lambda p=prepare, m=plain, e=exact: _error(logits(p(m), device), e)
                )
            yield _check(name, "gradients", label, *_gradients(theirs, plain, device))
            if plain.can_generate():
                yield from _texts(name, label, theirs, plain, device)


def _ways(name: str, device: str) -> dict[str, Callable]:
    ways = {
        "as loaded": lambda model: model,
        "prepared": lambda model: copy.deepcopy(model).prepare_for_inference(),
    }
    if name == "gemma2" and device != "cpu":  # scores with caps, without a matrix of all of them

        def flexible(model):
            model = copy.deepcopy(model)
            model.set_attn_implementation("flex_attention")
            return model

        ways["flex attention"] = flexible

        def long(model):
            from blockformer.engine import accelerator

            accelerator._MANY_SCORES = 0.9 * _LENGTH**2  # this prompt takes the way of long ones, a step does not
            return copy.deepcopy(model).prepare_for_inference()

        ways["prepared, as a long context"] = long
    return ways


def _check(family: str, way: str, dtype: str, usual: float, ours) -> Check:
    try:
        error = ours() if callable(ours) else ours
    except Exception as problem:  # whatever a way raises here is what is to be known
        note = "".join(traceback.format_exception_only(problem)).strip().splitlines()[-1][:300]
        return Check(family, way, dtype, float("nan"), usual, False, note)
    return Check(family, way, dtype, error, usual, error <= _MOST * usual + 1e-6)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).abs().max() / exact.abs().max()).item()


def _gradients(theirs, ours, device: str) -> tuple[float, Callable[[], float]]:
    """How far the loss of a batch without padding, and the gradient of its embeddings, are from float64's."""

    def found(model, place: str, dtype=None) -> torch.Tensor:
        model = copy.deepcopy(model).to(place, dtype)
        batch = {key: value for key, value in inputs_of(model, place).items() if key.endswith("input_ids")}
        labels = batch["decoder_input_ids"] if "decoder_input_ids" in batch else batch["input_ids"]
        loss = model(**batch, labels=labels).loss
        loss.backward()
        gradient = model.get_input_embeddings().weight.grad.double().flatten().cpu()
        return torch.cat([loss.detach().double().cpu()[None], gradient])

    exact = found(theirs, "cpu", torch.float64)
    return _error(found(theirs, device), exact), lambda: _error(found(ours, device), exact)


def _texts(name: str, dtype: str, theirs, plain, device: str) -> Iterator[Check]:
    """Greedy text: transformers' judges it, since in bfloat16 a rounding may choose another token."""
    asked = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    ways = {"generate": lambda: plain, "generate, prepared": lambda: copy.deepcopy(plain).prepare_for_inference()}
    if device != "cpu":
        ways["generate, compiled"] = lambda: copy.deepcopy(plain).prepare_for_inference(compile=True)
    batch = {key: value for key, value in inputs_of(plain, device).items() if key in ("input_ids", "attention_mask")}
    expected = theirs.generate(**batch, **asked)
    for way, make in ways.items():

        def differing(make=make) -> float:
            found = make().generate(**batch, **asked)
            return 0.0 if found.shape == expected.shape and torch.equal(found, expected) else _surprise(found)

        def _surprise(found) -> float:
            """By how much transformers prefers its own text's tokens, as a share of the largest logit."""
            if plain.config.is_encoder_decoder:
                scores = theirs(**batch, decoder_input_ids=found).logits[:, :-1]
                chosen = found[:, 1:]
            else:
                mask = torch.cat([batch["attention_mask"], torch.ones_like(found[:, _LENGTH:])], 1)
                places = (mask.cumsum(-1) - 1).clamp(min=0)
                scores = theirs(input_ids=found, attention_mask=mask, position_ids=places).logits[:, _LENGTH - 1 : -1]
                chosen = found[:, _LENGTH:]
            lost = scores.amax(-1) - scores.gather(-1, chosen[..., None])[..., 0]
            return (lost.max() / scores.abs().max()).item()

        with torch.no_grad():
            yield _check(name, way, dtype, 1e-6 if dtype == "float32" else 5e-3, differing)


def waits(device: str) -> dict[str, int | None]:
    """How often a padded batch and a padded prompt make the host wait for the device; None without a GPU."""
    found: dict[str, int | None] = {}
    for family, what in (("bert", "batch"), ("qwen3", "prompt")):
        torch.manual_seed(0)
        model = converted(official_models()[family]().eval()).to(device, torch.bfloat16).eval()
        for way in ("as loaded", "prepared"):
            if way == "prepared":
                model.prepare_for_inference()
            found[f"{what} {way}"] = None if device == "cpu" else _waits(model, inputs_of(model, device))
    return found


@torch.no_grad()
def _waits(model, batch: dict[str, torch.Tensor]) -> int:
    with warnings.catch_warnings(record=True) as seen:
        model(**batch)  # what is made once
        torch.cuda.synchronize()
        warnings.simplefilter("always")
        seen.clear()
        torch.cuda.set_sync_debug_mode("warn")
        model(**batch)
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in seen)


def interleaved(ours: Callable[[], list[float]], theirs: Callable[[], list[float]], rounds: int):
    """Best and median of both, taking turns; one warm-up each."""
    times: tuple[list[float], list[float]] = ([], [])
    ours(), theirs()
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            times[index].extend((ours, theirs)[index]())
    return [(min(each), statistics.median(each)) for each in times]


def _timed(work: Callable[[], object]) -> Callable[[], list[float]]:
    def once() -> list[float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return [1e3 * (time.perf_counter() - start)]

    return once


def encoders(tiny: bool) -> Iterator[Time]:
    """BERT-base by how full a batch is."""
    layers, rows, length = (2, 4, 64) if tiny else (12, 64, 256)
    torch.manual_seed(0)
    peer = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers), add_pooling_layer=False).eval()
    ours = converted(peer).eval()
    for label, dtype in DTYPES.items():
        ours, peer = ours.to("cuda", dtype), peer.to("cuda", dtype)
        ours.prepare_for_inference()
        for fill in (0.4, 0.7, 1.0):
            ids = torch.randint(1000, 20000, (rows, length), device="cuda")
            ends = [round(length * min(1.0, fill * (0.5 + each / (rows - 1)))) for each in range(rows)]
            mask = (torch.arange(length)[None] < torch.tensor(ends)[:, None]).long().cuda()
            works = [_timed(lambda m=model, i=ids, k=mask: _reading(m, i, k)) for model in (ours, peer)]
            share = f"{mask.float().mean().item():.0%}"
            yield Time(f"BERT-base, {rows} x {length}, {share} full", label, "ms", *interleaved(*works, 10))
        ours.prepare_for_training()


@torch.no_grad()
def _reading(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask).last_hidden_state


def prompts(tiny: bool) -> Iterator[Time]:
    """A padded prompt of Qwen3-0.6B's shape, and a long one of Gemma 2's with soft caps."""
    rows, length = (4, 64) if tiny else (16, 1024)
    theirs = transformers.Qwen3ForCausalLM(_qwen3(2 if tiny else 28, 1000)).eval()
    mask = (torch.arange(length)[None] >= torch.linspace(0, 0.9 * length, rows)[:, None]).long().cuda()
    share = f"{mask.float().mean().item():.0%}"
    yield from _prompt(theirs, mask, f"Qwen3-0.6B, a prompt of {rows} x {length}, {share} full")
    layers, length = (2, 64) if tiny else (8, 8192)
    sizes = {"num_hidden_layers": layers, "vocab_size": 1000, "max_position_embeddings": length}
    config = transformers.Gemma2Config(**sizes, attn_implementation="eager")  # see `official_models`
    theirs = transformers.Gemma2ForCausalLM(config).eval()
    mask = torch.ones(1, length, dtype=torch.long, device="cuda")
    yield from _prompt(theirs, mask, f"Gemma 2 2B width, {layers} layers, a prompt of 1 x {length}")


def _prompt(theirs, mask, name: str) -> Iterator[Time]:
    """With the memory that it holds beyond the weights."""
    ours = converted(theirs).to("cuda", torch.bfloat16).eval().prepare_for_inference()
    theirs = theirs.to("cuda", torch.bfloat16)
    ids = torch.randint(3, 1000, mask.shape, device="cuda")

    @torch.no_grad()
    def read(model):
        model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)

    works = [lambda model=model: read(model) for model in (ours, theirs)]
    yield Time(name, "bfloat16", "ms", *interleaved(*map(_timed, works), 5))
    yield Time(f"{name}, memory", "bfloat16", "MB", *map(_held, works))


def _held(work: Callable[[], object]) -> tuple[float, float]:
    """The most memory that a piece of work holds beyond what was there before, in megabytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return ((torch.cuda.max_memory_allocated() - before) / 1e6,) * 2


def _qwen3(layers: int, vocabulary: int):
    return transformers.Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        tie_word_embeddings=True, num_hidden_layers=layers, vocab_size=vocabulary,
    )  # fmt: skip


class _Clock(StoppingCriteria):
    """Notes when each token is there."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def decoding(tiny: bool) -> Iterator[Time]:
    """Tokens of Qwen3-0.6B's shape: both as they are, and both over a static cache."""
    config = _qwen3(2, 1000) if tiny else _qwen3(28, 151936)
    torch.manual_seed(0)
    peer = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    ours = converted(peer).to("cuda", torch.bfloat16).eval()
    peer = peer.to("cuda")
    static = copy.deepcopy(peer)
    static.generation_config.cache_implementation = "static"
    for batch, context in itertools.product((1, 16), (128, 2048)):
        name = f"Qwen3-0.6B, a token of {batch} x {context}"
        plain = [_writing(model, batch, context) for model in (ours, peer)]
        yield Time(name, "bfloat16", "ms", *interleaved(*plain, 2))
        compiled = _writing(copy.deepcopy(ours).prepare_for_inference(compile=True), batch, context)
        yield Time(f"{name}, compiled, against eager", "bfloat16", "ms", *interleaved(compiled, plain[1], 2))
        yield Time(
            f"{name}, compiled, against their static cache", "bfloat16", "ms",
            *interleaved(compiled, _writing(static, batch, context), 2),
        )  # fmt: skip
        del compiled
        gc.collect()


def _writing(model, batch: int, context: int, tokens: int = 32) -> Callable[[], list[float]]:
    ids = torch.randint(3, model.config.vocab_size, (batch, context), device="cuda")

    def once() -> list[float]:
        clock = _Clock()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
            stopping_criteria=StoppingCriteriaList([clock]), pad_token_id=0,
        )  # fmt: skip
        return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(clock.times)][1:]

    return once


def training(tiny: bool) -> Iterator[Time]:
    """A step with a vocabulary of 151,936: its time, and the most memory that it holds beyond the weights."""
    rows, length = (2, 64) if tiny else (8, 1024)
    config = _qwen3(2 if tiny else 8, 151936)
    torch.manual_seed(0)
    peer = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    ours = converted(peer).to("cuda", torch.bfloat16).train()
    peer = peer.to("cuda").train()
    ids = torch.randint(3, config.vocab_size, (rows, length), device="cuda")

    def step(model):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    name = f"Qwen3 width, {config.num_hidden_layers} layers, a training step of {rows} x {length}"
    yield Time(name, "bfloat16", "ms", *interleaved(_timed(lambda: step(ours)), _timed(lambda: step(peer)), 5))
    yield Time(f"{name}, memory", "bfloat16", "MB", *(_held(lambda m=model: step(m)) for model in (ours, peer)))


def markdown(machine: dict, found: list[Check], sync: dict, times: list[Time], left_out: list[str]) -> str:
    """Both tables."""
    lines = [
        f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}.", "",
        "| model | way | dtype | from float64: Blockformer | transformers | |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for each in found:
        verdict = "right" if each.is_right else f"**wrong** {each.note}"
        lines.append(f"| {each.family} | {each.way} | {each.dtype} | {each.ours:.1e} | {each.theirs:.1e} | {verdict} |")
    counts = ", ".join(f"{way} {'not counted' if count is None else count}" for way, count in sync.items())
    lines += ["", f"Waits for the device, with padding: {counts}."]
    if times:
        lines += [
            "",
            "| work | dtype | unit | Blockformer, best / median | transformers | ratio |",
            "|---|---|---|---|---|---|",
        ]
    for each in times:
        pairs = [f"{best:,.2f} / {median:,.2f}" for best, median in (each.ours, each.theirs)]
        lines.append(f"| {each.work} | {each.dtype} | {each.unit} | {pairs[0]} | {pairs[1]} | {each.ratio:.2f} |")
    lines += [f"\nNot measured: {what}." for what in left_out]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="where both files go")
    parser.add_argument("--minutes", type=float, default=8, help="after so many nothing new is timed")
    parser.add_argument("--only", nargs="+", choices=list(official_models()), help="check these models only")
    parser.add_argument("--tiny", action="store_true", help="time shapes of no interest, to try the code")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "no GPU: checked on the CPU, nothing timed"
    machine = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    found: list[Check] = []
    for each in checks(device, options.only or list(official_models())):
        found.append(each)
        sign = "right" if each.is_right else f"WRONG {each.note}"
        print(
            f"{each.family}, {each.way}, {each.dtype}: {each.ours:.1e}, transformers {each.theirs:.1e}: {sign}",
            flush=True,
        )
    sync, times, left_out = waits(device), [], []
    for work in (encoders, prompts, training, decoding) if device == "cuda" else ():
        try:
            for row in work(options.tiny):
                times.append(row)
                print(f"{row.work}, {row.dtype}: {row.ours[1]:.2f} {row.unit}, ratio {row.ratio:.2f}", flush=True)
                if time.monotonic() > end:
                    left_out.append(f"what follows in {work.__name__}, out of time")
                    break
        except Exception as problem:  # one failure must not lose what is known
            left_out.append(f"{work.__name__}, {''.join(traceback.format_exception_only(problem)).strip()[:300]}")
        gc.collect()
        torch.cuda.empty_cache()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = {
        "checks": [asdict(each) for each in found],
        "times": [{**asdict(each), "ratio": each.ratio} for each in times],
    }
    report = {"machine": machine, **rows, "waits": sync, "not_measured": left_out}
    (options.output / "gpu.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    table = markdown(machine, found, sync, times, left_out)
    (options.output / "gpu.md").write_text(table, encoding="utf-8")
    print(f"\n{table}\nwritten to {options.output}/gpu.json and gpu.md")
    return 0 if all(each.is_right for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
