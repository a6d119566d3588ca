"""Keeps transformers quiet while it loads."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet(errors: bool = False) -> Iterator[None]:
    """Silence the progress bars, notes and warnings of the libraries, and their reports of `errors` too."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    level = logging.CRITICAL if errors else logging.ERROR
    speaks = verbosity < level  # a change of the level empties the caches of all loggers there are
    if speaks:
        logging.set_verbosity(level)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if speaks:
            logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
