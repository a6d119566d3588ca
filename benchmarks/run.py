"""Blockformer beside transformers, on the same random weights, turn by turn in one process.

Usage: python benchmarks/run.py [--full] [--only decoder encoder encoder-decoder] [--output FOLDER]
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
PARTS = ["decoder", "encoder", "encoder-decoder"]
SMALL = workloads.Shape("Qwen3-0.6B width, 6 layers, 32k vocabulary", layers=6, vocab_size=32768)
FULL = workloads.Shape("Qwen3-0.6B", layers=28, vocab_size=151936)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole 0.6B shape, longer contexts, batch 8")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    console = Console()

    limits = machine.measure(DTYPES)
    rows: list[workloads.Row] = []
    if "decoder" in options.only:
        rows += decoder_rows(options.full, limits, console)
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
        for beams in track([1, 4], "encoder-decoder", console=console):
            rows.append(seq2seq.write(pair, beams, 3, 24, limits.read_gbs))
    report.write(options.output, limits, rows)
    console.print(report.markdown(limits, rows), soft_wrap=True, highlight=False)
    console.print(f"Written to {options.output}")


def decoder_rows(full: bool, limits: machine.Machine, console: Console) -> list[workloads.Row]:
    """Decode and prefill of Qwen3's shape."""
    shape = FULL if full else SMALL
    decodes = [(16, 1), (512, 1), (2048, 1)] + ([(8192, 1), (512, 8)] if full else [])
    rounds, tokens = (5, 24) if full else (5, 12)
    rows = []
    for dtype in DTYPES:
        pair = workloads.make_pair(shape, dtype)
        for context, batch in track(decodes, f"decode {dtype}", console=console):
            rows.append(workloads.decode(pair, shape, context, batch, rounds, tokens, limits.read_gbs))
        for context in track([512, 2048], f"prefill {dtype}", console=console):
            rows.append(workloads.prefill(pair, shape, context, rounds, limits.gemm_gflops))
        del pair
    return rows


if __name__ == "__main__":
    main()
