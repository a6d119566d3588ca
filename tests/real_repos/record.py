"""A checkpoint of the Hub as a record, and the folder made from it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blockformer.conversion.families.index import FORMER_TYPES, MODEL_TYPES

from .weights import Spelling, random_weights, write_pickle, write_weights
from .words import Words

MAGIC = {
    ".gguf": b"GGUF\x03\0\0\0",
    ".h5": b"\x89HDF\r\n\x1a\n",
    ".jpg": b"\xff\xd8\xff\xe0",
    ".msgpack": b"\x81\xa6params",
    ".onnx": b"\x08\x07\x12\x07pytorch",
    ".ot": b"PK\x03\x04",
    ".pdf": b"%PDF-1.4",
    ".png": b"\x89PNG\r\n\x1a\n",
    ".pth": b"PK\x03\x04",
}
ATTRIBUTES = "".join(f"*.{kind} filter=lfs diff=lfs merge=lfs -text\n" for kind in ("bin", "h5", "onnx", "safetensors"))


@dataclass(frozen=True)
class Token:
    """In a record's JSON, the id of a token."""

    text: str


@dataclass(frozen=True)
class Rows:
    """In a record's JSON, the number of tokens, and some rows that no token has."""

    more: int = 0


@dataclass(frozen=True)
class Head:
    """In a record's files, a pickled linear layer: the shapes of its tensors."""

    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Record:
    """A checkpoint of the Hub, small.

    Attributes:
        name: its id on the Hub; no repo is meant by one that begins with "assumed/".
        model: the official class whose weights it holds.
        config: `config.json`. `Token` and `Rows` in it are replaced by numbers.
        tokenizer: makes the tokenizer.
        known: where the layout is from: "known" if public copies or logs show at least its names of tensors or its
            entries, "remembered" if it was written down from memory, "assumed" if the official class stands for it.
        spelling: changes the official tensors into those of the real file.
        safetensors: further changes for `model.safetensors`; None if there is no such file.
        bin: the same for `pytorch_model.bin`.
        dtype: of the weights.
        shards: number of weight files.
        generation: `generation_config.json`.
        files: further files by name; a dict or list is written as JSON.
        stubs: names of files in formats that no PyTorch class reads.
        card: the front matter of README.md.
        oracle: the official class that reads the result; `model` if it is None.
        todays: entries of `config.json` as the official class needs them, where the repo's own code read others; `...`
            takes one away.
        quick: whether it is among those that every run of the tests makes.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    tokenizer: Callable[[], Words]
    known: str = "remembered"
    spelling: tuple[Spelling, ...] = ()
    safetensors: tuple[Spelling, ...] | None = ()
    bin: tuple[Spelling, ...] | None = None
    dtype: str = "float32"
    shards: int = 1
    generation: Mapping[str, Any] | None = None
    files: Mapping[str, Any] = field(default_factory=dict)
    stubs: tuple[str, ...] = ()
    card: Mapping[str, Any] = field(default_factory=lambda: {"license": "apache-2.0"})
    oracle: str | None = None
    todays: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False

    @property
    def family(self) -> str:
        """The family that reads it: its model type, or with `-decoder` the decoder of an encoder-decoder."""
        kind = self.config["model_type"]
        kind = FORMER_TYPES.get(kind, kind)
        only_decoder = self.oracle_class.endswith("ForCausalLM") and f"{kind}-decoder" in MODEL_TYPES
        return f"{kind}-decoder" if only_decoder else kind

    @property
    def pieces(self) -> bool:
        """Whether its tokenizer is made with sentencepiece."""
        maker = getattr(self.tokenizer, "func", self.tokenizer)
        return maker.__module__.endswith("sentence_pieces")

    @property
    def oracle_class(self) -> str:
        return self.oracle or self.model


def resolved(entries: Any, words: Words) -> Any:
    """JSON with numbers in place of `Token` and `Rows`; an entry given as `...` is left out."""
    if isinstance(entries, Token):
        return words.ids[entries.text]
    if isinstance(entries, Rows):
        return words.size + entries.more
    if isinstance(entries, Mapping):
        return {name: resolved(each, words) for name, each in entries.items() if each is not ...}
    if isinstance(entries, (list, tuple)):
        return [resolved(each, words) for each in entries]
    return entries


def readable(record: Record, config: Mapping[str, Any]) -> dict[str, Any]:
    """A record's `config.json` as the official class reads it."""
    changed = {**config, **record.todays}
    return {name: value for name, value in changed.items() if value is not ... and name != "auto_map"}


def write(folder: Path, name: str, content: Any) -> None:
    """Write a file: bytes and text as they are, anything else as JSON."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Head):
        write_pickle({name: torch.randn(shape) for name, shape in content.shapes.items()}, path)
        return
    if not isinstance(content, (bytes, str)):
        content = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def make(record: Record, folder: Path) -> None:
    """Make the folder of a record."""
    folder.mkdir(parents=True)
    words = record.tokenizer()
    config = resolved(record.config, words)
    files = {**words.files, **resolved(record.files, words), "config.json": config, ".gitattributes": ATTRIBUTES}
    front = "".join(f"{name}: {json.dumps(value)}\n" for name, value in record.card.items())
    files["README.md"] = f"---\n{front}---\n\n# {record.name}\n\nThe card of the original.\n"
    if record.generation is not None:
        files["generation_config.json"] = resolved(record.generation, words)
    for name in record.stubs:
        files[name] = MAGIC.get(Path(name).suffix, b"stub\n") + bytes(16)
    for name, content in files.items():
        write(folder, name, content)
    tensors: Any = random_weights(record.model, readable(record, config))
    for change in record.spelling:
        tensors = change(tensors)
    for kind in ("safetensors", "bin"):
        changes = getattr(record, kind)
        if changes is not None:
            stored = tensors
            for change in changes:
                stored = change(stored)
            write_weights(stored, folder, kind, record.shards, record.dtype)
