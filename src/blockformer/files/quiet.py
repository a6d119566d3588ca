"""Keeps transformers quiet while it loads."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep the progress bars of transformers off the screen."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()


@contextmanager
def quiet(errors: bool = False) -> Iterator[None]:
    """Silence the progress bars, notes and warnings of the libraries, and their reports of `errors` too."""
    verbosity = logging.get_verbosity()
    level = logging.CRITICAL if errors else logging.ERROR
    speaks = verbosity < level  # a change of the level empties the caches of all loggers there are
    if speaks:
        logging.set_verbosity(level)
    try:
        with without_bars(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if speaks:
            logging.set_verbosity(verbosity)
