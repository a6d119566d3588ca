"""Training for so much time or so many steps, with a learning rate that follows the used share."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer


@dataclass
class Budget:
    """How long to train: until the time is up or the steps are done, whichever comes first.

    The learning rate follows the share of the budget that is used, so a quick machine and a slow one both finish their
    schedule; a quick one simply takes more steps on the way.

    Attributes:
        seconds: wall-clock time.
        max_steps: optimizer steps.
    """

    seconds: float
    max_steps: int
    start: float | None = None

    def used(self, step: int) -> float:
        """The share of the budget that is used after so many steps, 0 to 1."""
        if self.start is None:
            self.start = time.perf_counter()
        elapsed = time.perf_counter() - self.start
        return min(1.0, max(elapsed / self.seconds, step / self.max_steps))


def learning_rate_factor(used: float, warm_up: float = 0.05, floor: float = 0.05) -> float:
    """A linear warm-up, then half a cosine down to a floor; `used` is the share of the budget that is gone."""
    if used < warm_up:
        return max(used / warm_up, 0.02)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (used - warm_up) / (1 - warm_up)))


class BudgetTrainer(Trainer):
    """A `Trainer` whose learning rate follows its `budget`."""

    budget: Budget

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: learning_rate_factor(self.budget.used(step))
        )
        return self.lr_scheduler
