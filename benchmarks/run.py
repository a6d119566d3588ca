"""Blockformer compared with transformers, on the same random weights, turn by turn in one process.

Usage: python benchmarks/run.py [--full] [--only PART ...] [--dtypes DTYPE ...] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import machine
import prompts
import report
import seq2seq
import torch
import ways
import workloads
from rich.console import Console
from rich.progress import track
from sizes import FULL, SHORT, TINY, Size
from transformers.utils import logging

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
PARTS = [
    "decoder",
    "small",
    "gpt2",
    "gemma",
    "experts",
    "hybrid",
    "encoder",
    "encoders",
    "sentences",
    "encoder-decoder",
    "translator",
    "compiled",
    "training",
    "load",
    "convert",
]
OPTIONAL_PARTS = ["both-compiled", "prompts", "ways", "peers", "int8"]
PROMPTS = [8, 64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole 0.6B shape, longer contexts, batch 8")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the code")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS + OPTIONAL_PARTS,
        default=PARTS,
        help=f"parts to run (default: all but {', '.join(OPTIONAL_PARTS)})",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of decoders and encoders")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # removes the temporary folders, too
    console = Console()
    logging.disable_progress_bar()
    size = TINY if options.tiny else FULL if options.full else SHORT

    wanted = [dtype for name, dtype in DTYPES.items() if name in options.dtypes]
    limits = machine.measure(list(DTYPES.values()), **size.limits)
    dtypes = [each for each in wanted if each is torch.float32 or options.tiny or limits.multiplies(each)]
    if not dtypes:
        parser.error("bfloat16 is too slow on this processor; add float32")
    if dtypes != wanted:
        console.print("Half precision is too slow here for large models: their rows are only in float32.")
    rows: list[workloads.Row] = []
    if "decoder" in options.only:
        rows += decoder_rows(size.decoder, size.decodes, [], dtypes, size, limits, console)
        rows += decoder_rows(size.prefill, [], size.prefills, dtypes, size, limits, console)
        if torch.bfloat16 in dtypes:
            rows.append(half_row(size.prefill, size.prefills[0], min(size.rounds, 3), limits, console))
    if "small" in options.only:
        rows += decoder_rows(size.small, size.decodes[:1], [], wanted, size, limits, console)
    if "gpt2" in options.only:
        rows += decoder_rows(size.gpt2, size.decodes[:2], [], wanted, size, limits, console)
    for part, shape in (("gemma", size.gemma), ("experts", size.experts)):
        if part in options.only:
            rows += decoder_rows(shape, size.decodes[:2], size.prefills[:1], dtypes, size, limits, console)
    for shape in size.hybrids if "hybrid" in options.only else ():
        rows += decoder_rows(shape, size.decodes[:2], size.prefills, dtypes, size, limits, console)
        rows += compiled_decodes(shape, torch.float32, size.decodes[:1], size, limits, "transformers")
    if "encoder" in options.only:
        for dtype in dtypes[::-1]:
            pair = tuple(model.to(dtype) for model in seq2seq.make_bert(size.layers))
            for state in states(pair):
                rows += encoded(pair, "BERT-base width", state, size, limits, console)
    for name, make in seq2seq.ENCODERS.items() if "encoders" in options.only else ():
        for dtype in dtypes[::-1]:
            pair = tuple(model.to(dtype) for model in make(size.encoder_layers))
            for state in states(pair):
                rows += encoded(pair, name, state, size, limits, console)
    if "sentences" in options.only:
        import sentences

        rows += sentences.rows(size, console)
    if "encoder-decoder" in options.only:
        pair = seq2seq.make_t5(size.layers)
        encoders = tuple(model.get_encoder() for model in pair)
        for state in states(pair):
            rows += encoded(encoders, "T5-base width", state, size, limits, console)
            rows += written(pair, "T5-base width", state, size, limits, console)
    if "translator" in options.only:
        pair = seq2seq.make_marian(size.marian_vocab_size)
        for state in states(pair):
            rows += written(pair, "Marian, Transformer-base width", state, size, limits, console)
    if "prompts" in options.only:
        rows += prompts.rows(size.prefill, dtypes, [*PROMPTS, *size.prefills], size.rounds, limits, console)
    if "ways" in options.only:
        rows += ways.rows(size, dtypes, console)
    for part, against in (("compiled", "transformers"), ("both-compiled", workloads.PEER_COMPILED)):
        if part in options.only:
            rows += compiled_rows(size, dtypes[0], limits, against, console)
    options.output.mkdir(parents=True, exist_ok=True)
    if "training" in options.only:
        rows += training_rows(size, dtypes, limits, options.output, console)
    if "load" in options.only or "convert" in options.only:
        rows += file_rows(size, options.only, limits, options.output, console)
    if "peers" in options.only:  # last: the runtimes bring thread pools of their own
        import peers

        rows += peers.rows(size, limits, console, options.output)
    if "int8" in options.only:
        import int8

        results = int8.measure(size, console)
        int8.write(options.output, limits, results)
        console.print(int8.markdown(results), soft_wrap=True, highlight=False)
    if rows:
        report.write(options.output, limits, rows)
        console.print(report.markdown(limits, rows), soft_wrap=True, highlight=False)
    elif "int8" not in options.only:
        raise SystemExit(
            "nothing was measured: the packages named above are missing; install them, or name other parts"
        )
    console.print(f"Written to {options.output}")


def decoder_rows(
    shape: workloads.Shape,
    decodes: list[tuple[int, int]],
    prefills: list[int],
    dtypes: list[torch.dtype],
    size: Size,
    limits: machine.Machine,
    console: Console,
) -> list[workloads.Row]:
    """Decode at these contexts and batches, and prefill of these lengths, in these dtypes.

    As `from_pretrained` gives the model, and after `prepare_for_inference()`.
    """
    rows: list[workloads.Row] = []
    for dtype in dtypes:
        pair = workloads.make_pair(shape, dtype)

        def measure(
            state: str = "", pair=pair, dtype: torch.dtype = dtype, prefills: list[int] = prefills
        ) -> Iterator[workloads.Row]:
            name = f"{shape.family} %s{state} {dtype}"
            for context, batch in track(decodes, name % "decode", console=console) if decodes else ():
                yield workloads.decode(
                    pair, shape, context, batch, size.rounds, size.tokens, limits.read_gbs, f"decode{state}"
                )
            for context in track(prefills, name % "prefill", console=console) if prefills else ():
                yield workloads.prefill(pair, shape, context, size.rounds, limits.gemm_gflops, f"prefill{state}")

        rows += measure()
        workloads.prepared(pair)
        rows += measure(", prepared")
        if dtype == torch.bfloat16 and shape.family == "qwen3":
            pair = workloads.in_four_bits(pair, shape)
            rows += measure(", 4 bits", pair)
        del pair, measure
    return rows


def half_row(
    shape: workloads.Shape, length: int, rounds: int, limits: machine.Machine, console: Console
) -> workloads.Row:
    """Prefill in float16; its limit is float32's, the fastest that the processor multiplies in."""
    speeds = {"float16": limits.gemm_gflops["float32"]}
    with console.status("prefill float16"):
        return workloads.prefill(workloads.make_pair(shape, torch.float16), shape, length, rounds, speeds)


def states(pair) -> Iterator[str]:
    """How ours is: unprepared, then prepared. The end of the work's name."""
    yield ""
    workloads.prepared(pair)
    yield ", prepared"


def encoded(pair, name: str, state: str, size: Size, limits: machine.Machine, console: Console) -> list[workloads.Row]:
    """Padded batches through two encoders."""
    fills = track(seq2seq.FILLS, f"{name} {pair[0].dtype}{state}", console=console)
    return [seq2seq.encode(pair, name, fill, size.rounds, limits.gemm_gflops, state) for fill in fills]


def written(
    pair,
    name: str,
    state: str,
    size: Size,
    limits: machine.Machine,
    console: Console,
    against: str = "transformers",
) -> list[workloads.Row]:
    """Text of an encoder-decoder, greedy and with beams."""
    beams, rounds = track([1, 4], name + state, console=console), min(size.rounds, 3)
    work = (rounds, size.text_tokens, limits.read_gbs, state, against)
    return [seq2seq.write(pair, name, count, *work) for count in beams]


def compiled_decodes(
    shape: workloads.Shape, dtype: torch.dtype, decodes: list, size: Size, limits: machine.Machine, against: str
) -> list[workloads.Row]:
    """A decoder's decoding by compiled steps, for each of the contexts and batches."""
    pair = workloads.make_pair(shape, dtype)
    workloads.compiled(pair)
    work = (size.rounds, size.tokens, limits.read_gbs, "decode, compiled", against)
    return [workloads.decode(pair, shape, context, batch, *work) for context, batch in decodes]


def compiled_rows(
    size: Size, dtype: torch.dtype, limits: machine.Machine, against: str, console: Console
) -> list[workloads.Row]:
    """Decoding and the text of encoder-decoders in float32, by steps that are compiled before, if need be.

    Args:
        dtype: of the large decoder.
        against: "transformers", or `PEER_COMPILED` for its own compiled step.
    """
    rows: list[workloads.Row] = []
    alone = [(context, batch) for context, batch in size.decodes if batch == 1]
    for shape, kind, decodes in (
        (size.small, torch.float32, alone[:2]),
        (size.gpt2, torch.float32, alone[:2]),
        (size.decoder, dtype, alone),
    ):
        rows += compiled_decodes(shape, kind, decodes, size, limits, against)
    for name, pair in (
        ("T5-base width", seq2seq.make_t5(size.layers)),
        ("Marian, Transformer-base width", seq2seq.make_marian(size.marian_vocab_size)),
    ):
        workloads.compiled(pair)
        rows += written(pair, name, ", compiled", size, limits, console, against)
    return rows


def training_rows(
    size: Size, dtypes: list[torch.dtype], limits: machine.Machine, output: Path, console: Console
) -> list[workloads.Row]:
    """The time of a training step in these dtypes, and its peak memory in bfloat16."""
    import training

    rows = []
    for dtype in track(dtypes[::-1], "training", console=console):
        pair = workloads.make_pair(size.training, dtype)
        step, rounds = size.steps[dtype], size.step_rounds[dtype]
        rows.append(training.time_step(pair, size.training, *step, rounds, limits.gemm_gflops))
        if dtype == torch.bfloat16:
            with tempfile.TemporaryDirectory(dir=output) as folder:
                rows += training.peak_memory(pair, size.training, *step, rounds, Path(folder))
        del pair
    return rows


def file_rows(
    size: Size, parts: list[str], limits: machine.Machine, output: Path, console: Console
) -> list[workloads.Row]:
    """Loading some checkpoints, and converting one; they are saved on the disk of the output folder."""
    import files

    rows: list[workloads.Row] = []
    for shape in size.loads if "load" in parts else ():
        with tempfile.TemporaryDirectory(dir=output) as name, console.status(f"load {shape.name}"):
            folders = files.save_both(workloads.make_pair(shape, torch.float32), Path(name))
            rows += files.load(folders, shape, size.rounds, limits.read_gbs)
    with tempfile.TemporaryDirectory(dir=output) as name, console.status("load, convert"):
        folder = Path(name)
        folders = files.save_both(workloads.make_pair(size.files, torch.bfloat16), folder)
        if "load" in parts:
            rows += files.load(folders, size.files, size.file_rounds, limits.read_gbs)
        if "convert" in parts:
            rows += files.conversions(folders, size.files, torch.bfloat16, size.file_rounds, folder)
    return rows


if __name__ == "__main__":
    main()
