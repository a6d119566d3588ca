"""How a family writes its rotary positions: one set for all layers, one for each layer type, a part of each head."""

import math
from collections.abc import Mapping
from typing import Any

from blockformer.files.errors import ConversionError, shown
from blockformer.model.rotary import rotary_size

from .base import Official, Value

AXES = ("mrope_section", "mrope_interleaved")
"""Entries of `rope_parameters` that say which channels turn by which of a picture's axes."""


class Rope(Value):
    """The rotary parameters, as the official class has completed them.

    Args:
        by_part: whether the official class can turn a part of each head.
    """

    def __init__(self, by_part: bool = False):
        self.by_part = by_part

    def read(self, official):
        rope = official.config.rope_parameters or {}
        nested = [name for name, value in rope.items() if isinstance(value, dict)]
        if nested:
            names = ", ".join(map(shown, nested))
            raise ConversionError(
                f"config.json: rope_parameters differ by layer type ({names}), which is not supported"
            )
        self.check_part(rope)
        return {"rope_parameters": _written_rope(rope)}

    def check_part(self, rope: Mapping[str, Any], of: str = "") -> None:
        """Refuse rotary parameters by which a part of each head turns, where the official class turns all of it."""
        part = rope.get("partial_rotary_factor", 1.0)
        if part != 1 and not self.by_part:
            raise ConversionError(f"config.json: partial_rotary_factor{of} is {part}, which this family does not have")

    def write(self, config, head):
        whole = {"partial_rotary_factor": 1.0} if self.by_part else {}
        return {"rope_parameters": {**whole, **(config.rope_parameters or {})}}


def _written_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Without the old name of the type, and without a part that is the whole.

    Raises:
        ConversionError: it has no base, without which the official class cannot be made.
    """
    if rope.get("rope_theta", 0) is None:
        raise ConversionError(
            "config.json: rope_theta is null (in rope_parameters, or under an older name such as local_rope_theta); "
            "write the number that the model was trained with"
        )
    idle = {"type": rope.get("type"), "partial_rotary_factor": 1.0}
    return {name: value for name, value in rope.items() if name not in idle or value != idle[name]}


class RopeByLayerType(Rope):
    """Rotary parameters of each layer type, without types that no layer has."""

    def read(self, official):
        rope, types = official.config.rope_parameters, set(official.config.layer_types)
        if "rope_type" in rope and types.isdisjoint(rope):
            return super().read(official)
        if "rope_type" in rope:
            one, rest = (
                ", ".join(shown(name) for name, value in rope.items() if isinstance(value, dict) is is_dict)
                for is_dict in (True, False)
            )
            raise ConversionError(
                f"config.json: rope_parameters need one dict for each layer type ({one}), and the official class does "
                f"not read {rest} next to them: move these entries into the dicts, or remove them"
            )
        for name in sorted(types):
            if rope[name].get("rope_type") != "proportional":
                self.check_part(rope[name], f" of {name}")
        return {"rope_parameters": {name: _written_rope(rope[name]) for name in sorted(types)}}

    def write(self, config, head):
        rope = config.rope_parameters or {}
        return {"rope_parameters": {name: dict(rope.get(name, rope)) for name in config.layer_types}}


class RopeOfText(Rope):
    """Rotary parameters without the axes of pictures: a text's tokens have the same position on each of them."""

    def read(self, official):
        rope = super().read(official)["rope_parameters"]
        return {"rope_parameters": {name: value for name, value in rope.items() if name not in AXES}}


def part_of(rotated: int, size: int) -> float:
    """The `partial_rotary_factor` by which so many channels, of a head's, turn."""
    part = rotated / size
    return part if int(part * size) == rotated else math.nextafter(part, 2.0)


class RotaryPart(Value):
    """How many channels of a head turn, as a number; their pairs lie side by side."""

    def read(self, official):
        size = official.config.hidden_size // official.config.num_attention_heads
        rotated = official.config.rotary_dim
        if not isinstance(rotated, int):
            raise ConversionError(f"config.json: rotary_dim is {shown(rotated)}; it must be a number of channels")
        if not size:
            raise ConversionError("config.json: a head has no channels; check the hidden size and the number of heads")
        part = part_of(rotated, size)
        return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": part}}

    def write(self, config, head):
        return {"rotary_dim": rotary_size(config.rope_parameters or {}, config.head_dim)}


def only_sliding_layers_rotate(official: Official) -> dict[str, Any]:
    """Our `rope_layers` where layers that see everything have no positions."""
    rotates = [layer_type == "sliding_attention" for layer_type in official.config.layer_types]
    return {"rope_layers": None if all(rotates) else rotates}
