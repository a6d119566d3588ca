"""Pickles read without running anything of them: each class and function that they name is replaced by a stand-in.

Distributed checkpoints keep their table of contents in a pickle (`.metadata`), and each process of an FSDP run pickles
its own part of a model as classes that torch only builds inside such a run. What the pickle says is all that is needed.
A stand-in keeps its arguments and its state; nothing is imported, and nothing is called but the stand-in.
"""

import pickle  # nosec B403 # only with stand-ins, see below
from typing import IO, Any

from blockformer.files.errors import CheckpointError, shown

LONGEST = 1 << 29
"""Bytes of the longest pickle that is read; that of a model with 100,000 tensors in 1,000 parts has a tenth of it."""


class StandIn:
    """Stands for an object of any class, or for what any function returns.

    Attributes:
        name: of the class or function, with its module.
        arguments: what it was called with.
        state: what a pickle has set by name.
        values: what it has set as a tuple.
    """

    name = ""
    arguments: tuple[Any, ...]
    state: dict[str, Any]
    values: tuple[Any, ...]

    def __new__(cls, *arguments: Any, **named: Any) -> "StandIn":
        self = object.__new__(cls)
        self.arguments, self.state, self.values = arguments, {}, ()
        return self

    def __setstate__(self, state: Any) -> None:
        self.values = parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.state |= {str(name): value for name, value in part.items()}

    def __setitem__(self, name: Any, value: Any) -> None:
        self.state[str(name)] = value

    def append(self, value: Any) -> None:
        """Take an item of a list, and forget it."""

    def extend(self, values: Any) -> None:
        """Take items of a list, and forget them."""

    def add(self, value: Any) -> None:
        """Take an item of a set, and forget it."""


class StandInDict(dict):
    """Stands for a dict with an order, on which a pickle may set more."""

    def __setstate__(self, state: Any) -> None:
        """Forget what is set."""


class _Unpickler(pickle.Unpickler):
    """Finds stand-ins wherever a pickle names a class or a function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return StandInDict
        return type("StandIn", (StandIn,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def unpickled(file: IO[bytes], size: int, title: str) -> Any:
    """What a pickle holds, with stand-ins for all that is not a number, a text or a plain container of those.

    Args:
        file: open, at the beginning of the pickle.
        size: of the pickle in bytes.
        title: what an error calls it.

    Raises:
        CheckpointError: it is damaged, or longer than any that is read.
    """
    if size > LONGEST:
        raise CheckpointError(f"{title}: a pickle of {size} bytes, and {LONGEST} is the most that is read")
    try:
        return _Unpickler(file).load()  # nosec B301
    except Exception as error:  # of a damaged file the library raises nearly anything
        raise CheckpointError(f"{title}: a damaged pickle ({shown(type(error).__name__)}); save it again") from error


def name_of(value: Any) -> str:
    """The last part of the name of a stand-in, or of the class that it is of; "" for anything else."""
    name = getattr(value, "name", "") if isinstance(value, StandIn | type) else ""
    return str(name).rpartition(".")[2]


def numbers(value: Any) -> tuple[int, ...]:
    """A shape: a tuple of integers, or the stand-in of a `torch.Size`; () for anything else."""
    if isinstance(value, StandIn):
        value = value.arguments[0] if value.arguments else ()
    whole = isinstance(value, tuple | list) and all(type(each) is int and each >= 0 for each in value)
    return tuple(value) if whole else ()
