"""Layers that keep a state: which they are, and their sizes."""

from blockformer.files.errors import ConversionError

from .base import NotExpressible

SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
FULL = "full_attention"


class StatesByLayer:
    """Some layers keep a state and the others see everything; without any, the sizes say nothing.

    Args:
        kind: the type of those with a state.
        names: their fields, the same in both layouts.
    """

    def __init__(self, kind: str = "linear_attention", names: tuple[str, ...] = SIZES):
        self.kind, self.names = kind, names

    def read(self, official):
        """See `Value.read`."""
        config = official.config
        kinds = list(config.layer_types or [FULL] * config.num_hidden_layers)
        if strange := sorted(set(kinds) - {self.kind, FULL}):
            raise ConversionError(f"config.json: layer_types names {strange[0]}, which this family does not have")
        return {"sliding_window": None, "layer_types": kinds, **self._sizes(config)}

    def write(self, config, head):
        """See `Value.write`."""
        kinds = list(config.layer_types)
        if strange := sorted(set(kinds) - {self.kind, FULL}):
            raise NotExpressible("layer_types", f"{self.kind} and {FULL}", strange[0])
        return {"layer_types": kinds, **self._sizes(config)}

    def _sizes(self, config):
        return {name: getattr(config, name) for name in self.names} if self.kind in (config.layer_types or ()) else {}
