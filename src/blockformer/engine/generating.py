"""Faster products of a model as loaded while it generates; before and afterwards its layers are plain ones."""

import functools
import threading
import weakref
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..modeling_decoder import BlockformerDecoderForCausalLM
from ..modeling_encoder_decoder import BlockformerEncoderDecoderForConditionalGeneration
from . import in_parts
from .few_rows import MOST_ROWS
from .linear import can_multiply, is_bare, is_plain_linear
from .measure import is_enabled

_thread = threading.local()  # `depth`: how many calls of `generate` this thread is in
_lock = threading.Lock()
_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # for each layer how many calls need it


class GeneratingLinear(nn.Linear):
    """`nn.Linear` that multiplies few rows in parts if this thread generates. A copy of it is a plain layer.

    Shapes: [..., I] -> [..., O].
    """

    _is_quick: tuple[bool, bool] = (False, False)  # with one row, and with some

    def forward(self, input):
        weight: Any = self._parameters["weight"]  # attributes take longer to look up
        rows, bias = input.numel() // self.in_features, self._parameters["bias"]
        is_asked = getattr(_thread, "depth", 0) and 0 < rows <= MOST_ROWS and not torch.is_grad_enabled()
        # Another thread that ends may have made this layer a plain one meanwhile.
        is_quick = is_asked and vars(self).get("_is_quick", GeneratingLinear._is_quick)[rows > 1]
        fits = is_quick and input.shape[-1:] == (self.in_features,) and can_multiply(input, weight)
        return (in_parts.product if fits else F.linear)(input, weight, bias)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_is_quick"}

    def __reduce_ex__(self, protocol):
        reduced: Any = super().__reduce_ex__(protocol)  # what makes the object, its arguments, its state
        return object.__new__, (nn.Linear,), *reduced[2:]


@contextmanager
def quick_products(model: nn.Module):
    """While it lasts, this thread multiplies few rows by the model's large float32 layers on the CPU faster."""
    layers: list[Any] = _layers_of(model)
    _thread.depth = getattr(_thread, "depth", 0) + 1
    counted: list[Any] = []
    try:
        with _lock:
            for layer in layers:
                _users[layer] = _users.get(layer, 0) + 1
                counted.append(layer)
                if type(layer) is nn.Linear:
                    layer.__class__ = GeneratingLinear
                    vars(layer)["_is_quick"] = _verdicts(layer)
        yield
    finally:
        _thread.depth -= 1
        with _lock:
            for layer in counted:
                _users[layer] -= 1
                if not _users[layer]:
                    _be_plain(layer)


def make_plain(model: nn.Module) -> None:
    """Make the layers of a model that generates plain ones, for something else to be made of them."""
    with _lock:
        for module in model.modules():
            _be_plain(module)


def _layers_of(model) -> list[nn.Module]:
    """The layers that gain; none of a model of which somebody compiles a part, which would be traced anew."""
    is_plain = model.dtype is torch.float32 and model.device.type == "cpu" and is_enabled() and is_bare(model)
    if not is_plain or any(map(_is_wrapped, model.modules())):
        return []
    return [module for module in model.modules() if _gains(module)]


def _gains(module) -> bool:
    is_linear = is_plain_linear(module) or (type(module) is GeneratingLinear and is_bare(module))
    if not is_linear or module.weight.dtype is not torch.float32 or module.weight.device.type != "cpu":
        return False
    return module.weight.dim() == 2 and any(_verdicts(module))


def _verdicts(layer) -> tuple[bool, bool]:
    """Whether products of one row, and of some, are quicker in parts. Both are measured before a product runs."""
    one, some = (in_parts.is_quicker_for(rows, *layer.weight.shape) for rows in (1, MOST_ROWS))
    return one, some


def _be_plain(module) -> None:
    if type(module) is GeneratingLinear:
        module.__class__ = nn.Linear  # type: ignore[assignment]
        vars(module).pop("_is_quick", None)


def _is_wrapped(module) -> bool:
    own = vars(module)
    has_forward = "forward" in own and not isinstance(module, nn.Linear)
    return has_forward or "_orig_mod" in module._modules or own.get("_compiled_call_impl") is not None


def plug_in() -> None:
    """Have this package's models that write text do so with faster products."""
    for generating in (BlockformerDecoderForCausalLM, BlockformerEncoderDecoderForConditionalGeneration):
        generating.generate = _quickly(generating.generate)  # type: ignore[method-assign]


def _quickly(generate):
    @functools.wraps(generate)
    def generate_quickly(self, *args, **kwargs):
        with quick_products(self):
            return generate(self, *args, **kwargs)

    return generate_quickly
