"""A chat template with bounds: it is a program that comes with a repo.

transformers renders it in a sandbox, which keeps it from files and from Python's own objects, but not from running for
ever or from filling the memory.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from blockformer.conversion import ConversionError

from ..files.sizes import format_size

SECONDS, NBYTES = 10.0, 1 << 30
LONGEST_TOKEN = 1000
"""More characters than any token has."""


def rendered(src: str, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], context: int) -> Any:
    """The tokens that a chat's messages are for a model which reads `context` tokens: `input_ids` and the mask [1, T].

    Raises:
        ConversionError: the template fails, takes too long or too much memory, or writes too much.
    """
    try:
        with bounded(SECONDS, NBYTES):
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:
        raise ConversionError(f"{src}: the chat template cannot be used: {_reason(error)}") from error
    if not text:
        raise ConversionError(f"{src}: the chat template cannot be used: it writes nothing")
    if len(text) > LONGEST_TOKEN * context:
        raise ConversionError(
            f"the chat has {len(text):,} characters, too many for the model's {context} tokens; write a shorter one"
        )
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it runs longer than {SECONDS:.0f} s"
    if isinstance(error, MemoryError):
        return f"it takes more than {format_size(NBYTES)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def bounded(seconds: float, nbytes: int) -> Iterator[None]:
    """Python code may take this long (in the main thread, not on Windows) and so much more memory (on Linux).

    Raises:
        TimeoutError: it takes longer.
        MemoryError: it takes more.
    """
    with _timed(seconds), _small(nbytes):
        yield


@contextmanager
def _timed(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, stop)
    # Again and again: code that catches any error would go on after a single one.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextmanager
def _small(nbytes: int) -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft > used + nbytes:
        resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
