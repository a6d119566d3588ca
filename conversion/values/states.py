"""Layers that keep a state: which they are, and their sizes."""

from blockformer.files.errors import ConversionError

from .base import NotExpressible

SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
STATE, FULL = "linear_attention", "full_attention"


class StatesByLayer:
    """Some layers keep a state and the others see everything; without any, the sizes say nothing.

    Args:
        more: further fields of layers with a state, the same in both layouts.
    """

    def __init__(self, *more: str):
        self.names = (*SIZES, *more)

    def read(self, official):
        """See `Value.read`."""
        config = official.config
        kinds = list(config.layer_types)
        if strange := sorted(set(kinds) - {STATE, FULL}):
            raise ConversionError(f"config.json: layer_types names {strange[0]}, which this family does not have")
        sizes = {name: getattr(config, name) for name in self.names} if STATE in kinds else {}
        return {"sliding_window": None, "layer_types": kinds, **sizes}

    def write(self, config, head):
        """See `Value.write`."""
        kinds = list(config.layer_types)
        if strange := sorted(set(kinds) - {STATE, FULL}):
            raise NotExpressible("layer_types", f"{STATE} and {FULL}", strange[0])
        sizes = {name: getattr(config, name) for name in self.names} if STATE in kinds else {}
        return {"layer_types": kinds, **sizes}
