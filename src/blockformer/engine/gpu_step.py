"""A step on a GPU: functions that it captures, with joined matmuls.

I inputs and O outputs of a linear layer.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from ..watched import is_bare, unknown_code
from .choices import OtherLoop
from .compiler import compiled
from .search import choose
from .step_functions import StepFunctions

# Names of sibling layers with the same input.
_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    tuple(f"in_proj_{part}" for part in "qkvzba"),
    tuple(f"in_proj_{part}" for part in ("z", "v", "k", "q", "dt")),
)


class GPUStep(StepFunctions):
    """A step for a GPU, which captures it. A graph reads whole buffers, and a row for each beam.

    Args:
        model: a decoder with a language model head, or an encoder-decoder.
        is_compiled: whether the parts are compiled; a CPU runs them as they are.
    """

    def __init__(self, model, is_compiled: bool):
        if (unknown := unknown_code(model)) is not None:
            raise OtherLoop(f"the model contains code of another package: {unknown}")
        stack = model.get_decoder()
        if stack.passes > 1:
            raise OtherLoop("layers share their weights")
        self._joined = join(stack.layers)
        in_place: dict[nn.Module, nn.Module] = {
            layer: part for product in self._joined for layer, part in zip(product.layers, product.parts(), strict=True)
        }

        def copied(module: nn.Module) -> nn.Module:
            return copy.copy(in_place.get(module, module))

        device = "cuda" if is_compiled else None
        super().__init__(model, written=1, copied=copied, device=device)
        self.choose = choose if device is None else compiled(choose, device)
        self._model, self.cut = model, []
        self._captured_at = self._addresses()

    def are_current(self) -> bool:
        """Whether every weight still lies where the graphs read it."""
        return self._captured_at == self._addresses()

    def undo(self) -> None:
        """Take the joined products apart."""
        for product in self._joined:
            product.undo()

    def _addresses(self) -> list[tuple[int, int]]:
        """Which tensors the weights are, and where; a quantized one, whose numbers are in other tensors, is at 0."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        return [(id(tensor), tensor.data_ptr()) for tensor in tensors]


class JoinedProduct:
    """Linear layers that read the same states as one matrix: queries, keys and values; gate and up.

    The plain weights become views of the joined matrix. So nothing is held twice, a state dict stays as it is, and what
    writes to a plain weight writes to the joined one.

    Args:
        layers: plain layers of as many inputs, each with a bias or none of them.
    """

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        self.weight = self._joined([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = self._joined(biases) if biases else None

    @staticmethod
    @torch.no_grad()
    def _joined(tensors) -> nn.Parameter:
        """One tensor of these, which become views of it."""
        with torch.inference_mode(False):
            whole = torch.cat([tensor.detach() for tensor in tensors])
            for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
                tensor.data = part
        return nn.Parameter(whole, requires_grad=False)

    def parts(self) -> list[nn.Module]:
        """A module in place of each layer."""
        ends = torch.tensor([layer.out_features for layer in self.layers]).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        return [PartOfProduct(self.weight, self.bias, start, end) for start, end in zip(starts, ends, strict=True)]

    @torch.no_grad()
    def undo(self) -> None:
        """Give each layer memory of its own again."""
        for layer in self.layers:
            for tensor in (layer.weight, layer.bias):
                if tensor is not None:
                    tensor.data = tensor.data.clone()


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


def join(module: nn.Module) -> list[JoinedProduct]:
    """Join what can be in a module: the joined products, in the order of the modules that hold them."""
    joined = []
    for parent in module.modules():
        for names in _GROUPS:
            layers = [parent._modules.get(name) for name in names]
            if _can_join(layers):
                joined.append(JoinedProduct(layers))  # type: ignore[arg-type]
    return joined


def _can_join(layers: list) -> bool:
    """Whether layers are plain, different, and alike but for their outputs."""
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
