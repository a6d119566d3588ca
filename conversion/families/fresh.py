"""Settings of fresh models: functions of other settings, in place of a value, and computed ones."""

from collections.abc import Callable


def root_of_width(settings: dict) -> float:
    """The factor of the embeddings (Vaswani et al., 2017, section 3.4)."""
    return settings["hidden_size"] ** 0.5


def four_widths(settings: dict) -> int:
    """The inner width of the feed-forward network, where a family knows no other."""
    return 4 * settings["hidden_size"]


def by_width(settings: dict) -> float:
    """The factor of the states before a head that is tied to the embeddings, in T5."""
    return settings["hidden_size"] ** -0.5


def by_three_heads(settings: dict) -> float:
    """The factor of scores that are sums of three terms, in DeBERTa."""
    return (3 * settings["hidden_size"] // settings["num_attention_heads"]) ** -0.5


def every(step: int, window: int | None = None):
    """Settings in which each layer but every `step`-th one has a window or, without one, positions."""

    def kinds(settings: dict) -> list:
        is_short = [layer % step != 0 for layer in range(1, settings["num_hidden_layers"] + 1)]
        if window is None:
            return is_short
        names = ("full_attention", "sliding_attention" if settings["sliding_window"] else "full_attention")
        return [names[one] for one in is_short]

    return {"layer_types": kinds, "sliding_window": window} if window else {"rope_layers": kinds}


def all_but(step: int, window: int) -> dict:
    """Settings in which each layer but the first and every `step`-th one after it has a window."""

    def kinds(settings: dict) -> list:
        count = settings["num_hidden_layers"]
        return ["full_attention" if layer % step == 0 else "sliding_attention" for layer in range(count)]

    return {"layer_types": kinds, "sliding_window": window}


def few_full(step: int, kind: str) -> Callable[[dict], list]:
    """Layers of which each `step`-th one sees everything, as the last one does, and the others are of a kind."""

    def kinds(settings: dict) -> list:
        count = settings["num_hidden_layers"]
        return [kind if layer % step and layer < count else "full_attention" for layer in range(1, count + 1)]

    return kinds


def by_type(full: float, sliding: float) -> dict:
    """Rotary parameters of each layer type that there is."""
    thetas = {"full_attention": full, "sliding_attention": sliding}

    def rope(settings: dict) -> dict:
        types = settings["layer_types"] or ["sliding_attention" if settings["sliding_window"] else "full_attention"]
        kinds = sorted(set(types(settings) if callable(types) else types))
        return {kind: {"rope_type": "default", "rope_theta": thetas.get(kind, full)} for kind in kinds}

    return {"rope_parameters": rope}


def rotary(theta: float, part: float = 1.0) -> dict:
    """SwiGLU's activation and rotary positions over a part of each head."""
    rope = {"rope_type": "default", "rope_theta": theta}
    return {"hidden_act": "silu", "rope_parameters": rope | ({"partial_rotary_factor": part} if part < 1 else {})}
