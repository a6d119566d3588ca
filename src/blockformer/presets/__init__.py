"""Families as settings of the one core: `preset("qwen3", hidden_size=512)` gives a config.

Presets know the config, not the other way round, so they stay out of exported repos.
"""

import difflib

from ..axes import axes
from ..configuration_blockformer import BlockformerConfig
from ..configuration_decoder import BlockformerDecoderConfig
from ..configuration_encoder import BlockformerEncoderConfig
from ..configuration_encoder_decoder import BlockformerEncoderDecoderConfig
from .decoders import DECODERS
from .encoder_decoders import ENCODER_DECODERS
from .encoders import ENCODERS
from .structures import STRUCTURES

__all__ = ["PRESETS", "STRUCTURES", "preset"]

PRESETS: dict[str, tuple[type[BlockformerConfig], dict]] = {
    **{name: (BlockformerDecoderConfig, settings) for name, settings in DECODERS.items()},
    **{name: (BlockformerEncoderConfig, settings) for name, settings in ENCODERS.items()},
    **{name: (BlockformerEncoderDecoderConfig, settings) for name, settings in ENCODER_DECODERS.items()},
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
    config_class, defaults = PRESETS[name]
    settings = {**defaults, **overrides}
    known = {field: each.default for field, each in axes(config_class).items()} | settings
    return config_class(**{key: value(known) if callable(value) else value for key, value in settings.items()})
