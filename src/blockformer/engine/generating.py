"""Faster products of a model as loaded while it generates; before and afterwards its layers are plain ones."""

import functools
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..modeling_decoder import BlockformerDecoderForCausalLM
from ..modeling_encoder_decoder import BlockformerEncoderDecoderForConditionalGeneration
from . import in_parts
from .linear import QuickLinear, is_bare, is_plain_linear
from .measure import is_enabled


@contextmanager
def quick_products(model: nn.Module):
    """While it lasts, the model's plain linear layers in float32 on the CPU multiply few rows by the faster product."""
    layers = _layers_of(model)
    for layer in layers:
        layer.__class__ = QuickLinear
        layer.adopt()
    try:
        yield
    finally:
        for layer in layers:
            if type(layer) is QuickLinear:  # or somebody has prepared the model meanwhile
                vars(layer).pop("_least_states", None)
                layer.__class__ = nn.Linear  # type: ignore[assignment]


def _layers_of(model) -> list[Any]:
    """The layers that gain; none of a model that is compiled as a whole, which would be traced anew."""
    is_plain = model.dtype is torch.float32 and model.device.type == "cpu" and is_enabled() and is_bare(model)
    if not is_plain or any(map(_is_compiled, model.modules())):
        return []
    layers = [module for module in model.modules() if is_plain_linear(module) and _is_large(module.weight)]
    return layers if layers and in_parts.is_quicker_for(1) else []


def _is_large(weight) -> bool:
    is_float = weight.dtype is torch.float32 and weight.device.type == "cpu"
    return is_float and weight.numel() >= in_parts.LEAST_WEIGHTS


def _is_compiled(module) -> bool:
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


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
