"""Heads of self-attention taken out for good, which makes their layers narrower, and put back as zeros.

A model without a head computes what it did with that head masked. Michel et al. (2019) find the removable ones by the
gradient of `head_mask`.

H heads, K key/value heads, D head size, C hidden size.
"""

import copy
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .model.configuration_blockformer import BlockformerConfig
from .model.pretrained_model import BlockformerPreTrainedModel

Pruned = dict[int, list[int]]
# What a layer has for each head: rows of projections, norms [H, D] and sinks [H], columns of the output's weight.
_OF_HEADS = re.compile(r"layers\.(\d+)\.self_attn\.(q_proj|k_proj|v_proj|gate_proj|q_norm|k_norm|sinks|o_proj\.weight)")


def prune_heads(model: PreTrainedModel, heads: Mapping[int, Sequence[int]]) -> PreTrainedModel:
    """A new model without some of the heads of self-attention, which is smaller and faster accordingly.

    It computes what the old one does with 0 for these heads in `head_mask`. Heads keep their numbers, also in a
    `head_mask` of the new model, which still has all H columns, and for later pruning. Cross-attention is unchanged.

    Args:
        model: an encoder or a decoder of Blockformer, bare or with any head; it is not changed.
        heads: layer -> its heads to remove, from 0 to H - 1; heads that share a key are removed together, and never
            all. Heads that are pruned already may be among them.

    Returns:
        The new model, in evaluation mode, with the dtype and the device of the old one. Its config has `pruned_heads`.

    Raises:
        TypeError: the model is not one of Blockformer's, or `heads` is not a mapping.
        ValueError: the model does not have these heads, or cannot be pruned: an encoder-decoder, 4-bit weights, a norm
            over all heads, disentangled positions, latent attention, layers that keep a state, and so on.

    Examples:
        >>> smaller = prune_heads(model, {0: [1, 3], 5: [0]})  # doctest: +SKIP
    """
    config = _config_of(model)
    if not isinstance(heads, Mapping):
        raise TypeError(f"heads must map layers to their heads, such as {{0: [1, 3]}}, not {heads!r}.")
    pruned = {layer: set(gone) for layer, gone in (config.pruned_heads or {}).items()}
    for layer, more in heads.items():
        pruned[layer] = pruned.get(layer, set()) | set(more)
    return _with_pruned(model, {layer: sorted(gone) for layer, gone in pruned.items()})


def restore_heads(model: PreTrainedModel) -> PreTrainedModel:
    """A new model with all heads again. Pruned ones have weights of zero, so it computes the same.

    For whatever does not know `pruned_heads`: most official layouts, `blockformer.reshape`, retraining all heads.

    Args:
        model: an encoder or a decoder of Blockformer; it is not changed.

    Returns:
        The new model, in evaluation mode, with the dtype and the device of the old one.

    Raises:
        TypeError: the model is not one of Blockformer's.
    """
    _config_of(model)
    return _with_pruned(model, None)


def _config_of(model) -> BlockformerConfig:
    if not isinstance(model, BlockformerPreTrainedModel):
        raise TypeError(
            f"{type(model).__name__} is not a model of this package: convert it, or import blockformer before loading."
        )
    return model.config


@torch.no_grad()
def _with_pruned(model: PreTrainedModel, pruned: Pruned | None) -> PreTrainedModel:
    """A copy of the model with other `pruned_heads`; the weights of heads that it did not have are zero."""
    before = model.config
    settings = {**before.to_dict(), "pruned_heads": pruned}
    config = type(before).from_dict(settings, attn_implementation=before._attn_implementation)
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if (found := _OF_HEADS.search(name)) and (found[2][1:] != "_norm" or before.qk_norm == "per_head"):
            old, new = (_heads_of(each, int(found[1]), found[2]) for each in (before, config))
            tensor = _placed(tensor, int(found[2] == "o_proj.weight"), old, new)
        weights[name] = tensor.clone()
    made = type(model).from_pretrained(None, config=config, state_dict=weights, dtype=model.dtype)
    if made.can_generate():
        made.generation_config = copy.deepcopy(model.generation_config)
    made.config.name_or_path = before.name_or_path
    return made.to(model.device).eval()


def _heads_of(config: BlockformerConfig, layer: int, name: str) -> list[int]:
    """The numbers of the query heads of a layer or, for what belongs to keys or values, of their groups."""
    group = config.num_attention_heads // config.num_key_value_heads if name[0] in "kv" else 1
    return sorted({head // group for head in config.heads_of(layer)})


def _placed(tensor: Tensor, dim: int, old: list[int], new: list[int]) -> Tensor:
    """The heads `old` along a dimension (of D rows each, or one) -> the heads `new`, zeros where there were none."""
    heads = dict(zip(old, tensor.unflatten(dim, (len(old), -1)).unbind(dim), strict=True))
    zero = torch.zeros_like(next(iter(heads.values())))
    return torch.cat([heads.get(head, zero) for head in new], dim)
