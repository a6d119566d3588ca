"""`blockformer chat` and `blockformer eval`: talk to a model that writes text, and measure one on files."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from blockformer.conversion import ConversionError
from blockformer.conversion.loading import load_any, load_tokenizer
from blockformer.data.corpus import Score, model_score

from ..files.errors import printable
from .template import rendered

LEAVE, ANEW = ("/quit", "/exit"), "/new"


def load_writer(
    src: str, dtype: str | None, revision: str | None = None, **reading: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A decoder with a language model head, and its tokenizer.

    Raises:
        ConversionError: it cannot write text by itself, or has no tokenizer.
    """
    model, folder = load_any(src, dtype, revision=revision, **reading)
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ConversionError(
            f"{src}: {type(model).__name__} is not a causal language model; name one that writes text"
        )
    if model.config.bidirectional:
        raise ConversionError(f"{src}: this decoder is bidirectional, so it cannot generate text")
    return model, load_tokenizer(src, folder)


def run_chat(
    src: str, dtype: str | None, system: str | None, greedy: bool, max_new_tokens: int, **reading: Any
) -> None:
    """Read lines, write answers as they come, until the input ends."""
    model, tokenizer = load_writer(src, dtype, **reading)
    has_template = tokenizer.chat_template is not None
    if system is not None and not has_template:
        raise ConversionError("--system needs a tokenizer with a chat template, and this one has none: leave it out")
    start: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    history, console = list(start), Console(stderr=True)
    kind = "chat" if has_template else "no chat template: each line is a text to continue"
    console.print(f"{kind}. {ANEW} starts over, {LEAVE[0]} or Ctrl-D quits.", highlight=False)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() in LEAVE:
            return
        if line.strip() == ANEW:
            history = list(start)
        elif line.strip():
            told = [*history, {"role": "user", "content": line.strip()}]
            inputs, forgotten = _fitting(src, model, tokenizer, told, line.rstrip("\n"), len(start))
            if inputs is None:
                read = f"the model reads {model.config.max_position_embeddings} tokens"
                console.print(f"too long: {read}, and this line has more. Write a shorter one.", highlight=False)
                continue
            if forgotten:
                console.print(f"the context is full: the first {forgotten} messages were dropped.", highlight=False)
                del told[len(start) : len(start) + forgotten]
            answer = _answer(model, tokenizer, inputs, not greedy, max_new_tokens)
            history = [*told, {"role": "assistant", "content": answer}]


class SafeStreamer(TextStreamer):
    """Prints a text as it is written. A model can write anything: what would steer the terminal is escaped."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)


def _fitting(
    src: str, model: Any, tokenizer: Any, messages: list[dict[str, str]], line: str, first: int
) -> tuple[Any, int]:
    """The part of a chat that the model reads, and how many messages from `first` on were dropped to make room.

    None where even the last line leaves no room.
    """
    context = model.config.max_position_embeddings
    if tokenizer.chat_template is None:
        inputs = tokenizer(line, return_tensors="pt", verbose=False)
        return (inputs if inputs["input_ids"].shape[1] < context else None), 0
    # A question and its answer at a time; the last question stays.
    for forgotten in range(0, len(messages) - first, 2):
        inputs = rendered(src, tokenizer, messages[:first] + messages[first + forgotten :], context)
        if inputs["input_ids"].shape[1] < context:
            return inputs, forgotten
    return None, 0


def _answer(model: Any, tokenizer: Any, inputs: Any, samples: bool, max_new_tokens: int) -> str:
    length = inputs["input_ids"].shape[1]
    tokens = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=min(max_new_tokens, model.config.max_position_embeddings - length),
        do_sample=samples,
        streamer=SafeStreamer(tokenizer, skip_prompt=tokenizer.chat_template is not None, skip_special_tokens=True),
    )
    return tokenizer.decode(tokens[0, length:], skip_special_tokens=True)


def run_eval(src: str, files: list[Path], dtype: str | None, length: int | None, **reading: Any) -> None:
    """Perplexity and bits per byte of each file, and of all."""
    if missing := [str(path) for path in files if not path.is_file()]:
        raise ConversionError(f"{missing[0]}: no such file")
    model, tokenizer = load_writer(src, dtype, **reading)
    window = min(length or model.config.max_position_embeddings, model.config.max_position_embeddings)
    table = Table("file", "tokens", "perplexity", "bits per byte")
    nats, tokens, size = 0.0, 0, 0
    for path in track(files, "reading", console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConversionError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        if len(ids) < 2:
            raise ConversionError(
                f"{path}: {len(ids)} tokens; at least two are needed, since the first is not predicted"
            )
        count, nbytes = len(ids) - 1, len(text.encode())
        score = model_score(model, ids, nbytes, window)
        nats, tokens, size = nats + score.loss * count, tokens + count, size + nbytes
        table.add_row(str(path), *_cells(count, score))
    if len(files) > 1:
        table.add_row("all", *_cells(tokens, Score.of(nats, tokens, size)))
    Console().print(table)
    print(f"windows of {window} tokens; the first token of a file is not predicted")


def run_tasks(
    src: str, tasks: list[str], dtype: str | None, length: int | None, limit: int | None, **reading: Any
) -> None:
    """The scores of a model in tasks of lm-eval."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConversionError("--tasks needs lm-eval, which is not installed: pip install lm-eval")
    model, tokenizer = load_writer(src, dtype, **reading)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    # A name with a path is that of a task's own file.
    names = [str(Path(task).absolute()) if task.endswith(".yaml") else task for task in tasks]
    judged = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", max_length=length)
    table = Table("task", "metric", "score", "standard error")
    for task, figures in simple_evaluate(judged, tasks=names, limit=limit)["results"].items():
        for key, value in figures.items():  # "acc,none": the metric and how the answers were filtered
            metric, comma, way = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = figures.get(f"{metric}_stderr,{way}")
                table.add_row(task, metric, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "")
    Console().print(table)


def _cells(count: int, score: Score) -> tuple[str, str, str]:
    return f"{count:,}", f"{score.perplexity:,.2f}", f"{score.bits_per_byte:.3f}"
