"""The compiled steps of a CPU by which a model writes one more token: its layers, and functions for each kind of batch.

n beams of a source; I inputs and O outputs of a linear layer, N tokens, k experts of a token, E experts.
"""

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import logging

from ..model.attention import Attention
from ..model.awq_linear import QuantizedLinear
from ..model.experts import Experts
from ..model.hybrid import OF_HYBRID
from ..model.modeling_decoder import BlockformerDecoderForCausalLM
from ..model.modeling_encoder_decoder import BlockformerEncoderDecoderForConditionalGeneration
from ..model.token_inputs import OF_LAYERS
from ..model.varied_attention import VARIED
from ..watched import unknown_code
from .attention import PreparedAttention, StepAttention
from .choices import ONEDNN, OtherLoop, is_faster
from .compiler import MOST_ROWS, Rows, as_rows, computed_once, has_compiler, rows_of
from .linear import OrderedLinear, QuickLinear, by_onednn_in_a_graph, in_columns
from .step_functions import NO_CODE, StepFunctions

logger = logging.get_logger(__name__)


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
        in_place: layers and their replacements, which hold 4-bit weights in another order.
    """

    def __init__(self, rows: Rows | None, dtype: torch.dtype, in_place: Mapping[nn.Module, nn.Module]):
        self.in_place = in_place
        self.matmul: Callable = F.linear
        if dtype is torch.float32:
            self.matmul = by_onednn_in_a_graph if is_faster(ONEDNN, dtype) else in_columns
        self.rows = None if dtype is torch.float64 else rows

    def __call__(self, module: nn.Module) -> nn.Module:
        """A module with the same parameters and parts, or a copy of its replacement."""
        own: Any = copy.copy(self.in_place.get(module, module))
        own.__class__ = _CLASSES.get(type(own), type(own))
        if isinstance(own, StepLinear):
            own.matmul = self.matmul
        if isinstance(own, StepLinear) or module in self.in_place:
            own.rows = self.rows
        return own


class CompiledSteps:
    """The compiled steps of a decoder with a language model head, one for each kind of batch.

    Args:
        model: a model that writes, in evaluation mode and without gradients.
    """

    def __init__(self, model):
        self._model = model
        self._functions: dict[tuple, StepFunctions | None] = {}
        self._lock = threading.Lock()

    def __reduce__(self):
        return CompiledSteps, (None,), (self._model,)  # a copy compiles functions of its own

    def __setstate__(self, state):
        self.__init__(*state)  # type: ignore[misc]

    @functools.cached_property
    def _unknown_code(self):
        return unknown_code(self._model)

    @functools.cached_property
    def _ordered(self) -> dict[nn.Module, OrderedLinear]:
        """A copy in a loop's order of each layer of 4-bit weights."""
        layers = [module for module in self._stack.modules() if isinstance(module, QuantizedLinear)]
        return {layer: OrderedLinear(layer) for layer in layers}

    @functools.cached_property
    def _stack(self):
        return self._model.get_decoder()

    def refresh(self) -> None:
        """Update the copies of weights that have changed."""
        for layer in self._ordered.values():
            layer.refresh()

    def bytes_of_copies(self) -> int:
        """Of weights in another layout, held in addition to the plain ones."""
        return sum(layer.nbytes for layer in self._ordered.values())

    def kinds(self) -> list[tuple[str, int]] | None:
        """The kinds of batches, see `explain`, that there is code for; None before the first one."""
        ready = [kind for kind, each in self._functions.items() if each is not None and not each.has_failed]
        return ready if self._functions else None

    def functions_for(self, sources: int, beams: int) -> StepFunctions:
        """The compiled parts for a batch of one source or several, with so many beams each.

        Raises:
            OtherLoop: there are none.
        """
        config, rows = self._stack.config, sources * beams
        if getattr(config, "num_experts", None) and rows > 1:  # rows that share an expert multiply by it together
            raise OtherLoop("a model with experts has more than one row to write")
        is_low = bool(getattr(config, "linear_bits", None))
        if is_low and (rows > MOST_ROWS or self._model.dtype is torch.float64):
            raise OtherLoop(f"a model with 4-bit weights has more than {MOST_ROWS} rows to write, or is in float64")
        if self._unknown_code is not None:
            raise OtherLoop(f"the model contains code of another package: {self._unknown_code}")
        is_few = rows <= MOST_ROWS and (beams == 1 or is_low)  # 4-bit weights have no other matmul than loops
        kind = ("one" if sources == 1 else "few" if is_few else "many", beams)
        if not self._has(kind):
            with self._lock:
                if not self._has(kind):  # a thread that waits for it may find them here
                    self._functions[kind] = self._new_functions(*kind)
        functions = self._functions[kind]
        if functions is None or functions.has_failed:
            raise OtherLoop(NO_CODE)
        return functions

    def _has(self, kind: tuple) -> bool:
        functions = self._functions.get(kind)
        return kind in self._functions and (functions is None or functions.dtype is self._model.dtype)

    def _new_functions(self, sources: str, beams: int) -> StepFunctions | None:
        if not has_compiler():
            fix = "install g++ or clang++, or set CXX"
            logger.warning_once(f"found no C++ compiler, so the model runs uncompiled: {fix}.")
            return None
        rows = {"one": Rows(beams) if beams <= MOST_ROWS else None, "few": Rows(MOST_ROWS, varies=True)}.get(sources)
        copied = StepLayers(rows, self._model.dtype, self._ordered)
        return StepFunctions(self._model, beams, copied=copied, device="cpu")


def uncompiled_field(config) -> str | None:
    """A field that no compiled step knows, since layers differ by it or read more than their buffers, or None."""
    named = next((name for name in (*VARIED, *OF_LAYERS, "merged_attention") if getattr(config, name, None)), None)
    return "layer_types" if named is None and hasattr(config, OF_HYBRID) else named


def can_compile(model) -> bool:
    """Whether the model writes text, so that it has a step."""
    is_writer = isinstance(model, BlockformerDecoderForCausalLM | BlockformerEncoderDecoderForConditionalGeneration)
    return is_writer and not getattr(model.config, "bidirectional", False)
