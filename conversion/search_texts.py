"""Texts on which two models for search are compared, and their tokens.

T length of a text, N number of texts.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

QUERIES = (
    "How do I keep bread fresh?",
    "capital of Kenya",
    "why is the sky blue",
    "Who wrote the first computer program?",
    "symptoms of iron deficiency",
    "def binary_search(items, wanted):",
    "如何学会游泳",
    "cheap trains from Lyon to Turin",
    "What does a court of appeal do?",
    "difference between a virus and a bacterium",
)
DOCUMENTS = (
    "Wrap the loaf in a cloth and leave it on its cut side.",
    "Nairobi is the capital and the largest city of Kenya.",
    "Air scatters short wavelengths of sunlight more than long ones.",
    "In 1843 Ada Lovelace published an algorithm for Babbage's engine.",
    "Tiredness, pale skin and cold hands can be signs of anaemia.",
    "Halve the sorted range until the item is found or nothing is left.",
    "先在浅水里练习呼吸 再学习漂浮。",
    "The night train was cancelled in 2011, and coaches run twice a day.",
    "It hears cases in which a party disputes the decision of a lower court, and may uphold or reverse it.",
    "A bacterium is a cell that lives by itself; a virus needs a host.",
    "Fresh paint needs a day to dry.",
    "Kenya exports tea, coffee and flowers.",
    "At sunset the light has a longer way through the air.",
    "The museum opens at ten, except on Mondays.",
    "Spinach has less iron than a misplaced decimal point once suggested.",
    "A linked list has no random access.",
    "游泳池今天关闭。",
    "Turin lies on the river Po.",
    "The jury was sent home.",
    "Antibiotics do nothing against a cold.",
)
ROWS = 16
"""The largest batch."""
Texts = Sequence[tuple[str, ...]]


def pairs(few: bool) -> Texts:
    """Every query with every document, or each query with two of them."""
    if few:
        return [(query, DOCUMENTS[(row + each) % 20]) for row, query in enumerate(QUERIES) for each in (0, 7)]
    return [(query, document) for query in QUERIES for document in DOCUMENTS]


def texts(few: bool) -> Texts:
    """All texts, or ten of them."""
    return [(text,) for text in (QUERIES if few else (*QUERIES, *DOCUMENTS))]


def template_format(tokenizer: Any) -> str | None:
    """How the chat template of a tokenizer reads a pair, "flat" or "structured"; None if it renders no pair.

    sentence-transformers gives a pair to a template as a message of a query and one of a document.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    for kind in ("flat", "structured"):
        said = ""
        with suppress(Exception):  # also what a template raises itself
            said = tokenizer.apply_chat_template(messages(("q7x", "d3z"), kind), tokenize=False)
        if "q7x" in said and "d3z" in said and "{'" not in said:
            return kind
    return None


def messages(pair: Sequence[str], kind: str) -> list[dict[str, Any]]:
    """A pair as messages in a format of `template_format`."""
    given = dict(zip(("query", "document"), pair, strict=True))
    if kind == "flat":
        return [{"role": role, "content": text} for role, text in given.items()]
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in given.items()]


def tokens_of(tokenizer: Any, given: Texts, template: str | None, limit: int) -> list[list[int]]:
    """The tokens of texts or pairs, the last `limit` of each.

    Args:
        tokenizer: the model's.
        given: one text or two each.
        template: see `template_format`.
        limit: the model's longest text.
    """
    if template is None:
        ids = [tokenizer(*each)["input_ids"] for each in given]
    else:
        rendered = [tokenizer.apply_chat_template(messages(each, template), tokenize=True) for each in given]
        ids = [each["input_ids"] if hasattr(each, "keys") else each for each in rendered]
    return [list(each)[-limit:] for each in ids if each]


def batches(ids: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Texts of the same length together, int [N, T], so that nothing is padded."""
    by_length: dict[int, list[Sequence[int]]] = {}
    for each in ids:
        by_length.setdefault(len(each), []).append(each)
    for rows in by_length.values():
        for start in range(0, len(rows), ROWS):
            yield torch.tensor(rows[start : start + ROWS])
