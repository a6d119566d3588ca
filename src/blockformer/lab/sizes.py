"""Parameters and FLOPs of a config, and the inner width at which they equal another config's."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..model.configuration_decoder import BlockformerDecoderConfig
from ..summary import on_paper

EQUAL = ("parameters", "flops", "nothing")
TOLERANCE = 0.005
"""The share by which sizes that are called equal may differ."""
# Widths that processors are quickest with, first.
_STEPS = (64, 8, 1)


class Size(NamedTuple):
    """What a config costs.

    Attributes:
        parameters: numbers of the model, tied ones once.
        flops: of training on one token: three times a forward pass, once for itself and twice for the gradients.
    """

    parameters: int
    flops: float


def measure(config: BlockformerDecoderConfig, length: int) -> Size:
    """Count on the meta device, without memory.

    FLOPs are counted for all matmuls of a text of `length` tokens, two for each multiplication and addition,
    attention to all of its tokens.
    """
    model, ids = on_paper(config), torch.zeros(1, length, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    return Size(model.num_parameters(), 3 * counter.get_total_flops() / length)


def solve(
    config: BlockformerDecoderConfig, equal: str, target: Size, length: int, settings: dict[str, Any]
) -> BlockformerDecoderConfig:
    """The config with the inner width of its feed-forward network at which it is as large as the target.

    Both sizes grow evenly with the inner width, so two widths tell the right one. It is a multiple of 64 or of 8 where
    that is equal enough.

    Args:
        config: the config; with experts, the width of one expert is changed.
        equal: one of `EQUAL`.
        target: the size to have.
        length: tokens of a row.
        settings: what the experiment sets in this config.

    Raises:
        ValueError: no width is within `TOLERANCE`, or the settings fix the width.
    """
    if equal == "nothing":
        return config
    name = "moe_intermediate_size" if config.num_experts else "intermediate_size"
    if name in settings:
        raise ValueError(f"{name} is chosen so that {equal} are equal: drop it, or set equal: nothing.")

    def at(width: int) -> BlockformerDecoderConfig:
        other = copy.deepcopy(config)
        setattr(other, name, width)
        return other

    def size(width: int) -> float:
        if equal == "parameters":
            return on_paper(at(width)).num_parameters()
        return measure(at(width), length).flops

    wanted = getattr(target, equal)
    small, large = size(64), size(128)
    slope = (large - small) / 64
    if not slope:
        raise ValueError(f"its {equal} do not depend on {name}, so nothing makes them equal: set equal: nothing.")
    exact = (wanted - small) / slope + 64
    for step in _STEPS:
        width = max(1, round(exact / step) * step)
        if abs(slope * (width - exact)) <= TOLERANCE * wanted and abs(size(width) - wanted) <= TOLERANCE * wanted:
            return at(width)
    raise ValueError(f"no {name} gives it the base's {wanted:,.0f} {equal} within {TOLERANCE:.1%}: {exact:,.1f} would.")
