"""What each fast way of a prepared model gains: with all of them, and with all but one, turn by turn in one process.

A way that gains less than a tenth everywhere is to be deleted.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator

import seq2seq
import torch
import workloads
from rich.console import Console
from sizes import Size

from blockformer.engine import choices

Work = Callable[..., list[float]]
"""Does a piece of work with a model; seconds of each of its equal parts."""


@contextlib.contextmanager
def without_way(way: str) -> Iterator[None]:
    """While it lasts, models are prepared, and run, without a way."""
    before = choices.FASTER_HERE
    choices.FASTER_HERE = {each: is_faster and each[0] != way for each, is_faster in before.items()}
    try:
        yield
    finally:
        choices.FASTER_HERE = before


def rows(size: Size, dtypes, console: Console) -> Iterator[workloads.Row]:
    """A row for each model, dtype, way and work; its peer is ours without the way."""
    for dtype in dtypes:
        for shape in (size.prefill, size.gpt2, size.small):
            yield from _measured(workloads.make_pair(shape, dtype)[0], shape.name, _writing(shape, size), size, console)
        bert = seq2seq.make_bert(size.layers)[0].to(dtype)
        yield from _measured(bert, "BERT-base width", _encoding(), size, console)
    marian, t5 = seq2seq.make_marian(size.marian_vocab_size)[0], seq2seq.make_t5(size.layers)[0]
    for name, model in (("Marian, Transformer-base width", marian), ("T5-base width", t5)):
        yield from _measured(model, name, _translating(model.config.vocab_size, size), size, console)


def _measured(model, name: str, works: dict[str, tuple], size: Size, console: Console) -> Iterator[workloads.Row]:
    dtype, base = model.dtype, copy.deepcopy(model).prepare_for_inference()
    for way in [way for (way, its_dtype), is_faster in choices.FASTER_HERE.items() if is_faster and its_dtype is dtype]:
        with console.status(f"{name}, {dtype}, without {way}"):
            other = base  # the same weights at the same place in memory, which can make a fifth of the time
            if way == choices.PACKED:  # by the way they are prepared
                with without_way(way):
                    other = copy.deepcopy(model).prepare_for_inference()
            for work, (run, context, batch) in works.items():

                def without(run=run, way=way, other=other) -> list[float]:
                    with without_way(way):
                        return run(other)

                times = workloads.interleaved(lambda run=run: run(base), without, size.rounds)
                yield workloads.make_row(name, work, dtype, context, batch, times, 0.0, peer=f"without {way}")


def _writing(shape: workloads.Shape, size: Size) -> dict[str, tuple]:
    """One text and four after a prompt, and a prompt."""
    works, length = {}, size.prefills[0]
    for context, batch in ((16, 1), (length, 1), (16, 4)):
        run = _decoding(shape.vocab_size, context, batch, size.tokens)
        works[f"decode, {batch} x {context:,}"] = (run, context, batch)
    works[f"prompt of {length:,}"] = (_reading(torch.randint(0, shape.vocab_size, (1, length))), length, 1)
    return works


def _decoding(vocab_size: int, context: int, batch: int, tokens: int) -> Work:
    ids, works = torch.randint(0, vocab_size, (batch, context)), {}

    def run(model) -> list[float]:
        if id(model) not in works:
            works[id(model)] = workloads.decoding(model, ids, tokens)
        return works[id(model)]()

    return run


def _reading(ids: torch.Tensor, mask: torch.Tensor | None = None) -> Work:
    @torch.no_grad()
    def run(model) -> list[float]:
        start = time.perf_counter()
        model(ids, attention_mask=mask)
        return [time.perf_counter() - start]

    return run


def _encoding() -> dict[str, tuple]:
    """One short text, and a padded batch."""
    short, long = torch.randint(1, 8192, (1, 32)), torch.randint(1, 8192, (seq2seq.ROWS, seq2seq.LENGTH))
    works = {"encode 1 x 32": (_reading(short), 32, 1)}
    for fill in seq2seq.FILLS:
        works[f"encode, {fill:.0%} full"] = (_reading(long, seq2seq.padding(fill)), seq2seq.LENGTH, seq2seq.ROWS)
    return works


def _translating(vocab_size: int, size: Size) -> dict[str, tuple]:
    """Greedy text of one source, of two and of four."""

    def written(rows: int) -> Work:
        ids = torch.randint(1, vocab_size - 1, (rows, 64))

        def run(model) -> list[float]:
            start = time.perf_counter()
            model.generate(ids, max_new_tokens=size.text_tokens, min_new_tokens=size.text_tokens, do_sample=False)
            return [(time.perf_counter() - start) / size.text_tokens]

        return run

    return {f"greedy, {rows} x 64": (written(rows), 64, rows) for rows in (1, 2, 4)}
