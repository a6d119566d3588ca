"""The text model of a composite checkpoint, read as if it were its own checkpoint."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from blockformer.files import checkpoint as files
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError
from blockformer.files.json_files import read_json
from blockformer.files.safetensors_io import TensorInfo, memory_of
from blockformer.files.side_file_kinds import digest
from blockformer.files.side_files import SideFiles
from blockformer.files.sizes import format_size
from blockformer.files.sources import Source

from .families.composites import Text, text_of
from .storage.low_bits import FIELD

PREFIXES = (
    *(("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", "")),
    ("language_model.", "language_model."),
)
"""What the names of the text's stack begin with, and the names of its head; the first that is found counts."""
TEMPLATE, OF_PROCESSORS = "chat_template.jinja", "chat_template.json"
"""Files of a chat template: the one that tokenizers read, and the one that only processors read."""


class TextCheckpoint(Checkpoint):
    """The text model of a composite checkpoint, under the names and with the settings that its family has.

    Args:
        whole: the composite checkpoint.
        text: what its settings say of the text.

    Attributes:
        names: name of a tensor of the text -> its name in the composite.
        turned: names of those whose last two axes files have in the other order.
        left: the headers of all others.

    Raises:
        ConversionError: no tensor has the name of one of the text.
    """

    def __init__(self, whole: Checkpoint, text: Text):
        self.__dict__.update(vars(whole))
        self.whole, self.text = whole, text
        self.config = text.entries
        outside = (each.partition("*")[0] for each in getattr(text.family.names, "outside", ()))
        self.names = _names(whole, text.family.heads[0].root, tuple(outside), text.towers)
        self.tensors = {name: replace(whole.tensors[own], name=name) for name, own in self.names.items()}
        self.turned = {
            name
            for ending, length in text.last_axes.items()
            for name, info in self.tensors.items()
            if name.endswith(ending) and info.shape[-2:-1] == (length,) != info.shape[-1:]
        }
        for name in self.turned:
            *others, rows, columns = self.tensors[name].shape
            self.tensors[name] = replace(self.tensors[name], shape=(*others, columns, rows))
        taken = {*self.names.values()}
        self.left: list[TensorInfo] = [info for name, info in whole.tensors.items() if name not in taken]

    def read(self, name: str) -> Tensor:
        tensor = self.whole.read(self.names[name])
        return tensor.mT.contiguous() if name in self.turned else tensor

    def parts(self, name: str) -> Iterator[Tensor]:
        return iter([self.read(name).reshape(-1)]) if name in self.turned else self.whole.parts(self.names[name])

    def check_unchanged(self) -> None:
        self.whole.check_unchanged()

    def close(self) -> None:
        self.whole.close()

    @property
    def left_numbers(self) -> int:
        """How many numbers the other tensors hold."""
        return sum(math.prod(info.shape) for info in self.left)

    @property
    def note(self) -> str:
        """What a user must know of what is left."""
        count, nbytes = len(self.left), sum(info.nbytes for info in self.left)
        parts = (info.name.split(".") for info in self.left)
        towers = dict.fromkeys(next((part for part in each if part != "model"), "") for each in parts)
        kind = ("an " if self.text.model_type[0] in "aeiou" else "a ") + self.text.model_type
        there = f"{count} tensors ({format_size(nbytes)}) of {', '.join(towers) or 'nothing'} stay there"
        back = "" if FIELD in self.config else ", and `--to official --into` puts the text back next to them"
        return f"this is the text model of {kind} checkpoint; {there}{back}"

    def fingerprint(self) -> dict[str, Any]:
        """What tells this composite from others: its type, its `config.json`, and the tensors that are left."""
        found = hashlib.sha256()
        for info in sorted(self.left, key=lambda info: info.name):
            found.update(f"{info.name} {info.dtype} {info.shape}\n".encode())
            for part in self.whole.parts(info.name):
                found.update(memory_of(part))
        config = digest(self.member("config.json"))
        return {"model_type": self.text.model_type, "config": config, "left": found.hexdigest()}


def _names(whole: Checkpoint, root: str, outside: tuple[str, ...], towers: tuple[str, ...]) -> dict[str, str]:
    """Name in the class of the text -> name in the composite.

    Args:
        whole: the composite.
        root: what the names of a stack begin with in the class of the text.
        outside: beginnings of names that both have.
        towers: beginnings of names that are not the text's.
    """
    for stack, head in PREFIXES:
        if not any(name.startswith(stack) for name in whole.tensors):
            continue
        starts = {stack: root, f"{head}lm_head.": "lm_head.", **{each: each for each in outside}}
        found = {}
        for name in whole.tensors:
            start = next((each for each in starts if name.startswith(each)), None)
            if start is not None and not name.startswith(towers):
                found[starts[start] + name.removeprefix(start)] = name
        return found
    known = ", ".join(f"{stack}layers" for stack, _ in PREFIXES)
    raise ConversionError(f"{whole.folder}: no tensor of a text model; their names begin with one of {known}")


def in_text(checkpoint: Checkpoint) -> Checkpoint:
    """The text of a composite checkpoint; any other checkpoint as it is.

    Raises:
        ConversionError: its text cannot be read.
    """
    text = None if checkpoint.is_file else text_of(checkpoint.config)
    return checkpoint if text is None else TextCheckpoint(checkpoint, text)


def bring_template(side: SideFiles) -> None:
    """Write the chat template of a composite checkpoint, which its processor may have, where a tokenizer reads it.

    Args:
        side: the files of the source; gets the template, and so does its tokenizer. Of a source that is not composite
            nothing changes.
    """
    checkpoint, tokenizer = side.checkpoint, side.tokenizer
    if not isinstance(checkpoint, TextCheckpoint) or tokenizer is None or tokenizer.chat_template:
        return
    if not checkpoint.path(OF_PROCESSORS).exists():
        return
    template = read_json(checkpoint.member(OF_PROCESSORS)).get("chat_template")
    if isinstance(template, str):
        # Not as `side.write`, whose files a way back leaves out: without `--into` the text needs this one, too.
        (side.folder / TEMPLATE).write_text(template, encoding="utf-8")
        side.notes.append(f"{TEMPLATE} was made from the processor's {OF_PROCESSORS}, so that the tokenizer has it")
        tokenizer.chat_template = template


@contextmanager
def opened(place: Source) -> Iterator[tuple[Checkpoint, list[str]]]:
    """See `blockformer.files.checkpoint.opened`; of a composite checkpoint the text."""
    with files.opened(place) as (checkpoint, notes):
        yield in_text(checkpoint), notes
