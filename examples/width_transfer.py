"""Show that the best learning rate stays where it is from width to width with muP, and that it moves without.

    python examples/width_transfer.py --output sweep             # some 20 minutes for each seed on one core
    python examples/width_transfer.py --output sweep --widths 32 64 --rates 0.002 0.008 --steps 50

Trains a small Qwen3-style decoder on the standard library's sources at every width and learning rate, twice: with the
ordinary parametrization, and with muP, which uses the narrowest model's rates. Writes sweep/runs.jsonl, a
line for each run, and sweep/width-transfer.svg. Called again, it does only the runs that are not there yet.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

import blockformer
from blockformer.data.corpus import Blocks, encode, gather, model_score, train_tokenizer
from blockformer.pictures.canvas import GREY, INK, LIGHT, STRONG_ORANGE, Canvas

VOCABULARY, LAYERS, HEAD, CONTEXT, BATCH = 512, 2, 16, 128, 8
WIDTHS, STEPS = (32, 64, 128, 256), 150
RATES = tuple(2.0**power for power in range(-11, -3))
WAYS = {"ordinary": "the same rate for every weight", "muP": "rates scaled with the width"}
COLORS = ("#9ecae1", "#5a9bd0", "#2f6fad", "#0b3b6f")


def config_of(width: int):
    """The same model at a width; heads become more, not wider."""
    return blockformer.preset(
        "qwen3", vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=LAYERS,
        num_attention_heads=width // HEAD, num_key_value_heads=width // HEAD, head_dim=HEAD,
        max_position_embeddings=CONTEXT, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip


def train(width: int, rate: float, base, seed: int, steps: int, rows) -> torch.nn.Module:
    """One run: warmup over a tenth of the steps, then a cosine to 0.

    Args:
        base: the config whose rates these are, or None for the ordinary parametrization.
    """
    set_seed(seed)
    model_class = blockformer.BlockformerDecoderForCausalLM
    if base is None:
        model = model_class(config_of(width))
    else:
        model = blockformer.mup_model(model_class, config_of(width), base)
    optimizer = blockformer.adamw(model, rate, weight_decay=0.0, betas=(0.9, 0.95), base=base)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 10), report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, use_cpu=True, seed=seed, log_level="error",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model


def sweep(output: Path, widths: list[int], rates: list[float], seeds: list[int], steps: int) -> list[dict]:
    """All runs, also from earlier calls."""
    output.mkdir(parents=True, exist_ok=True)
    file = output / "runs.jsonl"
    runs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    corpus = gather(max_bytes=3_000_000)
    tokenizer = train_tokenizer([each.text for each in corpus.train], VOCABULARY, CONTEXT)
    rows = Blocks(encode(corpus.train, tokenizer), CONTEXT)
    held_out = encode(corpus.held_out, tokenizer)[: 100 * CONTEXT + 1]
    chosen = []
    for seed in seeds:
        for width in widths:
            for way, base in (("ordinary", None), ("muP", config_of(widths[0]))):
                for rate in rates:
                    key = {"way": way, "width": width, "rate": rate, "seed": seed, "steps": steps, "base": widths[0]}
                    if run := next((run for run in runs if key.items() <= run.items()), None):
                        chosen.append(run)
                        continue
                    start = time.perf_counter()
                    model = train(width, rate, base, seed, steps, rows)
                    loss = model_score(model, held_out, len(held_out), CONTEXT).loss
                    chosen.append({**key, "loss": loss, "seconds": round(time.perf_counter() - start, 1)})
                    with file.open("a") as lines:
                        lines.write(json.dumps(chosen[-1]) + "\n")
                    print(f"seed {seed}  {way:>8}  width {width:4}  rate {rate:.5f}  held out {loss:.4f}", flush=True)
    return chosen


def curves(runs: list[dict]) -> dict[str, dict[int, dict[float, float]]]:
    """Way -> width -> rate -> held-out loss, the mean over seeds."""
    found: dict = {way: {} for way in WAYS}
    for run in runs:
        found[run["way"]].setdefault(run["width"], {}).setdefault(run["rate"], []).append(run["loss"])
    return {
        way: {width: {rate: sum(each) / len(each) for rate, each in rates.items()} for width, rates in widths.items()}
        for way, widths in found.items()
    }


def draw(runs: list[dict]) -> str:
    """Loss by learning rate, a line for each width, the lowest point of each marked: an SVG."""
    found = curves(runs)
    losses = [loss for widths in found.values() for rates in widths.values() for loss in rates.values()]
    rates = sorted({run["rate"] for run in runs})
    count = len({run["seed"] for run in runs})
    # A fresh model's loss says nothing of widths.
    low, high = math.floor(5 * min(losses)) / 5, min(math.ceil(5 * max(losses)) / 5, 5.4)
    canvas = Canvas(960, 420, "Held-out loss by learning rate at several widths, without and with muP")
    for panel, (way, what) in enumerate(WAYS.items()):
        left, top, width, height = 70 + 460 * panel, 70, 360, 270
        canvas.text(left + width / 2, 18, way, size=15, bold=True)
        canvas.text(left + width / 2, 37, what, size=12, fill=GREY)
        canvas.text(left + width / 2, top + height + 44, "learning rate", size=12, fill=GREY)
        canvas.text(
            left - 40,
            top - 12,
            f"held-out loss, nats per token ({count} seed{'s' * (count > 1)})",
            size=11,
            anchor="start",
            fill=GREY,
        )

        def x(rate, left=left, width=width):
            return left + width * math.log(rate / rates[0]) / (math.log(rates[-1] / rates[0]) or 1.0)

        def y(loss, top=top, height=height):
            return top + height * (high - min(loss, high)) / (high - low)

        for tick in range(round(5 * low), round(5 * high) + 1, 2):
            canvas.line([(left, y(tick / 5)), (left + width, y(tick / 5))], color=LIGHT, width=0.8)
            canvas.text(left - 9, y(tick / 5), f"{tick / 5:.1f}", size=11, anchor="end", fill=GREY)
        for rate in rates:
            exponent = math.log2(rate)
            name = f"1/{round(1 / rate)}" if exponent == round(exponent) else f"{rate:g}"
            canvas.text(x(rate), top + height + 18, name, size=11, fill=GREY)
        for color, (_, points) in zip(COLORS * len(WIDTHS), sorted(found[way].items()), strict=False):
            canvas.line([(x(rate), y(points[rate])) for rate in sorted(points)], color=color, width=2.2)
            best = min(points, key=lambda rate, points=points: points[rate])
            canvas.circle(x(best), y(points[best]), 5.5, STRONG_ORANGE)
    if max(losses) > high:
        canvas.text(910, 402, f"losses above {high:g} are drawn there", size=11, anchor="end", fill=GREY)
    for index, size in enumerate(sorted(found["muP"])):
        canvas.line([(300 + 95 * index, 402), (324 + 95 * index, 402)], color=COLORS[index % 4], width=3)
        canvas.text(330 + 95 * index, 402, f"width {size}", size=11.5, anchor="start", fill=INK)
    return canvas.finish()


def main(command: list[str] | None = None) -> None:
    """Do the runs, draw the picture and say where each width has its best rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help=f"multiples of {HEAD}")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,))
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(command)
    runs = sweep(options.output, sorted(options.widths), sorted(options.rates), options.seeds, options.steps)
    (options.output / "width-transfer.svg").write_text(draw(runs), encoding="utf-8")
    for way, widths in curves(runs).items():
        for width, points in sorted(widths.items()):
            best = min(points, key=lambda rate: points[rate])
            print(f"{way:>8}  width {width:4}  best rate {best:.5f}  held out {points[best]:.3f}")


if __name__ == "__main__":
    main()
