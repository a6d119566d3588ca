"""The text of an experiment: read, split, and as tokens."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..data.corpus import Corpus, SourceFile, encode, gather, train_tokenizer
from ..data.text_files import collect, split
from .experiment import Data, LabError


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer that knows where a text ends.

    Raises:
        LabError: it cannot be loaded, or does not know.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise LabError(f"the tokenizer {name} cannot be loaded: {first}") from error
    if tokenizer.eos_token_id is None:
        raise LabError(f"the tokenizer {name} has no token for the end of a text")
    return tokenizer


class Tokens(NamedTuple):
    """Token ids [N] of the training text and of the held-out text."""

    train: torch.Tensor
    held_out: torch.Tensor


class Text:
    """The text, with its tokens for each vocabulary that the configs have."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.corpus = _corpus(data)
        self.tokens = functools.cache(self._tokens)

    @property
    def digest(self) -> str:
        """The same for the same text in the same split."""
        parts = (self.corpus.train, (SourceFile("", ""),), self.corpus.held_out)
        return hashlib.sha256("\0".join(file.text for part in parts for file in part).encode()).hexdigest()

    def _tokens(self, vocab_size: int) -> Tokens:
        """Both texts in the vocabulary of so many tokens.

        Raises:
            LabError: there are too few of them.
        """
        length = self.data.sequence_length
        if self.data.tokenizer is not None:
            tokenizer: Any = load_tokenizer(self.data.tokenizer)
        else:
            tokenizer = train_tokenizer((file.text for file in self.corpus.train), vocab_size, length)
            if len(tokenizer) != vocab_size:
                raise LabError(
                    f"the text has {len(tokenizer):,} kinds of tokens, fewer than vocab_size ({vocab_size:,})"
                )
        found = Tokens(encode(self.corpus.train, tokenizer), encode(self.corpus.held_out, tokenizer))
        if min(map(len, found)) <= length:
            raise LabError(f"too little text for rows of {length:,} tokens: {min(map(len, found)):,} are held out")
        return found


def _corpus(data: Data) -> Corpus:
    if data.dataset is not None:
        return split(_rows(dict(data.dataset), data.max_bytes), data.held_out_share)
    if data.files:
        files, _ = collect([Path(name) for name in data.files], data.max_bytes)
        return split(files, data.held_out_share)
    return gather(max_bytes=data.max_bytes, held_out_share=data.held_out_share)


def _rows(given: dict[str, Any], max_bytes: int) -> list[SourceFile]:
    """The first rows of a data set, each a text."""
    if importlib.util.find_spec("datasets") is None:
        raise LabError("data: dataset needs the package datasets, which is not installed: pip install datasets")
    from datasets import load_dataset

    column = given.pop("column", "text")
    rows = load_dataset(**{"split": "train", **given})
    if column not in rows.column_names:
        raise LabError(f"data: the data set has no column '{column}'; it has {', '.join(rows.column_names)}")
    files: list[SourceFile] = []
    total, seen = 0, set()
    for number, text in enumerate(rows[column]):
        if total >= max_bytes:
            break
        if text.strip() and text not in seen:
            seen.add(text)
            files.append(SourceFile(f"row {number}", text))
            total += files[-1].num_bytes
    return files
