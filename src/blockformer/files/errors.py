"""Errors of conversion, and safe ways to show names that come from files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

LISTED = 20
"""Entries of one kind that an error message lists; the rest are only counted."""


class ConversionError(ValueError):
    """A conversion that cannot be done. The message names the file, key or field, and the fix.

    The message is safe to print on a terminal whatever it quotes: control characters except line ends are escaped.
    """

    def __init__(self, message: str):
        super().__init__("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message))


class CheckpointError(ConversionError):
    """The files of a checkpoint are damaged, hostile, incomplete, or changed while being read."""


class MisfitError(ConversionError):
    """A checkpoint's tensors do not fit the model that `config.json` describes.

    Attributes:
        shapes: of tensors with the wrong one: the file's, and the model's.
        fits: entries of `config.json` with which the tensors fit; empty if none are known.
    """

    def __init__(
        self,
        message: str,
        shapes: Iterable[tuple[Sequence[int], Sequence[int]]] = (),
        fits: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.shapes = tuple(shapes)
        self.fits = dict(fits or {})


_UNSAFE = {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)}
_ESCAPES = {code: repr(chr(code))[1:-1] for code in _UNSAFE - {ord("\n"), ord("\t")}}


def printable(text: str) -> str:
    """A text of any origin, made safe for a terminal: control characters, except line ends and tabs, are escaped, and
    so are characters that change the direction of writing. Words of all languages and emoji stay as they are.
    """
    return text.translate(_ESCAPES)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. On the CPU, PyTorch reports that as a plain RuntimeError."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = ("DefaultCPUAllocator", "std::bad_alloc", "Cannot allocate memory")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in words)


def is_failure(error: BaseException) -> bool:
    """Whether an error is a failure, not a request to stop. A panic of a tokenizer's Rust code is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn running out of memory into a ConversionError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        message = "out of memory; free some, or convert with verify=False"
        raise ConversionError(f"{message} ({reason})" if reason else message) from error


def reason_of(error: BaseException) -> str:
    """An error's message in one line; its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def shown(name: object, limit: int = 200) -> str:
    """A name from a file, made safe for a terminal: quoted, control characters escaped, long ones cut."""
    text = repr(str(name)[: limit + 1])
    return text if len(str(name)) <= limit else f"{text[:limit]}...' ({len(str(name))} characters)"


def listed(lines: Iterable[str], limit: int = LISTED) -> str:
    """Indented lines for an error message; beyond `limit` only a count."""
    lines = list(lines)
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "".join(f"\n  {line}" for line in lines[:limit] + more)
