"""Matrix products that read the same states, as one: queries, keys and values; gate and up; what a state is made from.

The plain weights become views of the joined matrix. So nothing is held twice, a state dict stays as it is, and what
writes to a plain weight writes to the joined one.

I inputs and O outputs of a linear layer.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..watched import is_bare

# Names of sibling layers with the same input.
_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    tuple(f"in_proj_{part}" for part in "qkvzba"),
    tuple(f"in_proj_{part}" for part in ("z", "v", "k", "q", "dt")),
)


class JoinedProduct:
    """Some linear layers as one matrix.

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
