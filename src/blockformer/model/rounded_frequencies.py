"""Rotary frequencies that are rounded to 16 bits, as in the training of some ESM-2 (Lin et al., 2023)."""

from dataclasses import dataclass

import torch

from .axes import axis
from .rotary import RotaryFields, RotaryPositions


@dataclass(eq=False, repr=False)
class RoundingFields(RotaryFields):
    """The field of rounded frequencies."""

    frequency_dtype: str | None = axis(
        None, ("float16", "bfloat16"), "positions", "dtype that rotary frequencies are rounded to; None: exact"
    )

    def check(self):
        """Positions are rotary."""
        if self.frequency_dtype and self.position_type != "rotary":
            raise ValueError(f"frequency_dtype={self.frequency_dtype!r} needs position_type='rotary': leave it out.")

    def fill_rope_parameters(self, given, rope_theta):
        """As ever; they are of the plain type."""
        super().fill_rope_parameters(given, rope_theta)
        if self.frequency_dtype and (self.rope_parameters or {}).get("rope_type") != "default":
            raise ValueError(f"frequency_dtype={self.frequency_dtype!r} needs rope_type 'default': leave it out.")

    def scheme(self, gives: str):
        """See `BlockformerConfig.scheme`."""
        usual = super().scheme(gives)  # type: ignore[misc]
        return RoundedFrequencies if gives == "rotations" and self.frequency_dtype else usual


class RoundedFrequencies(RotaryPositions):
    """Rotary positions by rounded frequencies."""

    def compute_frequencies(self):
        return super().compute_frequencies().to(getattr(torch, self.config.frequency_dtype)).float()
