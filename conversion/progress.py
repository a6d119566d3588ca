"""How far the comparison of models is, in passes through them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from blockformer.files.progress import Progress, silent


class Passes:
    """Counts passes through models, module by module, so that one of half a minute shows how far it is.

    Attributes:
        step: what is being done.
        done: how many passes are done.
        total: how many there will be; 0 if unknown.
    """

    def __init__(self, report_progress: Progress = silent) -> None:
        self.report_progress, self.step, self.done, self.total = report_progress, "", 0.0, 0.0

    def begin(self, step: str) -> None:
        """Say what is being done from here on."""
        self.step = step
        self._say()

    def reach(self, done: float) -> None:
        """Say how many passes are done, if that is a hundredth more than before."""
        moved = int(100 * done) > int(100 * self.done)
        self.done = done
        if moved:
            self._say()

    @contextmanager
    def counted(self, model: nn.Module, worth: float = 1, calls: int = 1) -> Iterator[None]:
        """Count what is done inside: so many calls of a model, together worth so many passes."""
        parts = [module for module in model.modules() if not any(module.children())]
        share, end = worth / (calls * len(parts)), self.done + worth

        def called(module: nn.Module, arguments: Any, output: Any) -> None:
            self.reach(min(end, self.done + share))

        handles = [module.register_forward_hook(called) for module in parts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.reach(end)

    def _say(self) -> None:
        self.report_progress(self.step, int(100 * self.done), int(100 * self.total))
