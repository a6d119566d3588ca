"""Texts that a prepared model leaves to transformers' own loop: each reason is counted for `explain`."""

from collections import Counter

from transformers.utils import logging

logger = logging.get_logger(__name__)


class OtherLoop(Exception):
    """A call that goes to transformers' own loop. The message says why."""


class Fallbacks:
    """Why texts were written by transformers' own loop, and how often.

    Args:
        is_logged: whether a new reason is a warning, since somebody waited for a compiler.
    """

    def __init__(self, is_logged: bool):
        self.reasons, self._is_logged = Counter[str](), is_logged

    def note(self, reason: str) -> None:
        """Count a call, and log its reason if that is a new one."""
        self.reasons[reason] += 1
        if self.reasons[reason] == 1 and self._is_logged:
            logger.warning(f"writing runs uncompiled: {reason}.")
