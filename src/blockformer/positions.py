"""How a model learns of order: learned, sinusoidal, rotary, bucketed relative bias, relative keys.

B batch, T query length, S key length, H heads, K key/value heads, D head size, C hidden size.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .axes import SHARED, Part, axis, check_choice, did_you_mean, flag, is_number

# Each rotary type of transformers with the parameters that it cannot do without.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Parameters that are positive numbers, then the rest.
_ROPE_NUMBERS = "rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
_ROPE_NUMBERS += "attention_factor beta_fast beta_slow mscale mscale_all_dim partial_rotary_factor".split()
_ROPE_NAMES = (*_ROPE_NUMBERS, "rope_type", "type", "short_factor", "long_factor", "truncate")
POSITION_TYPES = tuple(
    "learned sinusoidal sinusoidal_halves sinusoidal_inclusive rotary relative_bias learned_relative_bias "
    "relative_key relative_key_query alibi disentangled none".split()
)
# Positions that are computed, that have a table, and that have a bias of the scores or any other term of them.
SINUSOIDAL = ("sinusoidal", "sinusoidal_halves", "sinusoidal_inclusive")
LEARNED, RELATIVE_BIAS = ("learned", "learned_relative_bias"), ("relative_bias", "learned_relative_bias")
SCORE_TERMS = (*RELATIVE_BIAS, "relative_key", "relative_key_query", "alibi", "disentangled")


@dataclass(eq=False, repr=False)
class PositionFields(Part):
    """The fields that say how the model learns of order."""

    position_type: str = axis("rotary", POSITION_TYPES, "positions", "how the model learns of order")
    max_position_embeddings: int = axis(
        2048, "a positive integer", "size", "tokens of context: rows of a learned table, or length in training"
    )
    rope_parameters: dict | None = axis(
        None, "a dict", "positions", "rope_type, rope_theta and so on as in transformers, or such a dict by layer type"
    )
    rope_layers: list | None = axis(None, "a list", "positions", "whether each layer of a decoder rotates; None: all")
    position_offset: int = axis(
        0, "an integer of 0 or more", "positions", "rows of a learned table before that of position 0, for padding"
    )
    relative_attention_num_buckets: int = axis(32, "an integer above 1", "positions", "buckets of a relative bias")
    relative_attention_max_distance: int = axis(
        128, "a positive integer", "positions", "distance in tokens beyond which all share the last bucket"
    )
    relative_bias_per_layer: bool = flag(False, "positions", "a relative bias in every layer, not one for the stack")

    def fill_rope_parameters(self, rope_scaling: dict | None, rope_theta: float | None) -> None:
        """Take the rotary parameters, also under their old names, as a copy with every default written out."""
        given = rope_scaling or self.rope_parameters
        if self.position_type != "rotary":
            if given or rope_theta is not None:
                name, kind = "rope_parameters" if given else "rope_theta", self.position_type
                raise ValueError(f"{name} is set but position_type is '{kind}': drop it, or set position_type='rotary'")
            self.rope_parameters = None
            return
        if not isinstance(given, dict | None):
            raise ValueError(f"rope_parameters must be a dict, not {given!r}.")
        given = given or {}
        if not any(isinstance(value, dict) for value in given.values()):
            self.rope_parameters = self._full_rope(given, rope_theta)
            return
        if set(given) != set(self.layer_types):
            types = " and ".join(f"'{name}'" for name in sorted(set(self.layer_types)))
            raise ValueError(f"rope_parameters by layer type need one dict for each of {types}, not {sorted(given)}.")
        self.rope_parameters = {name: self._full_rope(one, rope_theta) for name, one in given.items()}

    def _full_rope(self, given, rope_theta) -> dict:
        if not isinstance(given, dict):
            raise ValueError(f"rope_parameters of a layer type must be a dict, not {given!r}.")
        rope = {"rope_type": given.get("type", "default"), "rope_theta": rope_theta, **given}
        rope["rope_theta"] = 10_000.0 if rope["rope_theta"] is None else rope["rope_theta"]
        check_rope(rope, self.head_dim)
        if rope["rope_type"] in ("yarn", "longrope"):
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        return rope

    def check(self):
        """Relative terms have buckets enough, and no field is set that the position type does not read."""
        super().check()
        layers, own = self.rope_layers, self.is_decoder and self.position_type == "rotary"
        if layers is not None and not (own and [type(one) for one in layers] == [bool] * self.num_hidden_layers):
            raise ValueError(f"rope_layers must be true or false for each layer of a rotary decoder, not {layers!r}.")
        kinds = {"alibi": self.is_decoder, "disentangled": not (self.is_decoder or self.is_encoder_decoder)}
        if not kinds.get(self.position_type, True):
            raise ValueError(
                f"position_type='{self.position_type}' is not supported: a decoder has alibi, an encoder disentangled."
            )
        if self.relative_bias_per_layer and self.position_type not in RELATIVE_BIAS:
            raise ValueError("relative_bias_per_layer=True needs a relative bias: set position_type='relative_bias'.")
        if self.position_type not in RELATIVE_BIAS:
            return
        # A bidirectional bias halves the buckets, and half of the rest hold one distance each; some must be left.
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if not self.is_decoder and buckets < 4:
            raise ValueError(f"relative_attention_num_buckets must be 4 or more in an encoder, not {buckets}.")
        exact = buckets // (2 if self.is_decoder or self.is_encoder_decoder else 4)
        if distance <= exact:
            fix = f"above {exact}, the distances with a bucket each: raise it, or lower relative_attention_num_buckets"
            raise ValueError(f"relative_attention_max_distance ({distance}) must be {fix}.")

    def tensor_parallel_plan(self, has_cross_attention):
        """Relative terms belong to no single head: they are whole in each process, and their gradients are added."""
        plan = super().tensor_parallel_plan(has_cross_attention)
        if self.position_type in ("relative_key", "relative_key_query"):
            plan["layers.*.self_attn.relative_keys.embedding"] = SHARED
        elif self.position_type in RELATIVE_BIAS:
            owner = "layers.*.self_attn." if self.relative_bias_per_layer else ""
            plan[f"{owner}relative_bias.embedding"] = SHARED
        return plan


def check_rope(rope: dict, head_dim: int) -> None:
    """Refuse rotary parameters, of one layer type, that transformers does not have or cannot compute with."""
    rope_type = rope["rope_type"]
    check_choice("rope_type", rope_type, ROPE_TYPES)
    for name in ROPE_TYPES[rope_type]:
        if rope.get(name) is None:
            raise ValueError(f"rope_parameters of type '{rope_type}' need '{name}'.")
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
    for name in ("short_factor", "long_factor"):
        if rope_type == "longrope":
            factors = rope[name] if isinstance(rope[name], list | tuple) else []
            if len(factors) != size // 2 or not all(is_number(factor) and factor > 0 for factor in factors):
                wanted = f"{size // 2} numbers above 0 (one for each pair of a head)"
                raise ValueError(f"{name} must list {wanted}, not {repr(rope[name])[:80]}.")


def rotary_size(rope: dict, head_dim: int) -> int:
    """How many channels of a head are rotated: the first `partial_rotary_factor` of them, all by default."""
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


class LearnedPositions(nn.Embedding):
    """One trained vector for each position, as in BERT and GPT-2. position_ids [B, T] -> [B, T, C].

    The first `position_offset` rows belong to no token. Padding may take the last of them, which does not learn.
    """

    def __init__(self, config):
        self.offset = offset = config.position_offset
        padding_idx = offset - 1 if offset else None
        super().__init__(config.max_position_embeddings + offset, config.embedding_size, padding_idx)

    def forward(self, position_ids):
        return super().forward(position_ids + self.offset)


class ComputedPositions(nn.Module):
    """Positions from frequencies that are computed, not trained, and stay in float32 whatever the model's dtype.

    Rounding a frequency to bfloat16 would move far positions by whole tokens, so the buffer is computed anew whenever
    the module is cast or moved.
    """

    inv_freq: torch.Tensor

    def compute_frequencies(self) -> torch.Tensor:
        """The frequencies in radians per token, float32, on the CPU: some accelerators have no float64."""
        raise NotImplementedError

    def init_tensors(self) -> None:
        """Fill the buffer of a model that was built on the meta device."""
        init.copy_(self.inv_freq, self.compute_frequencies())

    def _set_frequencies(self, device) -> None:
        self.register_buffer("inv_freq", self.compute_frequencies().to(device), persistent=False)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 or not self.inv_freq.is_meta:
            self._set_frequencies(self.inv_freq.device)
        return self


class SinusoidalPositions(ComputedPositions):
    """PE(pos, 2i) = sin(pos / 10000^(2i/C)), PE(pos, 2i+1) = cos(the same) (Vaswani et al., 2017, section 3.5).

    "sinusoidal" has sine and cosine of a frequency side by side, as in the paper; others all sines, then all cosines.
    "sinusoidal_inclusive" ends at the frequency 1/10000 itself. Computed for any position, past those of training too.
    position_ids [B, T] -> [B, T, C].

    An angle of many radians rounds coarsely in float32. It is counted in turns, of which whole ones are dropped, and a
    frequency is a sum of parts of `_BITS` bits, whose products with a position are exact.
    """

    _BITS = 10

    def __init__(self, config):
        super().__init__()
        self.hidden_size = config.embedding_size
        self.halves, self.offset = config.position_type != "sinusoidal", config.position_offset
        self.steps = self.hidden_size - 2 * (config.position_type == "sinusoidal_inclusive")
        self._set_frequencies(torch.get_default_device())

    def compute_frequencies(self):
        """Turns per token, in three parts: [3, C/2], float32."""
        even = torch.arange(0, self.hidden_size, 2, dtype=torch.float64, device="cpu")
        rest = torch.exp(even * (-math.log(10000.0) / self.steps)) / (2 * math.pi)
        unit = 2.0 ** (torch.floor(torch.log2(rest)) + 1 - self._BITS)
        parts = []
        for _ in range(2):
            parts.append((rest / unit).floor() * unit)
            rest, unit = rest - parts[-1], unit * 2.0**-self._BITS
        return torch.stack([*parts, rest]).float()

    def forward(self, position_ids):
        places = (position_ids + self.offset)[..., None].float()
        turns = sum((places * part).frac() for part in self.inv_freq)  # [B, T, C/2]
        sines, cosines = (2 * math.pi * turns).sin(), (2 * math.pi * turns).cos()
        if self.halves:
            return torch.cat((sines, cosines), dim=-1)[..., : self.hidden_size]
        return torch.stack((sines, cosines), dim=-1).flatten(-2)[..., : self.hidden_size]  # [B, T, C]


TABLES: dict = dict.fromkeys(SINUSOIDAL, SinusoidalPositions) | dict.fromkeys(LEARNED, LearnedPositions)


class RotaryPositions(ComputedPositions):
    """Rotary position embedding, RoPE (Su et al., 2021), in every type of transformers' `ROPE_INIT_FUNCTIONS`.

    Gives what `rotate` turns queries and keys by: cosines and signed sines, each [B, 1, T, D]. The types whose
    frequencies depend on the text's length ("dynamic", "longrope") take it from the largest position of the call and
    keep no state, so that a result never depends on the calls before it.

    Args:
        layer_type: whose parameters to take where `rope_parameters` have some for each layer type.
    """

    def __init__(self, config, layer_type: str | None = None):
        super().__init__()
        self.config = config
        self.layer_type = layer_type
        self.rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        self.rope_type = self.rope["rope_type"]
        self.attention_scaling = 1.0
        self._set_frequencies(torch.get_default_device())

    def compute_frequencies(self):
        """[D/2]; of "longrope" those of a text as long as in training and those of a longer one, [2, D/2]."""
        if self.rope_type == "default":
            return self._frequencies_of(self.rope["rope_theta"], "cpu")
        compute = functools.partial(ROPE_INIT_FUNCTIONS[self.rope_type], self.config, torch.device("cpu"))
        with torch.device("cpu"):
            frequencies, self.attention_scaling = compute(layer_type=self.layer_type)
            if self.rope_type == "longrope":
                length = self.rope["original_max_position_embeddings"] + 1
                longer, _ = compute(layer_type=self.layer_type, seq_len=length)
                frequencies = torch.stack((frequencies, longer))
        return frequencies

    def _frequencies_of(self, theta, device):
        size = rotary_size(self.rope, self.config.head_dim)
        return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.int64, device=device).float() / size))

    def _frequencies_at(self, position_ids):
        if self.rope_type == "dynamic":
            rope, trained = self.rope, self.config.max_position_embeddings
            size = rotary_size(rope, self.config.head_dim)
            longer = (position_ids.max() + 1).clamp(min=trained) / trained
            stretch = (rope["factor"] * longer - (rope["factor"] - 1)) ** (size / (size - 2))
            return self._frequencies_of(rope["rope_theta"] * stretch, position_ids.device)
        if self.rope_type == "longrope":
            trained = self.rope["original_max_position_embeddings"]
            return torch.where(position_ids.max() >= trained, self.inv_freq[1], self.inv_freq[0])
        return self.inv_freq

    @torch.no_grad()
    def forward(self, hidden_states, position_ids):
        frequencies = self._frequencies_at(position_ids).to(hidden_states.device)
        angles = position_ids[..., None].float() * frequencies  # [B, T, D/2]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # [B, T, D]
        return cos.to(hidden_states.dtype)[:, None], sin.to(hidden_states.dtype)[:, None]


def make_rotary(config) -> nn.Module:
    """`RotaryPositions` for all layers or, where `rope_parameters` say so, a dict of them by layer type."""
    if "rope_type" in config.rope_parameters:
        return RotaryPositions(config)
    return nn.ModuleDict({layer_type: RotaryPositions(config, layer_type) for layer_type in config.rope_parameters})


def rotations_of(rotary: nn.Module | None, config, hidden_states, position_ids) -> dict:
    """Layer type -> what `rotate` turns by; empty without rotary positions."""
    if rotary is None:
        return {}
    if isinstance(rotary, RotaryPositions):
        return dict.fromkeys(config.layer_types, rotary(hidden_states, position_ids))
    return {layer_type: part(hidden_states, position_ids) for layer_type, part in rotary.items()}


def rotate(states, cos, sin):
    """Turn each pair (x_i, x_{i + R/2}) of R channels by its position's angle: (x cos - y sin, y cos + x sin).

    Shapes: states [B, H, T, D]; cos and signed sin [B, 1, T, R], of `RotaryPositions` -> [B, H, T, D].
    """
    size = cos.shape[-1]
    turned = states[..., :size]
    turned = turned * cos + turned.roll(size // 2, dims=-1) * sin
    return turned if size == states.shape[-1] else torch.cat((turned, states[..., size:]), dim=-1)


class RelativeBias(nn.Module):
    """A trained bias per head and distance, in buckets that widen with the logarithm (T5, Raffel et al., 2020).

    Half of the buckets hold one distance each, the other half cover up to `relative_attention_max_distance`. A
    bidirectional bias spends half of all buckets on keys to the right.
    """

    def __init__(self, config, bidirectional: bool):
        super().__init__()
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.bidirectional = bidirectional
        self.embedding = nn.Embedding(self.num_buckets, config.num_attention_heads)
        self.embedding.initializer_factor = config.hidden_size**-0.5

    def bucket(self, distance):
        """Distances key - query in tokens, any shape of int64 -> bucket numbers of the same shape."""
        buckets, offset = self.num_buckets, 0
        if self.bidirectional:
            buckets //= 2
            offset = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        wide = exact + (growth * (buckets - exact)).long()
        return offset + torch.where(distance < exact, distance, wide.clamp(max=buckets - 1))

    def forward(self, query_positions, key_length: int):
        """query_positions [T] -> [1, H, T, S], to be added to the attention scores."""
        keys = torch.arange(key_length, device=query_positions.device)
        buckets = self.bucket(keys[None, :] - query_positions[:, None])  # [T, S]
        return self.embedding(buckets).permute(2, 0, 1)[None]  # [1, H, T, S]


class RelativeKeys(nn.Module):
    """A trained vector of head size for each distance, dotted with the query (Shaw et al., 2018) and, with `and_keys`,
    with the key too (Huang et al., 2020, method 4). Distances are clipped to the table."""

    def __init__(self, config, and_keys: bool):
        super().__init__()
        self.max_distance = config.max_position_embeddings - 1
        self.and_keys = and_keys
        self.embedding = nn.Embedding(2 * config.max_position_embeddings - 1, config.head_dim)

    def forward(self, query, key, query_positions):
        """query [B, H, T, D], key [B, K, S, D], query_positions [T] -> unscaled scores [B, H, T, S]."""
        keys = torch.arange(key.shape[2], device=key.device)
        distance = (query_positions[:, None] - keys[None, :]).clamp(-self.max_distance, self.max_distance)
        vectors = self.embedding(distance + self.max_distance)  # [T, S, D]
        scores = torch.einsum("bhtd,tsd->bhts", query, vectors)
        if self.and_keys:
            key_scores = torch.einsum("bksd,tsd->bkts", key, vectors)
            scores = scores + key_scores.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return scores
