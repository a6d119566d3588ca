"""Sizes that no machine holds, refused when a config is made, before any memory is taken for them.

More is taken for a slip of the keyboard, on every machine alike: several times the largest published models. A repo's
own code has no such bounds, since its config is its author's.
"""

from typing import Any

from .files.config_file import MOST
from .model.axes import is_integer
from .model.runtime import PACKAGE

MOST_NUMBERS = 10**13
_WIDTHS = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("moe_latent_size", "kv_lora_rank", "q_lora_rank"),
)
_TABLES = (
    *("vocab_size", "decoder_vocab_size", "type_vocab_size", "task_type_vocab_size", "max_position_embeddings"),
    *("position_offset", "relative_attention_num_buckets"),
)


def plug_in() -> None:
    """Have this package's configs refuse such sizes."""
    PACKAGE["check_fields"] = _check_fields


def _check_fields(usual, config, kwargs: dict[str, Any]) -> None:
    usual(config, kwargs)
    layers, _ = config.stack_sizes(is_decoder=True)
    check_counts(max(config.num_hidden_layers, layers), kwargs.get("num_labels"))
    _check_sizes(config)


def check_counts(num_layers: int, num_labels: int | None) -> None:
    """Refuse more layers or labels than any model has: the library makes lists and dicts of them at once."""
    if num_labels is not None and not (is_integer(num_labels) and num_labels > 0):
        raise ValueError(f"num_labels must be a positive integer, not {num_labels!r}.")
    for name, count in (("num_hidden_layers", num_layers), ("num_labels", num_labels or 0)):
        if count > MOST[name]:
            raise ValueError(f"{name} ({count}) must be at most {MOST[name]:,}.")


def _check_sizes(config) -> None:
    """Refuse too many parameters, by the longest table of vectors times the widest vector."""
    widths, tables = ([getattr(config, name, 0) or 0 for name in names] for names in (_WIDTHS, _TABLES))
    by_type = getattr(config, "attention_by_type", None)  # of which the config has not looked at the values yet
    layers = [each for each in (by_type.values() if isinstance(by_type, dict) else ()) if isinstance(each, dict)]
    sizes = [config.head_dim, config.v_head_dim, *(each.get("head_dim") for each in layers)]
    heads = config.num_attention_heads * max(size for size in (*sizes, 0) if is_integer(size))
    vectors = (config.hidden_size_per_layer_input or 0) * config.num_hidden_layers
    width = max(*widths, config.inner_width_of(is_causal=True) or 0, heads, vectors)
    deepest = max(config.num_hidden_layers, config.stack_sizes(is_decoder=True)[0])
    numbers = width * max(*tables, deepest * (config.num_experts or 1) * width)
    if numbers > MOST_NUMBERS:
        many = f"{numbers:.1e} parameters, more than {MOST_NUMBERS:.0e}"
        names = "vocab_size, hidden_size, intermediate_size, num_hidden_layers and max_position_embeddings"
        raise ValueError(f"these sizes make {many}: check {names}.")
