"""The norms of the articles: how they spell their factor and bias, and the two formulas by which they compute."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError

from ..rules.operations import Shape
from ..rules.table import Rule
from ..storage.variant import CheckpointVariant
from .base import GUESSED, Kind, one_of

GAINS, SHIFTS = ("weight", "gamma", "scale", "alpha", "a_2"), ("bias", "beta", "shift", "b_2")
"""How norms name the factor and the bias."""
BY_DEVIATION = ("alpha", "a_2")
"""The factors of norms that divide by the unbiased deviation plus a number, unless settings say otherwise."""
NORMS = ("layer_norm", "unbiased_std")
NORM: Kind = (f"one of {', '.join(map(repr, NORMS))}", lambda value: value in NORMS)
UNBIASED = "unbiased deviation"


def norm_traits(names: Collection[str], settings: Mapping[str, Any]) -> set[str]:
    """How the norms spell their factor and bias, and by which formula they compute.

    Args:
        names: last parts of their tensors' names.
        settings: in which "norm" may name the formula; else the factor's name tells.
    """
    if not names:
        return set()
    gains, shifts = {*names} & set(GAINS), {*names} & set(SHIFTS)
    (gain,) = one_of([(name,) for name in GAINS], {*names} - shifts if gains else names, "the norms")
    if shifts:
        one_of([(name,) for name in SHIFTS], shifts, "the biases of the norms")
    traits = {f"gain {gain}", *(f"shift {name}" for name in shifts)}
    told = settings.get("norm")
    if told == NORMS[1] or (told is None and gain in BY_DEVIATION):
        traits |= {UNBIASED} if told else {UNBIASED, GUESSED}
    return traits


def norm_rules(theirs: str, ours: str, variant: CheckpointVariant, config: PretrainedConfig) -> list[Rule]:
    """The rules of a norm, spelled as `norm_traits` has found."""
    told = _spelled_norm(variant.traits)
    factor = ((config.hidden_size - 1) / config.hidden_size) ** 0.5 if UNBIASED in variant.traits else None
    gain, shift = OfEachFeature(config.hidden_size, factor), OfEachFeature(config.hidden_size)
    rules = [Rule(f"{theirs}.{told.get('gain', 'weight')}", f"{ours}.weight", gain)]
    return [*rules, Rule(f"{theirs}.{told.get('shift', 'bias')}", f"{ours}.bias", shift)]


def norm_settings(settings: Mapping[str, Any], traits: Collection[str]) -> dict[str, Any]:
    """Our fields of the norms: a small number next to the deviation is its square under the root."""
    eps = settings.get("eps", 1e-6) ** 2 if UNBIASED in traits else settings.get("eps", 1e-5)
    return {"norm_eps": float(eps), "norm_bias": "shift" in _spelled_norm(traits)}


def _spelled_norm(traits: Collection[str]) -> dict[str, str]:
    return dict(trait.split(" ", 1) for trait in traits if trait.startswith(("gain ", "shift ")))


@dataclass(frozen=True)
class OfEachFeature:
    """A number for each of C features, or one for all of them -> one for each, times a factor.

    A norm that divides by the standard deviation with C - 1 in it becomes one with C by the factor sqrt((C - 1) / C):
    w (x - m) / s' with s' = s sqrt(C / (C - 1)) is w sqrt((C - 1) / C) (x - m) / s. It rounds once, so we have no
    exact way back.
    """

    width: int
    factor: float | None = None

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[C] or [1] -> [C], in float64 where there is a factor."""
        if self.factor is not None:
            tensors = [tensor.double() * self.factor for tensor in tensors]
        return [tensor.reshape(-1).expand(self.width).contiguous() for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """[C] for each."""
        if any(tuple(shape) not in ((), (1,), (self.width,)) for shape in shapes):
            raise ConversionError(f"{list(shapes[0])} is neither one number for each feature nor one for all")
        return [(self.width,) for _ in shapes]
