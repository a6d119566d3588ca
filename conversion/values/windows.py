"""Sliding windows: in no layer, in every one, in some."""

from collections.abc import Collection

from blockformer.files.errors import ConversionError

from .base import NotExpressible, Value

FULL, SLIDING = "full_attention", "sliding_attention"


class Window(Value):
    """The window, as the official class has it: not at all, one for every layer, or in some of them.

    Args:
        known: the fields that the class has.
    """

    def __init__(self, known: Collection[str]):
        self.known = known

    def read(self, official):
        config = official.config
        window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        if types is None or "layer_types" not in self.known:
            usual = FULL if window is None else SLIDING
            if types is not None and set(types) != {usual}:
                raise ConversionError(
                    f"config.json: layer_types must be {usual} in every layer, since this family lacks the field "
                    f"and sliding_window is {window}; drop it"
                )
            types = [usual] * config.num_hidden_layers
        if strange := self._strange(types):
            raise ConversionError(f"config.json: layer_types names {strange}, which this family does not have")
        slides = SLIDING in types
        if slides and window is None:
            raise ConversionError(
                "config.json: layer_types names sliding_attention, but sliding_window is null or use_sliding_window "
                "is false; change one of them"
            )
        return {"sliding_window": window if slides else None, "layer_types": list(types)}

    def write(self, config, head):
        window, types = config.sliding_window, list(config.layer_types)
        if strange := self._strange(types):
            raise NotExpressible("layer_types", f"{FULL} and {SLIDING}", strange)
        entries = {"sliding_window": window, "layer_types": types, "use_sliding_window": window is not None}
        entries["max_window_layers"] = next((i for i, kind in enumerate(types) if kind != FULL), len(types))
        if window is None and "layer_types" in self.known and "use_sliding_window" not in self.known:
            del entries["sliding_window"]  # these classes make a mask for a window in any case, and want its length
        return {name: value for name, value in entries.items() if name in self.known}

    def _strange(self, types: Collection[str]) -> str:
        """The name of the first type of layers that is not attention; "" if all are."""
        return min({*types} - {FULL, SLIDING}, default="")
