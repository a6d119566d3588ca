"""Modules that files name otherwise than the official class, or hold one below the other in one matrix."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModulesInFiles:
    """How checkpoints name the modules of an encoder.

    Attributes:
        layer: what the names of a layer's tensors begin with.
        modules: module of a layer in a checkpoint -> in the official class, or the ones that it holds.
        stack: module of the stack in a checkpoint -> in the official class, where they differ.
        head: the same of the head, whose names have no prefix.
    """

    layer: str
    modules: Mapping[str, str | tuple[str, ...]]
    stack: Mapping[str, str] = field(default_factory=dict)
    head: Mapping[str, str] = field(default_factory=dict)
