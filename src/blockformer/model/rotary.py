"""Rotary position embedding, RoPE (Su et al., 2021): queries and keys are turned by angles that grow with the position.

B batch, T length, D head size.
"""

import functools
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .axes import axis, check_choice, did_you_mean, is_number
from .positions import ComputedPositions, PositionFields

# Each rotary type of transformers with the parameters that it cannot do without.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Parameters that are positive numbers, then the rest.
_ROPE_NUMBERS = "rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
_ROPE_NUMBERS += "attention_factor beta_fast beta_slow mscale mscale_all_dim partial_rotary_factor".split()
_ROPE_NAMES = (*_ROPE_NUMBERS, "rope_type", "type", "short_factor", "long_factor", "truncate")


@dataclass(eq=False, repr=False)
class RotaryFields(PositionFields):
    """The fields of rotary positions."""

    rope_parameters: dict | None = axis(
        None, "a dict", "positions", "rope_type, rope_theta and so on as in transformers, or such a dict by layer type"
    )
    rope_layers: list | None = axis(None, "a list", "positions", "whether each layer of a decoder rotates; None: all")
    query_growth: float | None = axis(None, "a positive number", "positions", "b: queries times 1 + b log(1 + p // n)")

    def fill_rope_parameters(self, given, rope_theta):
        """Take the rotary parameters as a copy with every default written out."""
        if self.position_type != "rotary":
            super().fill_rope_parameters(given, rope_theta)
            return
        given, types = given or self.rope_parameters or {}, sorted(set(self.layer_types))
        named = given.items() if isinstance(given, dict) else ()
        if not any(isinstance(value, dict) or name in types for name, value in named):
            self.rope_parameters = self._full_rope(given, rope_theta)
            return
        if not set(types) <= set(given) <= {*types, "full_attention", "sliding_attention"}:
            names = " and ".join(f"'{name}'" for name in types)
            raise ValueError(f"rope_parameters by layer type need one dict for each of {names}, not {sorted(given)}.")
        self.rope_parameters = {name: self._full_rope(given[name], rope_theta, name) for name in types}

    def _full_rope(self, given, rope_theta, layer_type: str | None = None) -> dict:
        if not isinstance(given, dict):
            raise ValueError(f"rope_parameters{' of a layer type' * bool(layer_type)} must be a dict, not {given!r}.")
        rope = {"rope_type": given.get("type", "default"), "rope_theta": rope_theta, **given}
        rope["rope_theta"] = 10_000.0 if rope["rope_theta"] is None else rope["rope_theta"]
        check_rope(rope, self.head_dim_of(layer_type))
        if rope["rope_type"] in ("yarn", "longrope"):
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        if self.query_growth and not rope.get("original_max_position_embeddings"):
            raise ValueError("query_growth needs original_max_position_embeddings: add it to rope_parameters.")
        return rope

    def check(self):
        """Only layers of a decoder may go without rotation; where none does, that is one value, None."""
        layers, own = self.rope_layers, self.is_decoder and self.position_type == "rotary"
        if layers is not None and not (own and [type(one) for one in layers] == [bool] * self.num_hidden_layers):
            raise ValueError(f"rope_layers must list a bool for each layer of a rotary decoder, not {layers!r}.")
        self.rope_layers = None if all(layers or [True]) else layers


def check_rope(rope: dict, head_dim: int) -> None:
    """Refuse rotary parameters, of one layer type, that transformers does not have or cannot compute with."""
    rope_type = str(rope.get("rope_type"))
    check_choice("rope_type", rope_type, ROPE_TYPES)
    for name in ("rope_theta", *ROPE_TYPES[rope_type]):
        if rope.get(name) is None:
            raise ValueError(f"rope_parameters of type '{rope_type}' need '{name}': add it.")
    for name, value in rope.items():
        if name in _ROPE_NUMBERS and value is not None and not (is_number(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, not {value!r}.")
        if name not in _ROPE_NAMES and (hint := did_you_mean(name, _ROPE_NAMES, cutoff=0.8)):
            raise ValueError(f"rope_parameters have no '{name}'.{hint}")
    if "high_freq_factor" in ROPE_TYPES[rope_type] and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ValueError("high_freq_factor must be above low_freq_factor: between the two the scaling is blended.")
    if rope_type == "yarn" and rope["rope_theta"] <= 1:
        raise ValueError("rope_theta must be above 1 with rope_type 'yarn': it divides by the logarithm.")
    size = rotary_size(rope, head_dim)
    if not 2 <= size <= head_dim or size % 2:
        part = "" if size == head_dim else f" times partial_rotary_factor, {size},"
        raise ValueError(f"head_dim ({head_dim}){part} must be even with rotary positions: they rotate pairs.")
    for name in ("short_factor", "long_factor") if rope_type == "longrope" else ():
        factors = rope[name] if isinstance(rope[name], list | tuple) else []
        if len(factors) != size // 2 or not all(is_number(factor) and factor > 0 for factor in factors):
            wanted = f"{size // 2} numbers above 0 (one for each pair of a head)"
            raise ValueError(f"{name} must list {wanted}, not {repr(rope[name])[:80]}.")


def rotary_size(rope: dict, head_dim: int) -> int:
    """How many channels of a head are rotated: the first `partial_rotary_factor` of them, all by default.

    With "proportional" it is the first of each half, and the others turn by an angle of 0.
    """
    is_whole = rope.get("rope_type") == "proportional"
    return head_dim if is_whole else int(head_dim * rope.get("partial_rotary_factor", 1.0))


class RotaryPositions(ComputedPositions):
    """Rotary position embedding, RoPE (Su et al., 2021), in every type of transformers' `ROPE_INIT_FUNCTIONS`.

    Gives cosines and signed sines for `rotate`, each [B, 1, T, D], and with `query_growth` (Llama 4) the factor of
    queries, [B, 1, T, 1]; of a `layer_type` where `rope_parameters` have some for each. The types whose frequencies
    depend on the text's length ("dynamic", "longrope") take it from the largest position of the call and keep no state,
    so that a result never depends on the calls before it.
    """

    def __init__(self, config, layer_type: str | None = None):
        super().__init__()
        self.config, self.layer_type = config, layer_type
        rope, self.head_dim = config.rope_parameters or {}, config.head_dim_of(layer_type)
        self.rope = rope if layer_type is None else rope.get(layer_type, {})
        check_rope(self.rope, self.head_dim)  # once more: they may have been set by hand
        self.rope_type, self.attention_scaling, self.query_growth = self.rope["rope_type"], 1.0, config.query_growth
        self.switches_at = self.rope["original_max_position_embeddings"] if self.rope_type == "longrope" else None
        self._set_frequencies(torch.get_default_device())

    def compute_frequencies(self):
        """[D/2]; of "longrope" for texts as long as in training and for longer ones, [2, D/2]."""
        if self.rope_type == "default":
            return self._frequencies_of(self.rope["rope_theta"], "cpu")
        if self.rope_type == "proportional":  # a whole head's frequencies for its first pairs, and 0 for the others
            frequencies = self._frequencies_of(self.rope["rope_theta"], "cpu") / self.rope.get("factor", 1.0)
            count = int(self.rope.get("partial_rotary_factor", 1.0) * self.head_dim // 2)
            return torch.cat((frequencies[:count], torch.zeros_like(frequencies[count:])))
        compute = functools.partial(ROPE_INIT_FUNCTIONS[self.rope_type], self.config, torch.device("cpu"))
        with torch.device("cpu"):
            frequencies, self.attention_scaling = compute(layer_type=self.layer_type)
            if self.switches_at is not None:
                long, _ = compute(layer_type=self.layer_type, seq_len=self.switches_at + 1)
                frequencies = torch.stack((frequencies, long))
        return frequencies

    def _frequencies_of(self, theta, device):
        size = rotary_size(self.rope, self.head_dim)
        return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.int64, device=device).float() / size))

    def _frequencies_at(self, position_ids):
        if self.rope_type == "dynamic":
            rope, trained = self.rope, self.config.max_position_embeddings
            size = rotary_size(rope, self.head_dim)
            longer = (position_ids.max() + 1).clamp(min=trained) / trained
            stretch = (rope["factor"] * longer - (rope["factor"] - 1)) ** (size / (size - 2))
            return self._frequencies_of(rope["rope_theta"] * stretch, position_ids.device)
        if self.switches_at is not None:
            return torch.where(position_ids.max() >= self.switches_at, self.inv_freq[1], self.inv_freq[0])
        return self.inv_freq

    def forward(self, hidden_states, position_ids):
        frequencies = self._frequencies_at(position_ids).to(hidden_states.device)
        angles = position_ids[:, None, :, None].float() * torch.cat((-frequencies, frequencies))  # [B, 1, T, D]
        scaling, dtype = self.attention_scaling, hidden_states.dtype
        cos, sin = ((each if scaling == 1 else each * scaling).to(dtype) for each in (angles.cos(), angles.sin()))
        if (growth := self.query_growth) is None:
            return cos, sin
        steps = torch.floor(position_ids[:, None, :, None] / self.rope["original_max_position_embeddings"])
        return cos, sin, (1 + growth * torch.log(1 + steps)).to(cos)


def make_rotary(config) -> nn.Module:
    """`RotaryPositions` for all layers or, where `rope_parameters` say so, a dict of them by layer type."""
    if not {*config.layer_types} & {*(config.rope_parameters or ())}:
        return RotaryPositions(config)
    return nn.ModuleDict({each: RotaryPositions(config, each) for each in sorted({*config.layer_types})})
