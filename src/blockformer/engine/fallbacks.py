"""Texts that a compiled model writes uncompiled: each reason is logged once, and counted for `explain`."""

from collections import Counter

from transformers.utils import logging

logger = logging.get_logger(__name__)


class Uncompiled(Exception):
    """A call that compiled code cannot serve. The message says why."""


class Fallbacks:
    """Why texts were written uncompiled, and how often."""

    def __init__(self):
        self.reasons = Counter[str]()

    def note(self, reason: str) -> None:
        """Count a call, and log its reason if that is a new one."""
        self.reasons[reason] += 1
        if self.reasons[reason] == 1:
            logger.warning(f"writing runs uncompiled: {reason}.")
