"""The entry point: runs a command, and tells errors in one sentence that is safe for a terminal."""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..files.errors import is_failure, printable
from .commands import app

# What messages call by the name of an argument in Python -> the option.
OPTIONS = {
    "force=True": "--force",
    "verify=False": "--no-verify",
    "verify='full'": "--verify full",
    "verify='quick'": "--verify quick",
    "to_official=True": "--to official",
    "kv_heads=": "--kv-heads ",
}


def main(arguments: list[str] | None = None) -> None:
    """The entry point; always ends with `SystemExit`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if threading.current_thread() is threading.main_thread():  # a killed run cleans up after itself, too
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with printable_logs():
            app(args=arguments, prog_name="blockformer")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BaseException as error:
        if debug or not is_failure(error):
            raise
        print(f"error: {printable(_sentence(error))}", file=sys.stderr)
        sys.exit(1)


@contextmanager
def printable_logs() -> Iterator[None]:
    """Inside it, the libraries' log messages, which may quote a repo's files, are safe for a terminal."""
    make = logging.getLogRecordFactory()

    def make_printable(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg, record.args = printable(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(make_printable)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def _sentence(error: BaseException) -> str:
    """What went wrong, for the user: the message of an expected error; of others the type as well."""
    message = str(error).strip()
    if isinstance(error, ValueError) and message:
        for argument, option in OPTIONS.items():
            message = message.replace(argument, option)
        return message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, FileNotFoundError) and message:
        return message
    kind = type(error).__name__
    return f"{kind}: {message.splitlines()[0]} (--debug shows more)" if message else f"{kind} (--debug shows more)"
