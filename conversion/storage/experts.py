"""Experts in files: three matrices for each expert, where the official class stacks all experts in one tensor.

E experts, C hidden size, I inner width of an expert.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError

from ..rules.operations import Shape
from ..rules.table import Rule, module_rules

PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class StackExperts:
    """`parts` matrices [rows, columns] of each expert, one expert after the other -> [E, parts * rows, columns]."""

    experts: int
    parts: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(tensors)).reshape(self.forward_shapes([tuple(t.shape) for t in tensors])[0])]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        return list(tensor.reshape(self.experts * self.parts, -1, tensor.shape[-1]).unbind())

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if len(set(shapes)) != 1 or len(shapes[0]) != 2:
            raise ConversionError(f"the experts' shapes {[list(shape) for shape in dict.fromkeys(shapes)]} differ")
        rows, columns = shapes[0]
        return [(self.experts, self.parts * rows, columns)]

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        (shape,) = shapes
        if len(shape) != 3 or shape[0] != self.experts or shape[1] % self.parts:
            raise ConversionError(f"shape {list(shape)} does not hold {self.parts} matrices of {self.experts} experts")
        return [(shape[1] // self.parts, shape[2])] * (self.experts * self.parts)


@dataclass(frozen=True)
class OneByOne:
    """How published checkpoints hold a sparse layer.

    Attributes:
        block: what the names of its tensors begin with, without the layer's prefix.
        parts: what an expert's gate, up and down projection are called, or of one without a gate the last two.
        statics: the name of the router's selection bias [1, E], which the class has in its gate; None: it is not moved.
        modules: module in the class -> what it is called here, where that is something else.
        in_class: what those names begin with in the class.
    """

    block: str = "mlp."
    parts: tuple[str, ...] = PARTS
    statics: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    in_class: str = "mlp."

    def rules(self, layer: str, modules: Iterable[str], tensors: Iterable[str], experts: int) -> list[Rule]:
        """Tensors of the file -> of the class.

        Args:
            layer: what the names of a layer's tensors begin with.
            modules: the other modules of a sparse layer, without prefix, each with weight and bias.
            tensors: its other tensors.
            experts: how many experts there are.
        """
        theirs, ours = layer + self.block, layer + self.in_class
        rules = []
        if theirs != ours:
            rules += module_rules({theirs + self.modules.get(name, name): ours + name for name in modules})
            rules += [Rule(theirs + name, ours + name) for name in tensors]
        if self.statics is not None:
            rules.append(Rule(theirs + self.statics, f"{ours}gate.{self.statics}"))
        *first, down = self.parts
        name = "gate_up_proj" if len(first) > 1 else "up_proj"
        for target, parts in ((f"experts.{name}", first), ("experts.down_proj", [down])):
            names = [f"{theirs}experts.{i}.{part}.weight" for i in range(experts) for part in parts]
            rules.append(Rule(tuple(names), ours + target, StackExperts(experts, len(parts))))
        return rules
