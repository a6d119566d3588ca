"""Blockformer beside transformers, on the same random weights, turn by turn in one process.

Usage: python benchmarks/run.py [--full] [--only decoder gpt2 encoder encoder-decoder translator] [--output FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import machine
import report
import seq2seq
import torch
import workloads
from rich.console import Console
from rich.progress import track

DTYPES = [torch.bfloat16, torch.float32]
PARTS = ["decoder", "gpt2", "encoder", "encoder-decoder", "translator"]
SMALL = workloads.Shape("Qwen3-0.6B width, 6 layers, 32k vocabulary", layers=6, vocab_size=32768)
FULL = workloads.Shape("Qwen3-0.6B", layers=28, vocab_size=151936)
GPT2 = workloads.Shape(
    "GPT-2", layers=12, vocab_size=50257, hidden_size=768, heads=12, kv_heads=12, head_dim=64, family="gpt2"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole 0.6B shape, longer contexts, batch 8")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    console = Console()

    limits = machine.measure(DTYPES)
    rows: list[workloads.Row] = []
    rounds, tokens = (5, 24) if options.full else (5, 12)
    if "decoder" in options.only:
        decodes = [(16, 1), (512, 1), (2048, 1)] + ([(8192, 1), (512, 8)] if options.full else [])
        shape = FULL if options.full else SMALL
        rows += decoder_rows(shape, decodes, [512, 2048], rounds, tokens, limits, console)
    if "gpt2" in options.only:
        rows += decoder_rows(GPT2, [(16, 1), (512, 1)], [], rounds, tokens, limits, console)
    if "encoder" in options.only:
        pair = seq2seq.make_bert(layers=12 if options.full else 4)
        for dtype in DTYPES[::-1]:
            pair = tuple(model.to(dtype) for model in pair)
            for fill in track(seq2seq.FILLS, f"encoder {dtype}", console=console):
                rows.append(seq2seq.encode(pair, "BERT-base width", fill, 5, limits.gemm_gflops))
    if "encoder-decoder" in options.only:
        pair = seq2seq.make_t5(layers=12 if options.full else 4)
        encoders = tuple(model.get_encoder() for model in pair)
        for fill in track(seq2seq.FILLS, "encoder of an encoder-decoder", console=console):
            rows.append(seq2seq.encode(encoders, "T5-base width", fill, 5, limits.gemm_gflops))
        rows += written(pair, "T5-base width", limits, console)
    if "translator" in options.only:
        pair = seq2seq.make_marian(vocab_size=58101 if options.full else 8192)
        rows += written(pair, "Marian, Transformer-base width", limits, console)
    report.write(options.output, limits, rows)
    console.print(report.markdown(limits, rows), soft_wrap=True, highlight=False)
    console.print(f"Written to {options.output}")


def decoder_rows(
    shape: workloads.Shape,
    decodes: list[tuple[int, int]],
    prefills: list[int],
    rounds: int,
    tokens: int,
    limits: machine.Machine,
    console: Console,
) -> list[workloads.Row]:
    """Decode at these contexts and batches, and prefill of these lengths, in every dtype."""
    rows = []
    for dtype in DTYPES:
        pair = workloads.make_pair(shape, dtype)
        for context, batch in track(decodes, f"{shape.family} decode {dtype}", console=console):
            rows.append(workloads.decode(pair, shape, context, batch, rounds, tokens, limits.read_gbs))
        for context in track(prefills, f"{shape.family} prefill {dtype}", console=console) if prefills else ():
            rows.append(workloads.prefill(pair, shape, context, rounds, limits.gemm_gflops))
        del pair
    return rows


def written(pair, name: str, limits: machine.Machine, console: Console) -> list[workloads.Row]:
    """Text of an encoder-decoder, greedy and with beams."""
    beams = track([1, 4], name, console=console)
    return [seq2seq.write(pair, name, count, 3, 24, limits.read_gbs) for count in beams]


if __name__ == "__main__":
    main()
