"""The fields of a config and of its blocks from outside, and which of them need others.

Only `inspect`, its page and presets ask which field needs which, so that a published repo does not carry the answer.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .model.awq_linear import LinearFields
from .model.axes import BLOCKS, Axis, axes, blocks_of
from .model.experts import ExpertsFields
from .model.latent_attention import OF_LATENTS
from .model.multi_token import MultiTokenFields
from .model.positions import LEARNED, RELATIVE_BIAS, SINUSOIDAL
from .model.relative_bias import RelativeBiasFields
from .model.token_inputs import OF_LAYERS
from .model.varied_attention import VARIED

_OFF_BY_NONE = (
    *(*BLOCKS, *OF_LAYERS, *VARIED),
    *("num_hidden_groups", "token_embedding_size", "final_projection_size", "query_growth", "frequency_dtype"),
    *("merged_attention", "centered_window", "unscaled_token_id"),
)
NEEDS: tuple[tuple[Iterable[str], str, Collection[str]], ...] = (
    *(((name,), name, ()) for name in _OFF_BY_NONE),
    (axes(ExpertsFields), "num_experts", ()),
    (("token_input_table",), "hidden_size_per_layer_input", ()),
    (("shared_expert_gate",), "shared_expert_intermediate_size", ()),
    (("num_expert_groups_per_tok", "experts_per_group_score"), "num_expert_groups", ()),
    (("kv_lora_rank", *OF_LATENTS), "kv_lora_rank", ()),
    (axes(LinearFields), "linear_bits", ()),
    (axes(MultiTokenFields), "num_nextn_predict_layers", ()),
    (("sliding_window", "decoder_layer_types", "centered_window"), "sliding_window", ()),
    (axes(RelativeBiasFields), "position_type", (*RELATIVE_BIAS, "disentangled")),
    (("relative_bias_per_layer",), "position_type", RELATIVE_BIAS),
    (("rope_parameters", "rope_layers"), "position_type", ("rotary",)),
    (("token_dropout", "mask_token_id"), "token_dropout", ()),
    (("scales_in_embedding",), "embedding_scale", ()),
    (("position_offset", "padding_position"), "position_type", (*LEARNED, *SINUSOIDAL)),
    (("first_attention_norm",), "norm_placement", ("pre",)),
    (("first_attention_norm",), "residual", ("sequential",)),
    (("norm_bias",), "norm_type", ("layer_norm",)),
)
"""Fields, the field without which they have no effect, and its values: where none are listed, all that are true."""


def is_idle(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a field has no effect next to the others.

    Args:
        name: the field.
        settings: fields and their values, such as `vars` of a config; fields that are not there are off.
    """
    if name == "layer_types":
        return not settings.get("sliding_window") and not has_states(settings)
    return any(not is_set(settings, other, values) for names, other, values in NEEDS if name in names)


def is_set(settings: Mapping[str, Any], name: str, values: Collection[str]) -> bool:
    """Whether a field has, or lists, one of some values or, where none are listed, any that is true."""
    value = settings.get(name)
    return any(each in values for each in (value if isinstance(value, list) else [value])) if values else bool(value)


def layer_types_of(settings: Mapping[str, Any]) -> list[str]:
    """The layer types of settings, in which they may be a function of all; empty where nothing says them."""
    types = settings.get("layer_types")
    return (types(settings) if callable(types) else types) or []


def has_states(settings: Mapping[str, Any]) -> bool:
    """Whether settings have layers that keep a state."""
    return not BLOCKS["layer_types"].keys().isdisjoint(layer_types_of(settings))


def _are_ours(is_ours: bool) -> list:
    folder = Path(axes.__code__.co_filename).parent
    blocks = (block for known in [*BLOCKS.values()] for block in [*known.values()])
    return [block for block in blocks if (block.path.parent == folder) is is_ours]


def from_outside() -> list:
    """The registered blocks whose files are not this package's."""
    return _are_ours(False)


def of_the_package() -> list:
    """Blocks whose files are the package's: parts of the model that only some repos carry."""
    return _are_ours(True)


def own_fields(settings: Mapping[str, Any]) -> dict[str, Axis]:
    """The fields of the blocks that some settings name, of which some may be functions of all."""
    values = {axis: settings.get(axis) for axis in BLOCKS}
    named = SimpleNamespace(**{axis: value(settings) if callable(value) else value for axis, value in values.items()})
    return {name: each for block in blocks_of(named) for name, each in block.fields.items()}


def axes_of(config) -> dict[str, Axis]:
    """Every declared field of a config and of its blocks, by name."""
    return axes(type(config)) | own_fields(vars(config))


def other_entries(config) -> dict[str, Any]:
    """The entries of a config that are not its fields and that other libraries read, by name."""
    entries = config.to_dict()
    return {name: entries[name] for name in entries["other_entries"] or ()}
