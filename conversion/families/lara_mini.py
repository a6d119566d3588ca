"""Lara Mini (Translated, 2026): Qwen3.5's layers with a state, windows, experts next to one for every token.

Only layers with a window have positions. Files have all that a layer with a state reads in one matrix.
"""

from ..rules.operations import Split
from ..rules.table import Rule
from ..storage.spelling import Parts
from ..values import Computed, StatesByLayer, only_sliding_layers_rotate
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .qwen3_next import SAME, STATE, sizes_of, state_rules
from .shared import ATTENTION, LLAMA, MLP, NORMS, Q_AND_K_NORM
from .with_experts import FINE, SHARED, ExpertNames

PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
"""The types of the released model's layers, again and again."""


def rotating(settings: dict) -> list[bool]:
    """Which layers of a fresh model have positions: the ones with a window, also an only layer."""
    count = settings["num_hidden_layers"]
    return [count == 1 or PATTERN[layer % len(PATTERN)] == "sliding_attention" for layer in range(count)]


def kinds(settings: dict) -> list[str]:
    """The types of a fresh model's layers; without a window the ones that have one see everything."""
    short = "sliding_attention" if settings["sliding_window"] else "full_attention"
    return [short if rotates else PATTERN[layer % len(PATTERN)] for layer, rotates in enumerate(rotating(settings))]


def fused(config) -> list[Rule]:
    """The matrices that a layer with a state reads with, one after the other."""
    keys, values, _ = sizes_of(config)
    steps = getattr(config, "linear_num_value_heads", 0)
    parts = tuple(f"{STATE}.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
    return [Rule(f"{STATE}.in_proj.weight", parts, Split(0, (2 * keys + values, values, steps, steps)))]


FAMILY = Family(
    "lara_mini",
    "LaraMiniForCausalLM LaraMiniModel",
    structure={**LLAMA, "qk_norm": True, "router_float32": True},
    fresh={
        **rotary(10_000.0),
        **FINE,
        "layer_types": kinds,
        "sliding_window": 512,
        "rope_layers": rotating,
        "shared_expert_intermediate_size": 384,
        "tie_word_embeddings": True,
    },
    names=ExpertNames(
        layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM, **SAME},
        sparse=SHARED,
        published=None,
        more_rules=state_rules,
        spellings=[Parts({f"{STATE}.out_norm.": f"{STATE}.norm."})],
        in_files=fused,
    ),
    settings=DecoderSettings(
        window=StatesByLayer(slides=True),
        reads_whole=False,
        without_effect=["intermediate_size"],
        computed=[Computed(only_sliding_layers_rotate)],
    ),
)
