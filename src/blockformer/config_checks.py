"""What a config refuses that no part of the model declares: unknown names, tokens, dtypes, sizes."""

from dataclasses import fields

from .axes import check_choice, did_you_mean, is_integer
from .compat import generation_field_names

DTYPES = ("float32", "float16", "bfloat16", "float64")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
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
    known = {field.name for field in fields(config_class)} | _INHERITED_ARGUMENTS
    allowed = known | generation_field_names()
    for name in names:
        if name not in allowed and not name.startswith("_"):
            raise ValueError(f"{config_class.__name__} has no field '{name}'.{did_you_mean(name, known)}")


def check_tokens(config) -> None:
    """Special tokens are tokens of the vocabulary that they stand in."""
    target_size = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    either_size = max(config.vocab_size, target_size)
    sizes = {"pad_token_id": either_size, "bos_token_id": either_size, "eos_token_id": either_size}
    for name, size in {**sizes, "decoder_start_token_id": target_size}.items():
        value = getattr(config, name, None)
        for token in value if name == "eos_token_id" and isinstance(value, list | tuple) else [value]:
            if token is not None and not (is_integer(token) and 0 <= token < size):
                raise ValueError(f"{name} must be a token from 0 to {size - 1}, not {token!r}.")


def check_kinds(dtype, problem_type) -> None:
    """Check what the base class takes as it comes: `dtype`, a name or a torch.dtype, and `problem_type`."""
    if dtype is not None:
        check_choice("dtype", str(dtype).removeprefix("torch."), DTYPES)
    if problem_type is not None:
        check_choice("problem_type", problem_type, PROBLEM_TYPES)


def check_sizes(num_parameters: int, num_layers: int, num_labels: int | None) -> None:
    """Refuse sizes that no machine holds; a model that does not fit this one may still be inspected or offloaded.

    Layers and labels have bounds of their own: the library makes lists and dicts of them at once.
    """
    if num_labels is not None and not (is_integer(num_labels) and num_labels > 0):
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
