"""Keeps transformers quiet while it loads."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars, notes and warnings of the libraries."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    speaks = verbosity < logging.ERROR  # a change of the level empties the caches of all loggers there are
    if speaks:
        logging.set_verbosity_error()
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
