"""`blockformer demo`: a model's whole life on real text, offline.

Text, tokenizer, model, training, publishing, reloading in another process, converting to the official layout. A step
that fails ends the command with an error.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MARKER = ".blockformer-demo"
MODEL, OFFICIAL, ENCODER, PICTURE, FIGURES = "model", "official", "encoder", "loss.png", "figures.json"


class DemoError(ValueError):
    """A step of the demo did not do what it should."""


@dataclass(frozen=True)
class Sizes:
    """The text, the model and the training run; a block is a row of training tokens."""

    corpus_bytes: int = 8_000_000
    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    block_length: int = 256
    batch: int = 4
    learning_rate: float = 6e-3
    max_steps: int = 20_000
    docstrings: int = 1500

    def config(self, end: int, pad: int) -> Any:
        """The model's config: Qwen3's settings at these sizes, tied embeddings."""
        from blockformer import preset

        sizes = asdict(self)
        for name in ("corpus_bytes", "block_length", "batch", "learning_rate", "max_steps", "docstrings"):
            del sizes[name]
        return preset(
            "qwen3",
            **sizes,
            max_position_embeddings=self.block_length,
            tie_word_embeddings=True,
            eos_token_id=end,
            bos_token_id=end,
            pad_token_id=pad,
        )


QUICK = Sizes(
    corpus_bytes=600_000,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    head_dim=16,
    block_length=128,
    max_steps=200,
    docstrings=100,
)


def prepare(output: Path, force: bool) -> None:
    """Make the output folder, or empty it of what an earlier demo left; nothing else in it is touched.

    Raises:
        DemoError: the path is a file, or a folder with other things in it that no demo made (unless `force`); or a
            folder that would be replaced holds anything that was not written here.
    """
    from ..files.atomic import check_target, remove_folder
    from ..files.errors import ConversionError

    if output.exists() and not output.is_dir():
        raise DemoError(f"{output} is not a folder; choose another --output.")
    if output.is_dir() and any(output.iterdir()) and not (output / MARKER).exists() and not force:
        raise DemoError(f"{output} holds files that the demo did not make; choose another --output, or add --force.")
    folders = [output / name for name in (MODEL, OFFICIAL, ENCODER)]
    try:
        for folder in folders:
            check_target(folder, force=True, sources=())
    except ConversionError as error:
        raise DemoError(f"{error}, or move it away.") from error
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()
    for folder in folders:
        remove_folder(folder)
    for name in (PICTURE, FIGURES):
        (output / name).unlink(missing_ok=True)


def run_demo(output: Path, sizes: Sizes, seconds: float, seed: int, console: Console) -> None:
    """All steps, in order."""
    _be_quiet_and_offline()
    import torch

    from blockformer import BlockformerDecoderForCausalLM, export_model

    from ..data import corpus
    from ..training.budget import Budget
    from . import roundtrip, training_run

    start = time.perf_counter()
    figures: dict[str, Any] = {"sizes": asdict(sizes), "seed": seed}

    _step(console, 1, "real text: the sources of Python's standard library")
    text = corpus.gather(max_bytes=sizes.corpus_bytes)
    console.print(
        f"  {len(text.train):,} files, {text.train_bytes / 1e6:.1f} MB to train on; "
        f"{len(text.held_out)} other files, {text.held_out_bytes / 1e6:.2f} MB held out"
    )

    _step(console, 2, f"a byte-level BPE tokenizer of {sizes.vocab_size:,} tokens")
    tokenizer = corpus.train_tokenizer((file.text for file in text.train), sizes.vocab_size, sizes.block_length)
    train_ids, held_out_ids = corpus.encode(text.train, tokenizer), corpus.encode(text.held_out, tokenizer)
    bytes_per_token = text.train_bytes / len(train_ids)
    console.print(f"  {len(train_ids):,} tokens to train on, {bytes_per_token:.2f} bytes each")

    _step(console, 3, "a small decoder in Qwen3's settings, trained with Trainer")
    torch.manual_seed(seed)
    model = BlockformerDecoderForCausalLM(sizes.config(tokenizer.eos_token_id, tokenizer.pad_token_id))
    scored = (held_out_ids, text.held_out_bytes)
    scores = {
        "untrained model": corpus.model_score(model, *scored, sizes.block_length),
        "unigram baseline": corpus.unigram_score(train_ids, *scored, sizes.vocab_size),
    }
    console.print(f"  {model.num_parameters():,} parameters, at most {seconds / 60:.1f} minutes")
    outcome = training_run.train(
        model,
        corpus.Blocks(train_ids, sizes.block_length),
        corpus.Blocks(held_out_ids, sizes.block_length, limit=32),
        Budget(seconds, sizes.max_steps),
        console,
        batch=sizes.batch,
        block_length=sizes.block_length,
        learning_rate=sizes.learning_rate,
        seed=seed,
    )
    scores["trained model"] = corpus.model_score(model, *scored, sizes.block_length)
    if not scores["trained model"].loss < scores["untrained model"].loss:
        raise DemoError(f"training did not help: held-out loss {scores['trained model'].loss:.3f} nats per token")
    training_run.draw(outcome.curve, scores["unigram baseline"].loss, output / PICTURE)
    console.print(_score_table(scores))
    if scores["trained model"].loss >= scores["unigram baseline"].loss:
        console.print(f"  {outcome.steps} steps do not beat the unigram baseline; try a longer run (--minutes 10)")

    _step(console, 4, f"published as a self-contained repo: {output / MODEL}")
    expected = roundtrip.expectation(model, held_out_ids)
    export_model(model, output / MODEL, tokenizer=tokenizer)

    _step(console, 5, "reloaded in a fresh process that cannot import blockformer; it writes:")
    room = sizes.block_length - len(tokenizer(roundtrip.PROMPT).input_ids)
    roundtrip.reload_elsewhere(output / MODEL, expected, console, new_tokens=min(160, room))
    console.print("  same logits and same greedy text as before publishing")

    _step(console, 6, f"converted to the official Qwen3 layout: {output / OFFICIAL}")
    difference = roundtrip.convert_and_compare(output / MODEL, output / OFFICIAL, expected)
    console.print(f"  transformers' own Qwen3ForCausalLM: logits differ by at most {difference:.1e}, same greedy text")

    _step(console, 7, f"a real trained encoder, converted and verified: {output / ENCODER}")
    figures["embedding_difference"] = _real_encoder(output / ENCODER, sizes.docstrings, console)

    figures.update(
        parameters=model.num_parameters(), bytes_per_token=bytes_per_token, steps=outcome.steps, tokens=outcome.tokens,
        training_seconds=outcome.seconds, seconds=time.perf_counter() - start, logit_difference=difference,
        scores={name: {**asdict(score), "perplexity": score.perplexity} for name, score in scores.items()},
    )  # fmt: skip
    (output / FIGURES).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    console.print()
    console.print(_summary(output, figures))


def _real_encoder(folder: Path, count: int, console: Console) -> float | None:
    """Convert a trained BERT, compare its embeddings with transformers' own, and search by meaning with it.

    Returns:
        The largest difference of two embeddings; None if the package that carries the encoder is not installed.
    """
    from . import search

    try:
        source = search.encoder_folder()
    except search.EncoderMissing as missing:
        console.print(f"  left out: {missing}", highlight=False)
        return None
    difference, answers = search.convert_and_search(source, folder, count)
    console.print(f"  sentence embeddings differ from transformers' BertModel by at most {difference:.1e}")
    for question, hit in answers:
        line = search.first_line(hit.docstring.text, 44)
        console.print(f"  {question}\n    -> {hit.docstring.name} ({hit.score:.2f}): {line}", highlight=False)
    return difference


def _be_quiet_and_offline() -> None:
    """No network and no progress bars of the libraries, in this process and in its children."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    from transformers.utils import logging

    logging.disable_progress_bar()


def _step(console: Console, number: int, what: str) -> None:
    console.print(f"\n[bold cyan]{number}/7[/] [bold]{what}[/]", highlight=False)


def _score_table(scores: dict[str, Any]) -> Table:
    table = Table("held-out text", "loss (nats/token)", "perplexity", "bits per byte", box=None, padding=(0, 2))
    for name, score in scores.items():
        table.add_row(name, f"{score.loss:.3f}", f"{score.perplexity:,.1f}", f"{score.bits_per_byte:.3f}")
    return table


def _summary(output: Path, figures: dict[str, Any]) -> Table:
    untrained, unigram, trained = (
        figures["scores"][name] for name in ("untrained model", "unigram baseline", "trained model")
    )
    baselines = f"untrained {untrained['perplexity']:,.0f}, unigram {unigram['perplexity']:,.0f}"
    steps, seconds = figures["steps"], figures["training_seconds"]
    table = Table(title=f"Made in {figures['seconds']:.0f} s", show_header=False, title_justify="left")
    table.add_row("training", f"{steps:,} steps, {figures['tokens']:,} tokens, {seconds:.0f} s")
    table.add_row("held-out perplexity", f"{trained['perplexity']:,.1f} ({baselines})")
    table.add_row("held-out bits per byte", f"{trained['bits_per_byte']:.3f} (unigram {unigram['bits_per_byte']:.3f})")
    table.add_row("self-contained repo", str(output / MODEL))
    table.add_row("official Qwen3 layout", f"{output / OFFICIAL} (logits within {figures['logit_difference']:.1e})")
    if figures["embedding_difference"] is not None:
        table.add_row("real encoder", f"{output / ENCODER} (embeddings within {figures['embedding_difference']:.1e})")
    table.add_row("loss curve, figures", f"{output / PICTURE}, {output / FIGURES}")
    return table
