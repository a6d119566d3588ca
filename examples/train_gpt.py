"""Train a small GPT on plain text files, draw its loss, and let it write.

    python examples/train_gpt.py --output gpt                          # the standard library's own sources
    python examples/train_gpt.py --output gpt my-novel.txt notes/      # files, and folders of files
    python examples/train_gpt.py --output gpt --preset qwen3 --steps 2000

Some files are held out whole; the model's score on them is compared with the plain frequencies of tokens (the
unigram baseline). The repo is written only after a fresh process without this package has loaded it and has written the
same text.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

import blockformer
from blockformer.conversion import ConversionError
from blockformer.data.corpus import (
    Blocks,
    Corpus,
    CorpusError,
    encode,
    gather,
    model_score,
    train_tokenizer,
    unigram_score,
)
from blockformer.data.text_files import TextError, collect, split
from blockformer.demo.elsewhere import ReloadError, run_elsewhere
from blockformer.demo.training_run import BudgetCallback, quickest_threads, with_threads
from blockformer.files.atomic import atomic_folder
from blockformer.training.budget import Budget, learning_rate_factor

DECODERS = sorted(
    name for name, (kind, _) in blockformer.PRESETS.items() if kind is blockformer.BlockformerDecoderConfig
)
VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 2048, 128, 4, 4, 128, 4
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}  # a few minutes see each text about once
STEPS = 1500


# The text


def describe(text: Corpus, left_out: list[str], console: Console) -> None:
    """Print which files are trained on, held out and left out."""
    names = ", ".join(file.name for file in text.held_out[:3]) + (", ..." if len(text.held_out) > 3 else "")
    console.print(
        f"{len(text.train):,} files, {text.train_bytes / 1e6:.2f} MB to train on; "
        f"held out {text.held_out_bytes / 1e6:.3f} MB: {names}",
        highlight=False,
    )
    if left_out:
        more = f" and {len(left_out) - 3:,} more" if len(left_out) > 3 else ""
        console.print(f"left out: {'; '.join(left_out[:3])}{more}", highlight=False)


# The model and its training


def make_model(preset: str, tokenizer) -> blockformer.BlockformerDecoderForCausalLM:
    """A small decoder in a preset's settings, untrained."""
    gated = blockformer.preset(preset).gated_mlp
    config = blockformer.preset(
        preset,
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=WIDTH * (3 if gated else 4),
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **NO_DROPOUT,
    )
    return blockformer.BlockformerDecoderForCausalLM(config)


def train(model, train_blocks: Blocks, held_out_blocks: Blocks, budget: Budget, console: Console, arguments) -> tuple:
    """Train in place; the steps taken and the curve. The model comes back on the CPU, in evaluation mode.

    Raises:
        FloatingPointError: a loss that is not finite, with its step.
    """
    optimizer = blockformer.adamw(model, arguments.learning_rate, arguments.weight_decay, betas=(0.9, 0.95))
    # by the share of the budget that is used: a quick machine and a slow one both finish their schedule
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(budget.used(step)))
    watch = BudgetCallback(budget, console, tokens_per_step=BATCH * CONTEXT, evaluations=12)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model,
            TrainingArguments(
                scratch,
                max_steps=budget.max_steps,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=BATCH,
                max_grad_norm=1.0,
                logging_steps=10,
                logging_first_step=True,
                prediction_loss_only=True,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
                seed=arguments.seed,
            ),
            train_dataset=train_blocks,
            eval_dataset=held_out_blocks,
            callbacks=[watch, blockformer.StopOnNonFiniteLoss()],
            optimizers=(optimizer, schedule),
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            watch.bar.stop()
    model.to("cpu").eval()
    return trainer.state.global_step, watch.curve


# Writing


def write(model, tokenizer, prompts: list[str], new_tokens: int, **settings) -> list[str]:
    """What the model adds to each prompt, greedily or as `settings` of `generate` say."""
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        written = model.generate(**inputs, max_new_tokens=new_tokens, **{"do_sample": False, **settings})
    return tokenizer.batch_decode(written[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


RELOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompts, new_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(prompts, padding=True, return_tensors="pt")
written = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
print(json.dumps(tokenizer.batch_decode(written[:, inputs.input_ids.shape[1]:], skip_special_tokens=True)))
"""


def write_elsewhere(repo: Path, prompts: list[str], new_tokens: int) -> list[str]:
    """The same, greedily, with the saved repo in a fresh process that cannot import this package.

    Raises:
        ReloadError: see `run_elsewhere`.
    """
    return run_elsewhere(RELOAD, repo.resolve(), json.dumps(prompts), new_tokens)


def opening(text: str, most: int = 60) -> str:
    """The first words of a text."""
    line = next(line for line in text.splitlines() if line.strip())
    return line if len(line) <= most else line[:most].rpartition(" ")[0] or line[:most]


# What to show


def smoothed(points: list[tuple[int, float]], width: int) -> list[tuple[int, float]]:
    """The mean of each point and up to `width` on either side, as many on the one as on the other."""
    means = []
    for place, (tokens, _) in enumerate(points):
        reach = min(width, place, len(points) - 1 - place)
        near = [loss for _, loss in points[place - reach : place + reach + 1]]
        means.append((tokens, sum(near) / len(near)))
    return means


def draw(curve, unigram: float, bits_per_nat: float, title: str, path: Path) -> None:
    """Write the loss curve as a PNG.

    Args:
        curve: losses in nats per token, by tokens trained on.
        unigram: the baseline's held-out loss, in nats per token.
        bits_per_nat: bits per byte of the held-out text that one nat per token is.
        title: the model and its text.
        path: the picture's file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curve.train, strict=True), color="C0", alpha=0.25, linewidth=0.8)
    smooth = smoothed(curve.train, len(curve.train) // 40)
    axes.plot(*zip(*smooth, strict=True), color="C0", label="training (pale: as logged)")
    axes.plot(*zip(*curve.held_out, strict=True), "o-", color="C1", markersize=4, label="held-out text")
    axes.axhline(unigram, color="0.4", linestyle="--", linewidth=1.2, label="unigram baseline, held-out text")
    axes.set(xlabel="tokens trained on", ylabel="loss (nats per token)", title=title)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(
        lambda tokens, _: f"{tokens / 1e6:g} M" if tokens >= 1e6 else f"{tokens / 1e3:g} k" if tokens else "0"
    )
    right = axes.secondary_yaxis("right", functions=(lambda y: y * bits_per_nat, lambda y: y / bits_per_nat))
    right.set_ylabel("bits per byte of held-out text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def curve_table(curve) -> Table:
    """The curve in words: the held-out losses, each with the mean training loss since the one before."""
    table = Table("tokens trained on", "training loss", "held-out loss", title="nats per token")
    before = -1
    for tokens, loss in curve.held_out:
        losses = [value for at, value in curve.train if before < at <= tokens]
        mean = f"{sum(losses) / len(losses):.3f}" if losses else "-"
        table.add_row(f"{tokens:,}", mean, f"{loss:.3f}")
        before = tokens
    return table


def score_table(scores: dict) -> Table:
    """How well each predicts the held-out text."""
    table = Table("held-out text", "loss (nats/token)", "perplexity", "bits per byte")
    for name, score in scores.items():
        table.add_row(name, f"{score.loss:.3f}", f"{score.perplexity:,.1f}", f"{score.bits_per_byte:.3f}")
    return table


# The whole road


def run(folder: Path, arguments, console: Console) -> None:
    """Gather, train, judge, draw, write, publish into `folder`, reload elsewhere."""
    most, left_out = int(arguments.megabytes * 1e6), []
    if arguments.texts:
        files, left_out = collect(arguments.texts, most)
        text = split(files)
    else:
        text = gather(max_bytes=most)
    describe(text, left_out, console)
    tokenizer = train_tokenizer((file.text for file in text.train), VOCABULARY, CONTEXT)
    train_ids, held_out_ids = encode(text.train, tokenizer), encode(text.held_out, tokenizer)
    if len(train_ids) < BATCH * CONTEXT or len(held_out_ids) < CONTEXT:
        raise TextError(f"too little text, or too much of the same: {len(train_ids):,} tokens to train on")
    prompt = arguments.prompt
    if prompt is None:
        prompt = opening(text.held_out[0].text) if arguments.texts else "    def __init__(self, "
    length = len(tokenizer(prompt).input_ids)
    if not 0 < length < CONTEXT - 8:
        raise TextError(f"the prompt has {length:,} tokens: 1 to {CONTEXT - 9} fit")

    model = make_model(arguments.preset, tokenizer)
    blocks, some = Blocks(train_ids, CONTEXT), Blocks(held_out_ids, CONTEXT)
    some.rows = some.rows[:: math.ceil(len(some) / 48)]  # for the curve; the scores are of all
    if not torch.accelerator.is_available():  # a small model gains little from threads, which wait for each other
        rows = blocks.rows[:BATCH]
        torch.set_num_threads(quickest_threads(lambda: (model(rows, labels=rows).loss.backward(), model.zero_grad())))
    scored = (held_out_ids, text.held_out_bytes)
    scores = {
        "untrained model": model_score(model, *scored, CONTEXT),
        "unigram baseline": unigram_score(train_ids, *scored, len(tokenizer)),
    }
    steps = arguments.steps or (1_000_000 if arguments.minutes else STEPS)
    budget = Budget(60 * arguments.minutes if arguments.minutes else math.inf, steps)
    console.print(f"{model.num_parameters():,} parameters, {len(train_ids):,} tokens of {len(tokenizer):,} kinds")
    start, busy = time.perf_counter(), time.process_time()
    steps, curve = train(model, blocks, some, budget, console, arguments)
    curve.held_out.insert(0, (0, scores["untrained model"].loss))
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    scores["trained model"] = model_score(model, *scored, CONTEXT)
    console.print(
        f"{steps:,} steps, {steps * BATCH * CONTEXT / len(train_ids):.1f} times the text, "
        f"{seconds:.0f} s ({busy:.0f} s of CPU)"
    )
    console.print(score_table(scores))

    new_tokens = min(arguments.new_tokens, CONTEXT - length)
    samples = {"greedy": write(model, tokenizer, [prompt], new_tokens)[0]}
    for temperature in arguments.temperatures:
        set_seed(arguments.seed)
        settings = {"do_sample": True, "temperature": temperature, "top_k": arguments.top_k}
        samples[f"temperature {temperature:g}, top-k {arguments.top_k}"] = write(
            model, tokenizer, [prompt], new_tokens, **settings
        )[0]
    for name, sample in samples.items():
        console.rule(name, align="left")
        console.print(f"[dim]{prompt}[/]" if "[" not in prompt else prompt, end="", highlight=False)
        console.print(sample, markup=False, highlight=False)
    console.rule()

    blockformer.export_model(model, folder, tokenizer=tokenizer, force=True)  # the empty folder that is there
    starts = torch.linspace(0, len(held_out_ids) - 33, 3).long().tolist()
    prompts = [prompt, *(tokenizer.decode(held_out_ids[at : at + 32], skip_special_tokens=True) for at in starts)]
    room = CONTEXT - max(len(row) for row in tokenizer(prompts).input_ids)
    here, elsewhere = (
        write(model, tokenizer, prompts, min(48, room)),
        write_elsewhere(folder, prompts, min(48, room)),
    )
    if here != elsewhere:
        raise ReloadError("the reloaded model does not write what the trained one wrote")
    console.print("reloaded in a fresh process without this package: the same greedy text")

    (folder / "samples.txt").write_text(
        "\n\n".join(f"### {name}\n{prompt}{sample}" for name, sample in samples.items()) + "\n", encoding="utf-8"
    )
    figures = {
        "preset": arguments.preset,
        "parameters": model.num_parameters(),
        "steps": steps,
        "tokens": steps * BATCH * CONTEXT,
        "seconds": seconds,
        "cpu_seconds": busy,
        "scores": {name: {**asdict(score), "perplexity": score.perplexity} for name, score in scores.items()},
        "curve": asdict(curve),
    }
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    trained = scores["trained model"]
    source = ", ".join(path.name for path in arguments.texts[:3]) or "the standard library's sources"
    title = f"A {arguments.preset} of {model.num_parameters() / 1e6:.1f} M parameters on {source}"
    try:
        draw(curve, scores["unigram baseline"].loss, trained.bits_per_byte / trained.loss, title, folder / "loss.png")
    except ImportError:
        console.print("no picture without matplotlib: install the extra, blockformer\\[demo]; here is the curve:")
        console.print(curve_table(curve))


def main(command_line=None) -> None:
    """Read the command line and go; ends with a message where something cannot be used."""
    positive = _number(lambda value: 0 < value < math.inf, "a number above 0")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("texts", nargs="*", type=Path, help="text files, or folders of them (default: Python's own)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the repo to make")
    parser.add_argument("--preset", default="gpt2", choices=DECODERS, help="a decoder preset (default: gpt2)")
    parser.add_argument("--minutes", type=positive, help="train at most this long")
    parser.add_argument(
        "--steps", type=_whole, help=f"steps of {BATCH * CONTEXT} tokens (default without --minutes: {STEPS})"
    )
    parser.add_argument("--learning-rate", type=positive, default=3e-3, help="peak (default: 3e-3)")
    parser.add_argument(
        "--weight-decay", type=_number(lambda value: 0 <= value < math.inf, "0 or more"), default=0.1,
        help="weight decay of the matrices (default: 0.1)",
    )  # fmt: skip
    parser.add_argument("--megabytes", type=positive, default=8.0, help="read at most this much text (default: 8)")
    parser.add_argument("--prompt", help="start of the samples (default: the beginning of a held-out text)")
    parser.add_argument("--temperatures", type=positive, nargs="*", default=[0.5, 0.8, 1.1], metavar="T")
    parser.add_argument("--top-k", type=_whole, default=50, help="likeliest tokens to draw from (default: 50)")
    parser.add_argument("--new-tokens", type=_whole, default=120, help="length of a sample (default: 120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace the folder")
    arguments = parser.parse_args(command_line)
    set_seed(arguments.seed)
    logging.disable_progress_bar()
    try:
        for path in arguments.texts:
            if not path.exists():
                raise TextError(f"{path}: no such file or folder")
        target = atomic_folder(arguments.output, force=arguments.force, sources=arguments.texts)
        with target as folder, with_threads(torch.get_num_threads()):
            run(folder, arguments, Console())
    except (TextError, CorpusError, ConversionError, FloatingPointError, ReloadError) as error:
        sys.exit(f"error: {error}")
    print(f"written: {arguments.output}")


def _number(fits, what: str):
    """A converter for argparse: a number that fits, or an error that says what would."""

    def convert(text: str) -> float:
        value = float(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    convert.__name__ = "number"
    return convert


def _whole(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


if __name__ == "__main__":
    main()
