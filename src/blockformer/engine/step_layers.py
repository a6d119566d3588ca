"""A model's layers as its compiled step has them: the same parameters, with the products of few rows as loops.

I inputs and O outputs of a linear layer, N tokens, k experts of a token, E experts.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from ..model.attention import Attention
from ..model.experts import Experts
from .attention import PreparedAttention, StepAttention
from .choices import ONEDNN, is_faster
from .few_rows import Rows, as_rows, computed_once, rows_of
from .linear import QuickLinear, by_onednn_in_a_graph


class StepLinear(nn.Linear):
    """A linear layer for as many rows as a step has: states [..., I] -> [..., O], summed in float32.

    Attributes:
        rows: the number that its loop is for; None if it uses `matmul`, for any number.
        matmul: a library's, of states, weight and bias.
    """

    rows: Rows | None = None
    matmul: Callable = staticmethod(F.linear)

    def forward(self, states):
        """As `F.linear`."""
        if self.rows is None:
            return self.matmul(states, self.weight, self.bias)
        weight = self.weight.float()
        return as_rows([(weight * row).sum(-1) for row in rows_of(states, self.rows)], states, self.rows, self.bias)


class StepExperts(Experts):
    """`Experts` of which a token reads only the weights that it passes through."""

    def forward(self, tokens, experts, weights):
        """Tokens [N, C] by the experts int64 [N, k], each with its weight [N, k]."""
        inner = self._apply_gate(_products(tokens[:, None], self.first_proj, self.gate_up_proj_bias, experts))
        output = _products(inner, self.down_proj, self.down_proj_bias, experts)
        return (output * weights[..., None]).sum(1).to(tokens.dtype)


def _products(states, matrices, biases, experts) -> torch.Tensor:
    """States [N, 1 or k, I] of N tokens times the matrices [E, O, I] of experts int64 [N, k] -> float32 [N, k, O]."""
    # As a loop whose index is looked up the compiler copies no matrix.
    products = (matrices[experts].float() * computed_once(states)[:, :, None]).sum(-1)
    return products if biases is None else products + biases[experts].float()


_CLASSES = {
    nn.Linear: StepLinear,
    QuickLinear: StepLinear,
    Experts: StepExperts,
    Attention: StepAttention,
    PreparedAttention: StepAttention,
}


class StepLayers:
    """Makes a CPU's step layers from a model's layers.

    Args:
        rows: of a step; None: any number.
        dtype: of the model.
        in_place: layers and their replacements, which hold 4-bit weights in another order or a rounded head.
    """

    def __init__(self, rows: Rows | None, dtype: torch.dtype, in_place: Mapping[nn.Module, nn.Module]):
        self.in_place = in_place
        self.matmul: Callable = by_onednn_in_a_graph if is_faster(ONEDNN, dtype) else F.linear
        self.rows = None if dtype is torch.float64 else rows

    def __call__(self, module: nn.Module) -> nn.Module:
        """A module with the same parameters and parts, or the replacement."""
        other = self.in_place.get(module)
        if other is not None:
            own = copy.copy(other)
            vars(own)["rows"] = self.rows
            return own
        own = copy.copy(module)
        own.__class__ = _CLASSES.get(type(module), type(module))
        if isinstance(own, StepLinear):
            own.rows, own.matmul = self.rows, self.matmul
        return own


def twin(module: nn.Module, in_place: Mapping[nn.Module, nn.Module], copied: Callable = copy.copy) -> nn.Module:
    """A module of the same parameters and of copies of its parts, whose place among the layers is 0.

    Code that is compiled for one layer then serves all that are alike.

    Args:
        in_place: what takes the place of a part.
        copied: makes each other copy.
    """
    if module in in_place:
        return in_place[module]
    own = copied(module)
    parts = {name: None if part is None else twin(part, in_place, copied) for name, part in module._modules.items()}
    vars(own)["_modules"] = parts
    if "layer_idx" in vars(own):
        vars(own)["layer_idx"] = 0
    return own
