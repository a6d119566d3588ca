"""One model made into another: fewer layers, fewer key/value heads, experts, another topology.

A topology is a setting here, so most weights of one fit another. The result is a starting point for
training, not a finished model; `reshape` says for each change what it keeps.

B batch, T length, C hidden size, H heads, K key/value heads, D head size, E experts, I inner width.
"""

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .declared_fields import axes_of, other_entries, own_fields
from .model import modeling_decoder, modeling_encoder, modeling_encoder_decoder
from .model.axes import BLOCKS, axes, did_you_mean, is_integer
from .model.configuration_blockformer import BlockformerConfig

TOPOLOGIES = {
    "decoder": (modeling_decoder, "BlockformerDecoder", "ForCausalLM"),
    "encoder": (modeling_encoder, "BlockformerEncoder", "ForMaskedLM"),
    "encoder-decoder": (modeling_encoder_decoder, "BlockformerEncoderDecoder", "ForConditionalGeneration"),
}
BY_LAYER = ("layer_types", "rope_layers", "mlp_layer_types", "mlp_layers", "intermediate_sizes")
"""Fields that have an entry for each layer."""
_WRITERS = tuple(head for _, _, head in TOPOLOGIES.values())
_LAYER = re.compile(r"^((?:model\.)?(?:encoder\.|decoder\.)?layers\.)(\d+)(\..*)$")

Weights = dict[str, Tensor]
Settings = dict[str, Any]


@torch.no_grad()
def reshape(
    model: PreTrainedModel,
    *,
    topology: str | None = None,
    layers: Sequence[int] | None = None,
    kv_heads: int | None = None,
    experts: int | None = None,
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """A new model with the weights of another one, in another shape. It needs training.

    - `layers` keeps some layers, in the order given; a layer that is named twice is repeated.
    - `kv_heads` replaces key and value heads by the means of groups of them (Ainslie et al., 2023).
    - `experts` copies each feed-forward network into that many experts with a random router (sparse upcycling,
      Komatsuzaki et al., 2023). The scores of a token's experts sum to 1, so the model computes the same as before.
    - `topology="encoder"` lets a decoder's tokens see the whole text (as LLM2Vec does, BehnamGhader et al., 2024); the
      language model head fills in masks. `"decoder"` is the way back.
    - `topology="encoder-decoder"` copies the stack into both, and self-attention into cross-attention (T5Gemma, Zhang
      et al., 2025).

    Args:
        model: an encoder or decoder of Blockformer, bare or with a language model head; it is not changed.
        topology: a key of `TOPOLOGIES`; None keeps it.
        layers: indices of layers.
        kv_heads: key/value heads K, a divisor of the present number.
        experts: experts E of each layer.
        seed: for the routers.
        changes: further fields of the config to change, such as `decoder_start_token_id` or `sliding_window=None`.

    Returns:
        The new model, in evaluation mode, with the dtype and the tied matrices of the old one.

    Raises:
        ValueError: the model has a task's head, or 4-bit weights; a number does not fit; or the new config is refused.

    Examples:
        >>> small = reshape(model, layers=[0, 2, 4, 6])  # doctest: +SKIP
    """
    config = model.config
    kind = config.model_type.removeprefix("blockformer_").replace("_", "-")
    head = type(model).__name__.removeprefix(TOPOLOGIES[kind][1]) if kind in TOPOLOGIES else ""
    if kind == "encoder-decoder" or head not in (*_WRITERS, "Model"):
        fix = "use an encoder or decoder of Blockformer, bare or with a language model head"
        raise ValueError(f"{type(model).__name__} cannot be reshaped: {fix}.")
    if config.pruned_heads and (kv_heads is not None or topology == "encoder-decoder"):
        what = "kv_heads" if kv_heads is not None else "topology='encoder-decoder'"
        raise ValueError(f"{what} is not supported with pruned heads: reshape blockformer.restore_heads(model).")
    if getattr(config, "linear_bits", None) is not None:
        fix = "convert the checkpoint with dequantize (--dequantize bfloat16) first"
        raise ValueError(f"4-bit weights cannot be reshaped: {fix}.")
    check_changes(changes, "reshape", ("topology", "layers", "kv_heads", "experts", "seed"))
    count = changes.get("num_hidden_layers", config.num_hidden_layers)
    if count != config.num_hidden_layers and not getattr(config, "num_hidden_groups", None):
        fix = "name the layers to keep, as in layers=[0, 2, 4]"
        raise ValueError(f"num_hidden_layers={count} does not say which: {fix}.")
    if topology is not None and topology not in TOPOLOGIES:
        raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, not {topology!r}.")
    _check_numbers(layers, kv_heads=kv_heads, experts=experts)
    settings: Settings = {name: getattr(config, name) for name in axes_of(config)}
    if topology not in (None, "decoder"):
        settings.pop("bidirectional", None)  # an encoder sees both ways, and the decoder next to one only back
    weights: Weights = dict(model.state_dict())
    if absent := [name for name, tensor in weights.items() if tensor.is_meta]:
        fix = "load the whole model into memory, without a device_map that offloads"
        raise ValueError(f"{absent[0]} is not in memory, so the model cannot be reshaped: {fix}.")
    if layers is not None:
        weights = _keep_layers(settings, weights, layers)
    if kv_heads is not None:
        weights = _pool_heads(settings, weights, kv_heads)
    if experts is not None:
        weights = _copy_into_experts(settings, weights, experts, seed)
    module, prefix, writer = TOPOLOGIES[topology or kind]
    if topology == "encoder-decoder":
        weights = _in_two_stacks(settings, weights)
    new_class = getattr(module, prefix + ("Model" if head == "Model" else writer))
    new_config = _config_of(new_class.config_class, settings | changes, set(changes))
    for name, value in other_entries(config).items():
        setattr(new_config, name, value)
    with torch.device("meta"):
        wanted = new_class(new_config).state_dict()
    if lost := sorted(name for name in wanted if name not in weights):
        raise ValueError(f"the new model needs a weight {lost[0]} that the old one lacks: change the settings given.")
    shapes = {name: (list(tensor.shape), list(weights[name].shape)) for name, tensor in wanted.items()}
    if other := [(name, new, old) for name, (new, old) in shapes.items() if new != old]:
        name, new, old = other[0]
        fix = "reshape changes sizes by layers, kv_heads and experts only"
        raise ValueError(f"the new model's {name} is {new}, the old one's {old}: {fix}.")
    spare = {name for name in weights if name not in wanted}
    if lost := sorted(name for name in spare if topology != "encoder-decoder" or ".cross_attn" not in name):
        raise ValueError(f"the new model has no place for {lost[0]} of the old one: change the settings given.")
    weights = {name: tensor.clone() for name, tensor in weights.items() if name not in spare}
    if new_config.tie_word_embeddings and not config.tie_word_embeddings and "lm_head.weight" in weights:
        raise ValueError("tie_word_embeddings=True would drop one of two matrices that differ: leave it out.")
    made = new_class.from_pretrained(None, config=new_config, state_dict=weights, dtype=model.dtype)
    if made.can_generate() and model.can_generate():
        made.generation_config = copy.deepcopy(model.generation_config)
        made.generation_config.decoder_start_token_id = getattr(new_config, "decoder_start_token_id", None)
    made.config.name_or_path = config.name_or_path
    return made.eval()


def check_changes(names: Iterable[str], function: str, options: Iterable[str]) -> None:
    """Refuse names that are not a field of any of our configs; the nearest is named, of fields and of `options`.

    Raises:
        ValueError: naming the function and the first such name.
    """
    known = {name for each in TOPOLOGIES.values() for name in _all_axes(each)}
    known |= {name for blocks in BLOCKS.values() for block in blocks.values() for name in block.fields}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, {*known, *options})
            raise ValueError(f"{function} has no option {name!r}, and no config has such a field.{hint}")


def _check_numbers(layers: Any, **numbers: Any) -> None:
    """Refuse `layers` that are not a list of integers, and other numbers that are not positive."""
    if layers is not None and not (isinstance(layers, Sequence) and all(map(is_integer, layers))):
        raise ValueError(f"layers must list integers, not {layers!r}.")
    for name, value in numbers.items():
        if value is not None and not (is_integer(value) and value > 0):
            raise ValueError(f"{name} must be a positive integer, not {value!r}.")


def _config_of(config_class: type[BlockformerConfig], settings: Settings, changed: set[str]) -> BlockformerConfig:
    """A config of these settings, without neutral ones that its topology does not have."""
    known = axes(config_class) | own_fields(settings)
    defaults = {name: axis.default for each in TOPOLOGIES.values() for name, axis in _all_axes(each).items()}
    defaults |= {"router_aux_loss_coef": 0.0}
    # It says what a caller's token types are, which a new topology takes as its own.
    settings = {name: value for name, value in settings.items() if name != "token_types_as_tokens" or name in known}
    for name, value in settings.items():
        if name not in known and (name in changed or value != defaults.get(name)):
            raise ValueError(
                f"{config_class.__name__} has no {name}, and the model has {name}={value!r}: use another topology."
            )
    return config_class(**{name: value for name, value in settings.items() if name in known})


def _all_axes(topology) -> dict:
    module, prefix, _ = topology
    return axes(getattr(module, f"{prefix}Config"))


def _keep_layers(settings: Settings, weights: Weights, layers: Sequence[int]) -> Weights:
    """Renumber the layers that stay; lists of the config that have an entry for each layer follow."""
    count = settings["num_hidden_layers"]
    if settings.get("num_hidden_groups"):
        raise ValueError(
            "layers cannot be chosen in a model whose layers share weights: set num_hidden_layers instead."
        )
    for name in ("num_shared_kv_layers", "hidden_size_per_layer_input"):
        if value := settings.get(name):
            raise ValueError(f"layers cannot be chosen with {name}={value!r}, which ties each to its place: keep them.")
    if not layers or not all(0 <= layer < count for layer in layers):
        raise ValueError(f"layers must list numbers from 0 to {count - 1}, not {list(layers)}.")
    for name, value in settings.items():
        if isinstance(value, list) and name in BY_LAYER:
            settings[name] = [value[layer] for layer in layers]
    if pruned := settings["pruned_heads"]:
        settings["pruned_heads"] = {place: pruned[layer] for place, layer in enumerate(layers) if layer in pruned}
    settings["num_hidden_layers"] = len(layers)
    types, rope = set(settings["layer_types"]), settings.get("rope_parameters") or {}
    if "rope_type" not in rope and rope:
        settings["rope_parameters"] = {name: value for name, value in rope.items() if name in types}
    if "sliding_attention" not in types:
        settings["sliding_window"] = None
    made = {name: tensor for name, tensor in weights.items() if not _LAYER.match(name)}
    for name, tensor in weights.items():
        if match := _LAYER.match(name):
            root, number, rest = match.groups()
            places = [place for place, layer in enumerate(layers) if layer == int(number)]
            made |= {f"{root}{place}{rest}": tensor for place in places}
    return made


def _pool_heads(settings: Settings, weights: Weights, kv_heads: int) -> Weights:
    """Keys and values [K * D, ...] -> [N * D, ...], each head the mean of those whose place it takes."""
    before, size = settings["num_key_value_heads"], settings["head_dim"]
    if by_type := settings.get("attention_by_type"):
        raise ValueError(f"kv_heads is not supported with attention_by_type={by_type!r}: leave it out.")
    if kv_heads < 1 or before % kv_heads:
        fitting = ", ".join(str(number) for number in range(1, before + 1) if before % number == 0)
        raise ValueError(f"kv_heads={kv_heads} must divide the model's {before} key/value heads: use one of {fitting}.")
    settings["num_key_value_heads"] = kv_heads

    def pooled(tensor: Tensor) -> Tensor:
        groups = tensor.float().unflatten(0, (kv_heads, before // kv_heads, -1))  # [N, K / N, D, ...]
        return groups.mean(1).flatten(0, 1).to(tensor.dtype)

    made = dict(weights)
    for name, tensor in weights.items():
        parts = name.split(".")
        if parts[-2] in ("k_proj", "v_proj"):
            made[name] = pooled(tensor)
        elif parts[-2] == "k_norm" and tensor.numel() == before * size != size:
            made[name] = pooled(tensor.flatten()).view(-1, *tensor.shape[1:])
    return made


def _copy_into_experts(settings: Settings, weights: Weights, experts: int, seed: int) -> Weights:
    """Each gated feed-forward network as E experts: gate and up in one, [E, 2 I, C], down [E, C, I], router [E, C]."""
    if settings.get("num_experts"):
        raise ValueError(f"the model already has experts ({settings['num_experts']} in a layer): leave experts out.")
    if settings["mlp_type"]:
        what = f"the model's are a block from outside (mlp_type={settings['mlp_type']!r})"
        raise ValueError(f"experts can only be copied from the usual feed-forward networks; {what}: leave experts out.")
    if settings["mlp_bias"] or not settings["gated_mlp"]:
        raise ValueError(
            "experts can only be copied from gated feed-forward networks without biases; the model has "
            f"gated_mlp={settings['gated_mlp']} and mlp_bias={settings['mlp_bias']}."
        )
    generator = torch.Generator().manual_seed(seed)
    width = settings["hidden_size"]
    std = settings["initializer_range"] or width**-0.5
    settings |= {"num_experts": experts, "moe_intermediate_size": settings["intermediate_size"], "norm_topk_prob": True}
    settings |= {"num_experts_per_tok": min(2, experts), "router_aux_loss_coef": None}
    made = {name: tensor for name, tensor in weights.items() if ".mlp." not in name}
    for name, down in weights.items():
        if not name.endswith(".mlp.down_proj.weight"):
            continue
        mlp = name.removesuffix("down_proj.weight")
        gate_up = torch.cat([weights[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")])
        made[f"{mlp}experts.gate_up_proj"] = gate_up.repeat(experts, 1, 1)
        made[f"{mlp}experts.down_proj"] = down.repeat(experts, 1, 1)
        router = torch.randn(experts, width, generator=generator) * std
        made[f"{mlp}gate.weight"] = router.to(down)
    return made


def _in_two_stacks(settings: Settings, weights: Weights) -> Weights:
    """The stack as encoder and as decoder, whose cross-attention begins as its self-attention."""
    settings["decoder_layers"] = settings["num_hidden_layers"]
    if settings.pop("add_cross_attention", False):
        raise ValueError("the decoder already has cross-attention: an encoder-decoder needs one without.")
    if settings["sliding_window"] is None:
        del settings["layer_types"]
    if settings.get("decoder_start_token_id") is None:
        settings["decoder_start_token_id"] = settings["bos_token_id"] if settings["bos_token_id"] is not None else 0
    made: Weights = {}
    for name, tensor in weights.items():
        root = "model." if name.startswith("model.") else ""
        inner = name.removeprefix(root)
        if root == "" and inner.split(".")[0] in ("lm_head", "lm_head_transform", "logits_bias"):
            made[name] = tensor
            continue
        for stack in ("encoder", "decoder"):
            made[f"{root}{stack}.{inner}"] = tensor
        if ".self_attn" in inner:
            made[f"{root}decoder.{inner.replace('.self_attn', '.cross_attn')}"] = tensor
    return made
