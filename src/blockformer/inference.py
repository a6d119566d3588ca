"""Weights in the layout that oneDNN multiplies quickest, for models that only answer and no longer learn.

I inputs and O outputs of a linear layer.
"""

import torch
from torch import nn

from .kernels import best_time, fast_paths_enabled, is_plain_linear


class PackedLinear(nn.Module):
    """`nn.Linear` in bfloat16 on the CPU whose weight lies in oneDNN's own layout, and nowhere else.

    A state dict holds the plain weight, as that of the layer it was made from. It computes no gradients.

    Shapes: [..., I] -> [..., O].
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 1)

    def forward(self, states):
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")

    def unpack(self) -> nn.Linear:
        """The plain layer, bit for bit."""
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
        layer.bias = self.bias
        return layer.train(self.training)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def __reduce__(self):
        # Copied and pickled by the plain weight: the layout belongs to the processor.
        return type(self), (self.unpack(),)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self.packed.to_dense()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs):
        error_msgs.append(
            f"{prefix}weight is prepared for inference: call model.prepare_for_training() before loading."
        )


def check_stays(model: nn.Module, fn) -> None:
    """Refuse, before any of it is changed, to cast or move a model with packed layers.

    Args:
        fn: what `nn.Module._apply` is to do to each tensor.

    Raises:
        RuntimeError: it changes the dtype or the device.
    """
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        changed = fn(torch.empty(0, dtype=torch.bfloat16))
        if changed.dtype is not torch.bfloat16 or changed.device.type != "cpu":
            raise RuntimeError(
                "the model is prepared for inference in bfloat16 on the CPU: call prepare_for_training() before it is "
                "moved or cast."
            )


def pack_linears(model: nn.Module) -> int:
    """Replace each plain bfloat16 linear layer on the CPU by a packed one, one after the other; returns how many.

    Layers with a wrapper, a hook, or a weight that is also an embedding stay as they are, and all of them where the
    processor gains nothing.
    """
    if not fast_paths_enabled() or not _packing_is_quicker():
        return 0
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    count = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and _is_packable(layer) and id(layer.weight) not in shared:
                setattr(parent, name, PackedLinear(layer).train(layer.training))
                count += 1
                del layer
    return count


def unpack_linears(model: nn.Module) -> None:
    """Put plain layers back."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, PackedLinear):
                setattr(parent, name, layer.unpack())


def _is_packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    is_dense = weight.layout is torch.strided and weight.is_contiguous()
    return is_dense and weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and is_plain_linear(layer)


_verdict: list[bool] = []


@torch.no_grad()
def _packing_is_quicker() -> bool:
    """Measured once in a process, in some milliseconds: a product with one row, as in decoding."""
    if not _verdict:
        generator = torch.Generator().manual_seed(0)  # not the global one, by which the user draws
        layer = nn.Linear(1024, 4096, bias=False, device="meta")
        layer.weight = nn.Parameter(torch.randn(4096, 1024, generator=generator).bfloat16())
        states = torch.randn(1, 1024, generator=generator).bfloat16()
        try:
            packed = PackedLinear(layer)
            agrees = torch.allclose(packed(states), layer(states), rtol=0.02, atol=0.02)
            _verdict.append(agrees and best_time(lambda: packed(states)) < 0.9 * best_time(lambda: layer(states)))
        except (AttributeError, RuntimeError, NotImplementedError):
            _verdict.append(False)
    return _verdict[0]
