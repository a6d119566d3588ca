"""What `gpu.py` times: encoders, prompts, training steps and tokens, both libraries taking turns."""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import transformers
from gpu_models import converted
from transformers.generation import StoppingCriteria, StoppingCriteriaList

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    layers = 2 if tiny else 12
    torch.manual_seed(0)
    peer = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers), add_pooling_layer=False).eval()
    ours = converted(peer).eval()
    for label, dtype in DTYPES.items():
        ours, peer = ours.to("cuda", dtype), peer.to("cuda", dtype)
        ours.prepare_for_inference()
        for rows, length in ((4, 64),) if tiny else ((32, 128), (64, 256), (64, 512)):
            for fill in (0.4, 0.7, 1.0):
                ids = torch.randint(1000, 20000, (rows, length), device="cuda")
                ends = [round(length * min(1.0, fill * (0.5 + each / (rows - 1)))) for each in range(rows)]
                ends = [length] * rows if fill == 1 else ends
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


def decoding(tiny: bool, shapes=((1, 128), (16, 2048), (1, 2048), (16, 128))) -> Iterator[Time]:
    """Tokens of Qwen3-0.6B's shape: both as they are, and both over a static cache."""
    config = _qwen3(2, 1000) if tiny else _qwen3(28, 151936)
    torch.manual_seed(0)
    peer = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    ours = converted(peer).to("cuda", torch.bfloat16).eval()
    peer = peer.to("cuda")
    static = copy.deepcopy(peer)
    static.generation_config.cache_implementation = "static"
    for batch, context in shapes:
        name = f"Qwen3-0.6B, a token of {batch} x {context}"
        plain = [_writing(model, batch, context) for model in (ours, peer)]
        yield Time(name, "bfloat16", "ms", *interleaved(*plain, 2))
        compiled = _writing(copy.deepcopy(ours).prepare_for_inference(compile=True), batch, context)
        yield Time(f"{name}, compiled, against eager", "bfloat16", "ms", *interleaved(compiled, plain[1], 2))
        yield Time(
            f"{name}, compiled, against their static cache", "bfloat16", "ms",
            *interleaved(compiled, _writing(static, batch, context), 8),
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


WORKS: dict[str, Callable[[bool], Iterator[Time]]] = {
    "encoders": encoders, "prompts": prompts, "training": training, "decoding": decoding,
}  # fmt: skip
