"""The steps by which a model writes one more token, a CPU's and a GPU's: which copies of its layers each has.

A CPU's are loops or a library's matmuls, one set of compiled functions for each kind of batch. A GPU, which captures
its step, has joined matmuls.

n beams of a source; I inputs and O outputs of a linear layer, N tokens, k experts of a token, E experts.
"""

import copy
import itertools
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
from ..watched import is_bare
from .attention import PreparedAttention, StepAttention
from .choices import ONEDNN, is_faster
from .compiler import has_compiler
from .few_rows import MOST_ROWS, as_rows, computed_once, multiplied, rows_of
from .linear import OrderedLinear, QuickLinear, by_onednn_in_a_graph, in_columns
from .step_functions import NO_CODE, OtherLoop, StepFunctions

logger = logging.get_logger(__name__)
# Names of sibling layers with the same input.
_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    tuple(f"in_proj_{part}" for part in "qkvzba"),
    tuple(f"in_proj_{part}" for part in ("z", "v", "k", "q", "dt")),
)


class StepLinear(nn.Linear):
    """A linear layer for as many rows as a step has: states [..., I] -> [..., O], summed in float32.

    Attributes:
        rows: the number that its loop is for; None if it uses `matmul`, for any number.
        matmul: a library's, of states, weight and bias.
    """

    rows: int | None = None
    matmul: Callable = staticmethod(F.linear)

    def forward(self, states):
        """As `F.linear`."""
        if self.rows is None:
            return self.matmul(states, self.weight, self.bias)
        outputs = [multiplied(self.weight, row) for row in rows_of(states, self.rows)]
        return as_rows(outputs, states, self.bias)


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

    def __init__(self, rows: int | None, dtype: torch.dtype, in_place: Mapping[nn.Module, nn.Module]):
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
    """The compiled steps of a model that writes, in evaluation mode without gradients: one for each kind of batch."""

    by_graphs = False

    def __init__(self) -> None:
        self._functions: dict[tuple, StepFunctions] = {}
        self._ordered: dict[nn.Module, OrderedLinear] | None = None  # layers of 4-bit weights, each in a loop's order

    def _copies_of(self, model) -> dict[nn.Module, OrderedLinear]:
        if self._ordered is None:
            layers = [module for module in model.get_decoder().modules() if isinstance(module, QuantizedLinear)]
            self._ordered = {layer: OrderedLinear(layer) for layer in layers}
        return self._ordered

    def has_moved(self, model) -> bool:
        """Never: a compiled function looks up its weights at each call."""
        return False

    def refresh(self, model) -> None:
        """Update the copies of weights that have changed."""
        for layer in self._copies_of(model).values():
            layer.refresh()

    def bytes_of_copies(self) -> int:
        """Of weights in another layout, held in addition to the plain ones."""
        return sum(layer.nbytes for layer in (self._ordered or {}).values())

    def kinds(self) -> list[tuple[int | None, int]] | None:
        """The kinds of batches, see `explain`, that there is code for; None before the first one."""
        ready = [kind for kind, each in self._functions.items() if not each.has_failed]
        return ready if self._functions else None

    def functions_for(self, model, sources: int, beams: int) -> StepFunctions:
        """The compiled parts of a model for a batch of one source or several, with so many beams each.

        Raises:
            OtherLoop: there are none.
        """
        config, rows = model.get_decoder().config, sources * beams
        if config.num_experts and rows > 1:  # rows that share an expert multiply by it together
            raise OtherLoop("a model with experts has more than one row to write")
        is_low = config.linear_bits is not None
        if is_low and (rows > MOST_ROWS or model.dtype is torch.float64):
            raise OtherLoop(f"a model with 4-bit weights has more than {MOST_ROWS} rows to write, or is in float64")
        # 4-bit weights have no other matmul than loops.
        is_few = sources == 1 or (rows <= MOST_ROWS and (beams == 1 or is_low))
        kind = (sources if is_few else None, beams)
        functions = self._functions.get(kind)
        if functions is None or functions.dtype is not model.dtype:
            functions = self._functions[kind] = self._new_functions(model, *kind)
        if functions.has_failed:
            raise OtherLoop(NO_CODE)
        self.refresh(model)
        return functions

    def _new_functions(self, model, sources: int | None, beams: int) -> StepFunctions:
        rows = None if sources is None else sources * beams
        copied = StepLayers(None if (rows or 0) > MOST_ROWS else rows, model.dtype, self._copies_of(model))
        functions = StepFunctions(model, beams, rows, copied=copied, device="cpu")
        if not has_compiler():
            fix = "install g++ or clang++, or set CXX"
            logger.warning_once(f"found no C++ compiler, so the model runs uncompiled: {fix}.")
            functions.has_failed = True
        return functions


class CapturedSteps:
    """The step of a model on a GPU, which captures it: one for every kind of batch, with joined matmuls."""

    by_graphs = True

    def __init__(self) -> None:
        self._functions: StepFunctions | None = None
        self._joined: dict[nn.Module, nn.Module] = {}
        self._captured_at: list[tuple[int, int]] = []

    def functions_for(self, model, sources: int, beams: int) -> StepFunctions:
        """The parts of the step of a model, for any batch. A graph reads whole buffers, and a row for each beam.

        Raises:
            OtherLoop: they could not be compiled.
        """
        if self._functions is None:
            self._joined = joined = join(model.get_decoder().layers)

            def copied(module: nn.Module) -> nn.Module:
                return copy.copy(joined.get(module, module))

            device = None if model.device.type == "cpu" else "cuda"  # a CPU runs them as they are
            self._functions = StepFunctions(model, copied=copied, device=device)
            self._functions.cut = []
            self._captured_at = _addresses(model)
        if self._functions.has_failed:
            raise OtherLoop(NO_CODE)
        return self._functions

    def has_moved(self, model) -> bool:
        """Whether a weight no longer lies where the graphs read it."""
        return self._functions is not None and self._captured_at != _addresses(model)

    @torch.no_grad()
    def undo(self) -> None:
        """Give each joined layer its own memory again."""
        for layer in self._joined:
            for tensor in layer.parameters(recurse=False):
                tensor.data = tensor.data.clone()
        self._functions, self._joined = None, {}


def _addresses(model) -> list[tuple[int, int]]:
    """Which tensors the weights are, and where; a quantized one, whose numbers are in other tensors, is at 0."""
    return [(id(tensor), tensor.data_ptr()) for tensor in (*model.parameters(), *model.buffers())]


class PartOfProduct(nn.Module):
    """Some outputs of a joined product: states [..., I] -> [..., end - start].

    Each part names the whole product, which the compiler computes once: see `compiler.without_repeats`.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, start: int, end: int):
        super().__init__()
        self.weight, self.bias, self.start, self.end = weight, bias, start, end

    def forward(self, states):
        """The product, cut."""
        return F.linear(states, self.weight, self.bias)[..., self.start : self.end]


def join(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Join linear layers that read the same states into one matrix: queries, keys and values; gate and up.

    The plain weights become views of the joined matrix. So nothing is held twice, a state dict stays as it is, and what
    writes to a plain weight writes to the joined one.

    Returns:
        Each layer that is joined, and the part of the product that takes its place.
    """
    parts: dict[nn.Module, nn.Module] = {}
    joined: set[nn.Parameter] = set()
    for parent in module.modules():
        for names in _GROUPS:
            layers: list[Any] = [parent._modules.get(name) for name in names]
            if not _can_join(layers):
                continue
            own = {tensor for layer in layers for tensor in layer.parameters()}
            if own & joined:  # a weight that several layers share can be a view of only one matrix
                continue
            joined |= own
            weight = _in_one([layer.weight for layer in layers])
            biases = [layer.bias for layer in layers if layer.bias is not None]
            bias = _in_one(biases) if biases else None
            ends = itertools.accumulate(layer.out_features for layer in layers)
            for layer, end in zip(layers, ends, strict=True):
                parts[layer] = PartOfProduct(weight, bias, end - layer.out_features, end)
    return parts


@torch.no_grad()
def _in_one(tensors) -> nn.Parameter:
    """One tensor of these, which become views of it."""
    with torch.inference_mode(False):
        whole = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.data = part
    return nn.Parameter(whole, requires_grad=False)


def _can_join(layers: list) -> bool:
    """Whether layers are plain, all different objects, and differ in nothing except their outputs."""
    if not all(
        type(layer) is nn.Linear and is_bare(layer) and not hasattr(layer, "parametrizations") for layer in layers
    ):
        return False
    weights = [layer.weight for layer in layers]
    kinds = {(type(weight), weight.dtype, weight.device, weight.shape[1]) for weight in weights}
    has_bias = {layer.bias is None for layer in layers}
    return (
        len({*map(id, weights)}) == len(weights)
        and len(kinds) == 1
        and len(has_bias) == 1
        and kinds.pop()[0] is nn.Parameter
    )


def uncompiled_field(config) -> str | None:
    """A field that no compiled step knows, since layers differ by it or read more than their buffers, or None."""
    named = next((name for name in (*VARIED, *OF_LAYERS, "merged_attention") if getattr(config, name, None)), None)
    return "layer_types" if named is None and hasattr(config, OF_HYBRID) else named


def can_compile(model) -> bool:
    """Whether the model writes text, so that it has a step."""
    is_writer = isinstance(model, BlockformerDecoderForCausalLM | BlockformerEncoderDecoderForConditionalGeneration)
    return is_writer and not getattr(model.config, "bidirectional", False)
