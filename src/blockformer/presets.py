"""Families as settings of the one core: `preset("qwen3", hidden_size=512)` gives a config.

Presets know the config, not the other way round, so they stay out of exported repos.
"""

import difflib

from .configuration_blockformer import BlockformerConfig, BlockformerDecoderConfig

_LLAMA_STYLE = {
    "norm_type": "rms_norm",
    "norm_placement": "pre",
    "position_type": "rotary",
    "gated_mlp": True,
    "hidden_act": "silu",
}

PRESETS: dict[str, tuple[type[BlockformerConfig], dict]] = {
    "qwen3": (
        BlockformerDecoderConfig,
        {**_LLAMA_STYLE, "qk_norm": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    ),
    "qwen2": (
        BlockformerDecoderConfig,
        {
            **_LLAMA_STYLE,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "llama": (
        BlockformerDecoderConfig,
        {**_LLAMA_STYLE, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    ),
    "mistral": (
        BlockformerDecoderConfig,
        {
            **_LLAMA_STYLE,
            "sliding_window": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}


def preset(name: str, **overrides) -> BlockformerConfig:
    """The config of a family, with your own sizes.

    Args:
        name: a key of `PRESETS`.
        overrides: any field of the config.

    Raises:
        ValueError: no such preset (the near one is named), or a field that the config refuses.

    Example:
        >>> preset("qwen3", hidden_size=512, num_key_value_heads=2).qk_norm
        True
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"there is no preset '{name}'; there are {', '.join(sorted(PRESETS))}.{hint}")
    config_class, settings = PRESETS[name]
    return config_class(**{**settings, **overrides})
