"""muP: a learning rate that is best at one width is best at others (Yang et al., 2022, Tensor Programs V).

This is table 3 of the article, which needs nothing of the model but fresh weights of another size and a learning rate
for each group of weights. What the model at its base width has is left as it is; at m times as many inputs

- hidden matrices begin 1/sqrt(m) and heads and routers 1/m as large, and both learn at 1/m of the rate;
- embeddings, biases and norms, and matrices whose inputs do not grow, stay as they are.

Two things do not belong to single weights and are in the config, once. A tied head is an embedding too, so
`logit_scale` is 1/m of the base's (table 8). Where heads become wider rather than more, `attention_scale` falls as
1/head_dim.
"""

import copy
import math
from typing import NamedTuple

import torch
from torch import nn

from ..declared_fields import axes_of, own_fields
from ..model.pretrained_model import BlockformerPreTrainedModel

_WIDTHS = frozenset(
    "hidden_size intermediate_size embedding_size token_embedding_size num_attention_heads num_key_value_heads "
    "head_dim decoder_intermediate_size moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank "
    "v_head_dim linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups hidden_size_per_layer_input moe_latent_size".split()
)
_SHARED = (
    *(".k_proj", ".v_proj", ".k_rope_proj", ".kv_a_proj", ".q_a_proj"),
    *(".in_proj_q", ".in_proj_k", ".in_proj_v", ".in_proj_z", ".to_latent"),
)
_OF_NO_WEIGHT = ("use", "tokens")  # groups of fields; `Trainer` sets some of them
_SCALES = ("embedding_scale", "attention_scale", "logit_scale")


class _Matrix(NamedTuple):
    """A weight's role at the base.

    Attributes:
        growth: inputs of the weight over those at the base.
        factor: by what fresh values are to be multiplied.
        base_shape: outputs and inputs at the base.
    """

    growth: float
    factor: float
    base_shape: tuple[int, int]


def mup_model(model_class: type, config, base):
    """A fresh model of any width to which the learning rates of the base's width apply.

    At the base's width it is `model_class(base)`, weight for weight. Train it with an optimizer that gets the same
    base: `adamw(model, learning_rate, weight_decay, base=base)`.

    Args:
        model_class: one of this package's models.
        config: the model's config. It may differ from the base in widths: `hidden_size`, `intermediate_size`, the
            number and the size of heads, the widths of experts. Its `embedding_scale`, `attention_scale` and
            `logit_scale` are taken from the base, the latter two scaled.
        base: the config of the width at which the learning rate was found.

    Returns:
        The model; its config is a copy.

    Raises:
        ValueError: the configs differ in more than widths.
    """
    _check(config, base)
    config = copy.deepcopy(config)
    for name, value in _scales(config, base).items():
        setattr(config, name, value)
    model = model_class(config)
    with torch.no_grad():
        for weight, matrix in _matrices(model, base).items():
            weight.mul_(matrix.factor)
    return model


def matrices_beside(model: nn.Module, base) -> dict[nn.Parameter, _Matrix]:
    """What each matrix of a model that `mup_model` made is at the base.

    Raises:
        TypeError: the model is not of this package, or is wrapped.
        ValueError: the configs differ in more than widths, or the model's scales do not match the base.
    """
    if not isinstance(model, BlockformerPreTrainedModel):
        raise TypeError(f"base needs a model made by mup_model, not a {type(model).__name__}: leave base out.")
    _check(model.config, base)
    for name, value in _scales(model.config, base).items():
        if getattr(model.config, name) != value:
            fix = "make it with mup_model(model_class, config, base), which sets it"
            raise ValueError(f"{name} is {getattr(model.config, name)}, and must be {value} with this base: {fix}.")
    return _matrices(model, base)


def _check(config, base) -> None:
    if type(config) is not type(base):
        raise ValueError(
            f"the base is a {type(base).__name__}, the model's config a {type(config).__name__}: use the same class."
        )
    fields = {name for name, each in axes_of(config).items() if each.group not in _OF_NO_WEIGHT}
    own = {name for name, each in own_fields(vars(config)).items() if each.group == "size"}
    names = sorted((fields | {"num_labels"}) - _WIDTHS - own - set(_SCALES))
    if others := [name for name in names if getattr(config, name) != getattr(base, name, None)]:
        raise ValueError(
            f"config and base may only differ in widths, and they differ in {', '.join(others)}: make these equal."
        )


def _scales(config, base) -> dict[str, float | None]:
    """The multipliers for a base; unchanged where nothing that they depend on differs."""
    scores, logits = base.attention_scale, base.logit_scale
    if config.head_dim != base.head_dim:
        scores = (base.head_dim**-0.5 if scores is None else scores) * base.head_dim / config.head_dim
    if config.tie_word_embeddings:
        logits = logits * base.token_size / config.token_size  # a head that is tied reads this width
    return dict(zip(_SCALES, (base.embedding_scale, scores, logits), strict=True))


def _matrices(model: nn.Module, base) -> dict[nn.Parameter, _Matrix]:
    with torch.device("meta"):  # only shapes
        narrow = type(model)(copy.deepcopy(base))
    twins, found = dict(narrow.named_modules()), {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() < 2 or "bias" in name:
                continue
            twin = twins[path]
            *_, outputs, inputs = getattr(twin, name).shape
            factor = _deviation(twin, inputs, base) / _deviation(module, weight.shape[-1], model.config)
            if isinstance(module, nn.Embedding):  # its inputs are the tokens; a head that is tied to it is one, too
                found[weight] = _Matrix(1.0, factor, (outputs, inputs))
                continue
            growth = weight.shape[-1] / inputs
            # Keys, values and latent vectors that several heads share are hidden matrices just like separate ones.
            is_hidden = weight.shape[-2] != outputs or path.endswith(_SHARED)
            factor /= math.sqrt(growth) if is_hidden else growth
            found.setdefault(weight, _Matrix(growth, factor, (outputs, inputs)))
    return found


def _deviation(module: nn.Module, inputs: int, config) -> float:
    """The deviation with which `BlockformerPreTrainedModel` draws a matrix."""
    if config.initializer_range is not None:
        return config.initializer_range
    factor = getattr(module, "initializer_factor", 1.0)
    return factor if isinstance(module, nn.Embedding) else factor * inputs**-0.5
