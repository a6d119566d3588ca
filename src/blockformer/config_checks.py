"""What a configuration refuses, and in which words. Each check reads the config and raises ValueError or returns."""

import difflib
import json
import sys

from transformers.activations import ACT2FN

from .compat import config_field_names, generation_field_names

LAYER_TYPES = ("full_attention", "sliding_attention")
# Each rotary type of transformers with the parameters that it cannot do without.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
DTYPES = ("float32", "float16", "bfloat16", "float64")
# Other parameters that a rotary type may have: those of which each is a positive number, then the rest.
_ROPE_NUMBERS = (
    "rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings attention_factor beta_fast "
    "beta_slow mscale mscale_all_dim"
).split()
_ROPE_NAMES = (*_ROPE_NUMBERS, "rope_type", "type", "short_factor", "long_factor", "partial_rotary_factor", "truncate")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
CHOICES = {
    "norm_type": ("layer_norm", "rms_norm"),
    "norm_placement": ("pre", "post", "output", "pre_output"),
    "position_type": (
        "learned",
        "sinusoidal",
        "sinusoidal_halves",
        "rotary",
        "relative_bias",
        "relative_key",
        "relative_key_query",
        "none",
    ),
    "hidden_act": tuple(ACT2FN),
}


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return finite and not isinstance(value, bool)


# Fields, whether a value will do, and what to call a value that will.
_VALUE_RULES = (
    (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings relative_attention_max_distance decoder_layers decoder_vocab_size",
        lambda value: _is_integer(value) and 0 < value < 2**63,
        "a positive integer",
    ),
    (
        "position_offset type_vocab_size chunk_size_feed_forward",
        lambda value: _is_integer(value) and value >= 0,
        "an integer of 0 or more",
    ),
    ("linear_bits", lambda value: _is_integer(value) and value == 4, "4, or None for plain weights"),
    ("linear_group_size", lambda value: _is_integer(value) and (value == -1 or value > 0), "a positive integer, or -1"),
    # A window of 1 is full attention in a dynamic cache of the library.
    (
        "relative_attention_num_buckets sliding_window",
        lambda value: _is_integer(value) and 1 < value < 2**63,
        "an integer above 1",
    ),
    (
        "gated_mlp norm_bias qk_norm attention_bias attention_output_bias mlp_bias embedding_norm "
        "final_norm float32_down_proj lm_head_transform add_cross_attention is_decoder is_encoder_decoder use_cache "
        "relative_bias_per_layer share_embeddings decoder_starts_with_last_label tie_word_embeddings",
        lambda value: isinstance(value, bool),
        "true or false",
    ),
    ("lm_head_bias", lambda value: isinstance(value, bool) or value == "fixed", "true, false or 'fixed'"),
    (
        "hidden_dropout attention_dropout activation_dropout classifier_dropout",
        lambda value: _is_number(value) and 0 <= value <= 1,
        "a probability from 0 to 1",
    ),
    (
        "norm_eps initializer_range attention_scale embedding_scale logit_scale",
        lambda value: _is_number(value) and value > 0,
        "a positive number",
    ),
)
_NONE_ALLOWED = frozenset(
    "num_key_value_heads head_dim norm_bias final_norm classifier_dropout sliding_window attention_scale "
    "embedding_scale initializer_range decoder_vocab_size linear_bits".split()
)

# What the base class or the loading code understands beyond the declared fields.
_INHERITED_ARGUMENTS = frozenset(
    "attn_implementation auto_map experts_implementation model_type name_or_path num_labels output_attentions "
    "per_layer_config quantization_config rope_scaling rope_theta tie_last_hidden_states torch_dtype".split()
)

# More is taken for a slip of the keyboard, on every machine alike: several times the largest published models, and
# what their names and lists still take little memory for.
_MOST_PARAMETERS, _MOST_LAYERS, _MOST_LABELS = 10**13, 100_000, 4_000_000


def check_names(config_class, names) -> None:
    """Refuse a field that the config does not have, and name the nearest one that it has."""
    known = config_field_names(config_class) | _INHERITED_ARGUMENTS
    allowed = known | generation_field_names()
    for name in names:
        if name not in allowed and not name.startswith("_"):
            raise ValueError(f"{config_class.__name__} has no field '{name}'.{_did_you_mean(name, known)}")


def check_values(config) -> None:
    """Check each field by itself."""
    fields = config_field_names(type(config))
    for names, is_allowed, wanted in _VALUE_RULES:
        for name in (name for name in names.split() if name in fields):
            value = getattr(config, name)
            if not is_allowed(value) and not (value is None and name in _NONE_ALLOWED):
                raise ValueError(f"{name} must be {wanted}, not {value!r}.")
    for name, choices in CHOICES.items():
        _check_choice(name, getattr(config, name), choices)
    if config.pooler_act is not None:
        _check_choice("pooler_act", config.pooler_act, CHOICES["hidden_act"])
    if config.problem_type is not None:
        _check_choice("problem_type", config.problem_type, PROBLEM_TYPES)
    target_size = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    either_size = max(config.vocab_size, target_size)
    sizes = {"pad_token_id": either_size, "bos_token_id": either_size, "eos_token_id": either_size}
    for name, size in {**sizes, "decoder_start_token_id": target_size}.items():
        value = getattr(config, name, None)
        for token in value if name == "eos_token_id" and isinstance(value, list | tuple) else [value]:
            if token is not None and not (_is_integer(token) and 0 <= token < size):
                raise ValueError(f"{name} must be a token from 0 to {size - 1}, not {token!r}.")


def check_dtype(dtype) -> None:
    """`dtype` is a name such as "bfloat16", a torch.dtype, or None."""
    if dtype is not None:
        _check_choice("dtype", str(dtype).removeprefix("torch."), DTYPES)


def check_rope(config, rope, rope_theta) -> None:
    """Check the parameters of rotary positions, or that there are none where the positions are others."""
    position_type, head_dim = config.position_type, config.head_dim
    if position_type != "rotary":
        if rope or rope_theta is not None:
            name = "rope_parameters" if rope else "rope_theta"
            raise ValueError(
                f"{name} is set but position_type is '{position_type}': drop it, or set position_type='rotary'."
            )
        return
    if not isinstance(rope, dict | None):
        raise ValueError(f"rope_parameters must be a dict, not {rope!r}.")
    rope = rope or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    _check_choice("rope_type", rope_type, ROPE_TYPES)
    for name in ROPE_TYPES[rope_type]:
        if rope.get(name) is None:
            raise ValueError(f"rope_parameters of type '{rope_type}' need '{name}'.")
    for name, value in {"rope_theta": rope_theta, **rope}.items():
        if isinstance(value, dict):
            raise ValueError(f"rope_parameters for '{name}' alone are not supported: give one set for all layers.")
        if name in _ROPE_NUMBERS and value is not None and not (_is_number(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, not {value!r}.")
        if name not in _ROPE_NAMES and (hint := _did_you_mean(name, _ROPE_NAMES, cutoff=0.8)):
            raise ValueError(f"rope_parameters have no '{name}'.{hint}")
    if "high_freq_factor" in ROPE_TYPES[rope_type] and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ValueError("high_freq_factor must be above low_freq_factor: between the two the scaling is blended.")
    if rope_type == "yarn" and (rope.get("rope_theta") or rope_theta or 1e4) <= 1:
        raise ValueError("rope_theta must be above 1 with rope_type 'yarn': it divides by the logarithm.")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported: the rotation covers the whole head; drop it.")
    if head_dim % 2:
        raise ValueError(f"head_dim ({head_dim}) must be even with rotary positions: they rotate pairs.")
    for name in ("short_factor", "long_factor"):
        if rope_type == "longrope":
            factors = rope[name] if isinstance(rope[name], list | tuple) else []
            if len(factors) != head_dim // 2 or not all(_is_number(factor) and factor > 0 for factor in factors):
                raise ValueError(
                    f"{name} must list {head_dim // 2} numbers above 0 (half of head_dim), not {repr(rope[name])[:80]}."
                )


def check_combination(config) -> None:
    """Check the fields, all of them settled, against each other."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads ({config.num_attention_heads}) is not a multiple of num_key_value_heads "
            f"({config.num_key_value_heads}): each key/value head serves the same number of query heads."
        )
    if config.norm_type == "rms_norm" and config.norm_bias:
        raise ValueError("norm_bias=True needs norm_type='layer_norm': an RMS norm has no bias.")
    if config.relative_bias_per_layer and config.position_type != "relative_bias":
        raise ValueError(
            f"relative_bias_per_layer=True with position_type='{config.position_type}': there is no bias; set "
            "position_type='relative_bias'."
        )
    if config.norm_placement == "post" and config.final_norm:
        raise ValueError(
            "final_norm=True with norm_placement='post': each layer already ends in a norm; set final_norm=False."
        )
    if config.is_decoder != type(config).is_decoder:
        raise ValueError(
            f"is_decoder={config.is_decoder} contradicts {type(config).__name__}: a decoder has a "
            "BlockformerDecoderConfig, an encoder a BlockformerEncoderConfig."
        )
    if config.is_encoder_decoder != type(config).is_encoder_decoder:
        raise ValueError(
            f"is_encoder_decoder={config.is_encoder_decoder} contradicts {type(config).__name__}: two stacks have a "
            "BlockformerEncoderDecoderConfig."
        )
    if config.add_cross_attention and not config.is_decoder:
        raise ValueError(
            "add_cross_attention=True needs a decoder, to look at an encoder's states: use BlockformerDecoderConfig."
        )
    if config.pooler_act is not None and config.is_decoder:
        raise ValueError("pooler_act belongs to an encoder: a decoder's first token has seen nothing of the text.")
    if getattr(config, "decoder_vocab_size", None) is not None and config.share_embeddings:
        raise ValueError(
            "decoder_vocab_size is set but share_embeddings is True: a vocabulary of its own needs embeddings of its "
            "own; set share_embeddings=False, or drop decoder_vocab_size."
        )
    _check_layer_types(config)
    if config.position_type == "relative_bias":
        _check_buckets(config)
    if config.linear_bits is not None:
        _check_groups(config)


def _check_groups(config) -> None:
    """The inputs of every linear map of a layer come in whole groups, its outputs in words of 8."""
    group = config.linear_group_size
    heads, key_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    inputs = {"hidden_size": config.hidden_size, "num_attention_heads * head_dim": heads}
    inputs["intermediate_size"] = config.intermediate_size
    for name, size in inputs.items():
        if group != -1 and size % group:
            raise ValueError(f"{name} ({size}) is not a multiple of linear_group_size ({group}): change one of them.")
    for name, size in {**inputs, "num_key_value_heads * head_dim": key_heads}.items():
        if size % 8:
            raise ValueError(f"{name} ({size}) is not a multiple of 8: linear_bits=4 keeps 8 numbers in a word.")
    if config.float32_down_proj:
        raise ValueError("float32_down_proj=True contradicts linear_bits=4: the down projections have 4 bits.")


def _check_buckets(config) -> None:
    """A bidirectional bias halves the buckets, and half of the rest hold one distance each; some must be left."""
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    if not config.is_decoder and buckets < 4:
        raise ValueError(f"relative_attention_num_buckets must be 4 or more in an encoder, not {buckets}.")
    exact = buckets // (2 if config.is_decoder or config.is_encoder_decoder else 4)
    if distance <= exact:
        raise ValueError(
            f"relative_attention_max_distance ({distance}) must be above {exact}, the distances that have a bucket "
            "of their own: raise it, or lower relative_attention_num_buckets."
        )


def check_sizes(num_parameters: int, num_layers: int, num_labels: int | None) -> None:
    """Refuse sizes that no machine holds; a model that does not fit this one may still be inspected or offloaded.

    Layers and labels have bounds of their own: the library makes lists and dicts of them at once.
    """
    if num_labels is not None and not (_is_integer(num_labels) and num_labels > 0):
        raise ValueError(f"num_labels must be a positive integer, not {num_labels!r}.")
    for name, count, most in (
        ("num_hidden_layers", num_layers, _MOST_LAYERS),
        ("num_labels", num_labels or 0, _MOST_LABELS),
    ):
        if count > most:
            raise ValueError(f"{name} ({count}) must be at most {most:,}.")
    if num_parameters > _MOST_PARAMETERS:
        raise ValueError(
            f"these sizes make {num_parameters:.1e} parameters, more than {_MOST_PARAMETERS:.0e}: check vocab_size, "
            "hidden_size, intermediate_size, num_hidden_layers and max_position_embeddings."
        )


def parse_config_json(text: str, source: str) -> dict:
    """Parse a config file strictly.

    Raises:
        ValueError: `source` is no JSON object, has a key twice, or holds NaN or Infinity.
    """

    def refuse_constant(name):
        raise ValueError(f"{source}: {name} is no JSON value; use a number or null.")

    def refuse_duplicates(pairs):
        fields = dict(pairs)
        if len(fields) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{source}: the key {twice!r} stands there twice; keep one.")
        return fields

    try:
        fields = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{source} is no valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{source} must hold a JSON object, not {type(fields).__name__}.")
    return fields


def _check_layer_types(config) -> None:
    layer_types, count = config.layer_types, config.num_hidden_layers
    if not isinstance(layer_types, list) or len(layer_types) != count:
        raise ValueError(f"layer_types must list one type for each of the {count} layers, not {layer_types!r}.")
    for layer_type in layer_types:
        _check_choice("layer_types", layer_type, LAYER_TYPES)
    slides = "sliding_attention" in layer_types
    if slides and config.sliding_window is None:
        raise ValueError("layer_types names 'sliding_attention' but sliding_window is None: set its length in tokens.")
    if config.sliding_window is not None and not slides:
        raise ValueError("sliding_window is set but no layer is of type 'sliding_attention': set layer_types too.")
    if slides and not config.is_decoder:
        kind = "encoder-decoder" if config.is_encoder_decoder else "encoder"
        raise ValueError(f"sliding attention is not supported in an {kind}: a decoder's layers alone look back so far.")
    if slides and config.position_type.startswith("relative"):
        raise ValueError(f"sliding attention is not supported with position_type='{config.position_type}'.")


def _check_choice(name: str, value, choices) -> None:
    if not isinstance(value, str) or value not in choices:
        hint = _did_you_mean(str(value), choices)
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}.{hint}")


def _did_you_mean(name: str, known, cutoff: float = 0.6) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f" Did you mean '{near[0]}'?" if near else ""
