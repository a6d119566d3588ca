"""Calls of a compiled model that run uncompiled: each reason is logged once, and counted for `explain`."""

from collections import Counter

from transformers.utils import logging

logger = logging.get_logger(__name__)

NO_CODE = "there is no code for such a batch, since compiling it failed"


class Uncompiled(Exception):
    """A call that compiled code cannot serve. The message says why."""


class Fallbacks:
    """Why calls of a part of a model ran uncompiled, and how often.

    Args:
        part: what the log calls it.
    """

    def __init__(self, part: str):
        self.part, self.reasons = part, Counter[str]()

    def note(self, reason: str, is_said: bool = False) -> None:
        """Count a call, and log its reason if that is a new one.

        Args:
            is_said: the log has the reason already.
        """
        self.reasons[reason] += 1
        if self.reasons[reason] == 1 and not is_said:
            logger.warning(f"{self.part} runs uncompiled: {reason}.")
