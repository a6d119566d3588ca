"""Layers that keep a state: which they are, and their sizes."""

import math
from typing import Any

from blockformer.files.errors import ConversionError

from .base import NotExpressible, Value

SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
FULL, SLIDING, SCAN = "full_attention", "sliding_attention", "state_space"
OF_SCANS = (
    *("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    *("mamba_conv_bias", "mamba_proj_bias"),
)
"""Fields of a selective state space, in most official configs and in ours."""


class StatesByLayer(Value):
    """Some layers keep a state and the others see everything; without any, the sizes say nothing.

    Args:
        kind: the type of those with a state.
        names: their fields, the same in both layouts.
        slides: whether others may have a window.
    """

    def __init__(self, kind: str = "linear_attention", names: tuple[str, ...] = SIZES, slides: bool = False):
        self.kind, self.names = kind, names
        self.others = (FULL, SLIDING) if slides else (FULL,)

    def read(self, official):
        config = official.config
        kinds = list(config.layer_types or [FULL] * config.num_hidden_layers)
        if strange := sorted(set(kinds) - {self.kind, *self.others}):
            raise ConversionError(f"config.json: layer_types names {strange[0]}, which this family does not have")
        window = config.sliding_window if SLIDING in kinds else None
        return {"sliding_window": window, "layer_types": kinds, **self._sizes(config)}

    def write(self, config, head):
        kinds = list(config.layer_types)
        if strange := sorted(set(kinds) - {self.kind, *self.others}):
            raise NotExpressible("layer_types", " and ".join((self.kind, *self.others)), strange[0])
        window = {"sliding_window": config.sliding_window} if SLIDING in kinds else {}
        return {"layer_types": kinds, **window, **self._sizes(config)}

    def _sizes(self, config):
        return {name: getattr(config, name) for name in self.names} if self.kind in (config.layer_types or ()) else {}


def least_step(config) -> float:
    """The least step of a state space, of an official config.

    Raises:
        ConversionError: there is a largest one, too.
    """
    least, most = config.time_step_limit or (0.0, math.inf)
    if most != math.inf:
        raise ConversionError(f"config.json: time_step_limit is {[least, most]}, and steps have no upper bound here")
    return least


class ScansByLayer(Value):
    """Some layers have a selective state space and the others see everything.

    An official class that has `mamba_expand` has heads and sizes whose product is so many times the width.

    Args:
        by_index: whether the official config lists the layers that see everything, in place of each layer's type.
    """

    def __init__(self, by_index: bool = False):
        self.by_index = by_index

    def read(self, official):
        config = official.config
        # Earlier releases have their own names.
        words = {"linear_attention": SCAN, "mamba": SCAN, FULL: FULL, "attention": FULL}
        if strange := sorted(set(config.layer_types) - set(words)):
            raise ConversionError(f"config.json: layer_types names {strange[0]}, which this family does not have")
        kinds = [words[kind] for kind in config.layer_types]
        settings: dict[str, Any] = {"sliding_window": None, "layer_types": kinds}
        if SCAN in kinds:
            settings |= {name: getattr(config, name) for name in OF_SCANS}
            settings |= {"mamba_hidden_act": config.hidden_act, "mamba_step_min": least_step(config)}
        return settings

    def write(self, config, head):
        kinds = list(config.layer_types)
        if strange := sorted(set(kinds) - {SCAN, FULL}):
            raise NotExpressible("layer_types", f"{SCAN} and {FULL}", strange[0])
        if self.by_index:
            entries: dict[str, Any] = {"attn_layer_indices": [at for at, kind in enumerate(kinds) if kind == FULL]}
        else:
            entries = {"layer_types": ["mamba" if kind == SCAN else "attention" for kind in kinds]}
        if SCAN not in kinds:  # the class wants sizes that fit all the same
            return entries | {"mamba_n_heads": 1, "mamba_d_head": "auto"}
        if config.mamba_hidden_act != config.hidden_act:
            raise NotExpressible("mamba_hidden_act", f"hidden_act ({config.hidden_act})", config.mamba_hidden_act)
        size, rest = divmod(config.mamba_n_heads * config.mamba_d_head, config.hidden_size)
        if rest:
            raise NotExpressible(
                "mamba_n_heads", "so many that heads are a multiple of the width", config.mamba_n_heads
            )
        entries |= {name: getattr(config, name) for name in OF_SCANS}
        if config.mamba_step_min:
            entries["time_step_limit"] = [config.mamba_step_min, {"__float__": "Infinity"}]
        return entries | {"mamba_expand": size}
