"""Sliding windows: in no layer, in every one, in some."""

from blockformer.files.errors import ConversionError


class NoWindow:
    """No layer has a window; the family has no such setting."""

    def read(self, official):
        """See `Value.read`."""
        layer_types = getattr(official.config, "layer_types", None)
        if layer_types is not None and set(layer_types) != {"full_attention"}:
            raise ConversionError("config.json: layer_types is set, which this family does not have; drop it")
        return {"sliding_window": None, "layer_types": ["full_attention"] * official.config.num_hidden_layers}

    def write(self, config, head):
        """See `Value.write`."""
        return {}


class WindowEverywhere:
    """A window in every layer or in none."""

    def read(self, official):
        """See `Value.read`."""
        window = official.config.sliding_window
        layer_type = "full_attention" if window is None else "sliding_attention"
        layer_types = getattr(official.config, "layer_types", None)
        if layer_types is not None and set(layer_types) != {layer_type}:
            raise ConversionError(
                f"config.json: layer_types must be {layer_type} in every layer when sliding_window is {window}; "
                "layers of both kinds are another family's"
            )
        return {"sliding_window": window, "layer_types": [layer_type] * official.config.num_hidden_layers}

    def write(self, config, head):
        """See `Value.write`."""
        return {"sliding_window": config.sliding_window}


class WindowByLayer:
    """A window in some of the layers.

    Args:
        by_flag: whether the official classes also need `use_sliding_window`, and where full layers end.
    """

    def __init__(self, by_flag: bool = True):
        self.by_flag = by_flag

    def read(self, official):
        """See `Value.read`."""
        config = official.config
        slides = "sliding_attention" in config.layer_types
        if slides and config.sliding_window is None:
            raise ConversionError(
                "config.json: layer_types names sliding_attention, but sliding_window is null or use_sliding_window "
                "is false; mend one of them"
            )
        return {"sliding_window": config.sliding_window if slides else None, "layer_types": list(config.layer_types)}

    def write(self, config, head):
        """See `Value.write`."""
        entries = {"sliding_window": config.sliding_window, "layer_types": list(config.layer_types)}
        if not self.by_flag:  # these classes make a mask for a window in any case, and want its length
            return {name: value for name, value in entries.items() if value is not None}
        layers = config.num_hidden_layers
        full = next((i for i, kind in enumerate(config.layer_types) if kind != "full_attention"), layers)
        return entries | {"use_sliding_window": config.sliding_window is not None, "max_window_layers": full}
