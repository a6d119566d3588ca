"""Means, spreads, and how sure a difference or a slope is, with Student's t."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """Some values: their number, their mean, and the deviation of one of them (None of a single one)."""

    number: int
    mean: float
    deviation: float | None


class Interval(NamedTuple):
    """An estimate and how far the truth may be from it on either side, at `CONFIDENCE`; None: it cannot be told."""

    estimate: float
    margin: float | None

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside."""
        return self.margin is not None and abs(self.estimate) > self.margin


def spread(values: list[float]) -> Spread:
    """Mean and deviation (n - 1)."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(len(values), float(np.mean(values)), deviation)


def student_t(freedom: float) -> float:
    """The t that a variable with so many degrees of freedom (1 or more) stays within, on both sides, at `CONFIDENCE`.

    With t = sqrt(freedom) tan(a), the density is a power of cos(a): its integral is halved until it fits.
    """
    nodes, weights = np.polynomial.legendre.leggauss(100)
    total = math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)) / 2
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        inside = float(np.sum(weights * np.cos(angle * (nodes + 1) / 2) ** (freedom - 1))) * angle / 2
        low, high = (angle, high) if inside < CONFIDENCE * total else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def difference(values: list[float], base: list[float]) -> Interval:
    """Mean of the values less that of the base, by Welch's t test (1947): their deviations may differ."""
    ours, theirs = spread(values), spread(base)
    estimate = ours.mean - theirs.mean
    if ours.deviation is None or theirs.deviation is None:
        return Interval(estimate, None)
    squares = ours.deviation**2 / ours.number, theirs.deviation**2 / theirs.number
    if not sum(squares):
        return Interval(estimate, 0.0)
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / (ours.number - 1) + squares[1] ** 2 / (theirs.number - 1))
    return Interval(estimate, student_t(freedom) * math.sqrt(sum(squares)))


class PowerLaw(NamedTuple):
    """loss = factor * compute ** -exponent, by least squares of the logarithms.

    Attributes:
        exponent: with its interval from the deviation of the points, Student's t with two degrees of freedom less
            than points; without margin of two points.
    """

    factor: float
    exponent: Interval

    def at(self, compute: float) -> float:
        """The loss that it predicts."""
        return self.factor * compute**-self.exponent.estimate


def power_law(compute: list[float], loss: list[float]) -> PowerLaw:
    """Fit one to points of at least two different computes.

    Raises:
        ValueError: there are fewer.
    """
    x, y = np.log(compute), np.log(loss)
    around = x - x.mean()
    if len(x) < 2 or not np.ptp(x):
        raise ValueError("a power law needs two different computes")
    slope = float(around @ y / (around @ around))
    intercept = float(y.mean() - slope * x.mean())
    margin = None
    if len(x) > 2:
        rest = y - intercept - slope * x
        error = math.sqrt(float(rest @ rest) / (len(x) - 2) / float(around @ around))
        margin = student_t(len(x) - 2) * error
    return PowerLaw(math.exp(intercept), Interval(-slope, margin))
