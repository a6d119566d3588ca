"""How far something is, reported while it runs."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the current step, how much is done, and the total (0 if unknown): bytes of the weights written or, while
models are compared, hundredths of a pass through a model."""


def silent(step: str, done: int, total: int) -> None:
    """A `Progress` that tells nobody."""
