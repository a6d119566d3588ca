"""Layers and models with 4-bit weights, each beside the plain one that they mean."""

import pairs
import torch
from awq_layout import state_of, tensors

from blockformer.engine.linear import PreparedQuantizedLinear
from blockformer.model.awq_linear import QuantizedLinear

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def layer_of(outputs, inputs, group, bias=False, seed=0):
    """A layer, and its plain twin in float32."""
    torch.manual_seed(seed)
    plain = torch.nn.Linear(inputs, outputs, bias=bias)
    parts, meant = tensors(torch.randn(outputs, inputs), group)
    layer = QuantizedLinear(inputs, outputs, bias, group)
    layer.load_state_dict({**parts, **({"bias": plain.bias} if bias else {})})
    with torch.no_grad():
        plain.weight.copy_(meant)
    return layer, plain


def pair(family="qwen3", **settings):
    """A model with 4-bit weights and the plain one that they mean, both ours."""
    plain = pairs.model(family, **SIZES, **settings)
    low, meant = state_of(plain, 32)
    plain.load_state_dict(meant)
    model = type(plain)(pairs.config(family, **SIZES, **settings, linear_bits=4, linear_group_size=32)).eval()
    model.load_state_dict(low)
    return model, plain


def low_of(model):
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def prepared_of(*arguments, **settings):
    """A prepared layer, and its plain twin in float32."""
    layer, plain = layer_of(*arguments, **settings)
    layer.__class__ = PreparedQuantizedLinear
    return layer, plain


def prepared_pair(family="qwen3", **settings):
    """A prepared model with 4-bit weights and the plain one that they mean, both ours."""
    model, plain = pair(family, **settings)
    return model.prepare_for_inference(), plain
