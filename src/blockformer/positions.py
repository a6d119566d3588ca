"""How a model learns of order: learned, sinusoidal, rotary, bucketed relative bias, relative keys.

B batch, T query length, S key length, H heads, K key/value heads, D head size, C hidden size.
"""

import math

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class LearnedPositions(nn.Embedding):
    """One trained vector for each position, as in BERT and GPT-2. position_ids [B, T] -> [B, T, C].

    The first `position_offset` rows belong to no token. Padding may take the last of them, which does not learn.
    """

    def __init__(self, config):
        self.offset = offset = config.position_offset
        padding_idx = offset - 1 if offset else None
        super().__init__(config.max_position_embeddings + offset, config.hidden_size, padding_idx)

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

    def _set_frequencies(self, device) -> None:
        self.register_buffer("inv_freq", self.compute_frequencies().to(device), persistent=False)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 or not self.inv_freq.is_meta:
            self._set_frequencies(self.inv_freq.device)
        return self


class SinusoidalPositions(ComputedPositions):
    """PE(pos, 2i) = sin(pos / 10000^(2i/C)), PE(pos, 2i+1) = cos(the same) (Vaswani et al., 2017, section 3.5).

    "sinusoidal" has sine and cosine of a frequency side by side, as in the paper; "sinusoidal_halves" has all sines
    and then all cosines. Computed for any position, so a text may be longer than those of training.
    position_ids [B, T] -> [B, T, C].

    An angle of many radians rounds coarsely in float32. It is counted in turns, of which whole ones are dropped, and a
    frequency is a sum of parts of `_BITS` bits, whose products with a position are exact.
    """

    _BITS = 10

    def __init__(self, config):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.halves = config.position_type == "sinusoidal_halves"
        self._set_frequencies(torch.get_default_device())

    def compute_frequencies(self):
        """Turns per token, in three parts: [3, C/2], float32."""
        even = torch.arange(0, self.hidden_size, 2, dtype=torch.float64, device="cpu")
        rest = torch.exp(even * (-math.log(10000.0) / self.hidden_size)) / (2 * math.pi)
        unit = 2.0 ** (torch.floor(torch.log2(rest)) + 1 - self._BITS)
        parts = []
        for _ in range(2):
            parts.append((rest / unit).floor() * unit)
            rest, unit = rest - parts[-1], unit * 2.0**-self._BITS
        return torch.stack([*parts, rest]).float()

    def forward(self, position_ids):
        turns = sum((position_ids[..., None].float() * part).frac() for part in self.inv_freq)  # [B, T, C/2]
        sines, cosines = (2 * math.pi * turns).sin(), (2 * math.pi * turns).cos()
        if self.halves:
            return torch.cat((sines, cosines), dim=-1)[..., : self.hidden_size]
        return torch.stack((sines, cosines), dim=-1).flatten(-2)[..., : self.hidden_size]  # [B, T, C]


class RotaryPositions(ComputedPositions):
    """Rotary position embedding, RoPE (Su et al., 2021), in every type of transformers' `ROPE_INIT_FUNCTIONS`.

    Gives what `rotate` turns queries and keys by: cosines and signed sines, each [B, 1, T, D]. The types whose
    frequencies depend on the text's length ("dynamic", "longrope") take it from the largest position of the call and
    keep no state, so that a result never depends on the calls before it.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.attention_scaling = 1.0
        self._set_frequencies(torch.get_default_device())

    def compute_frequencies(self):
        """[D/2]; of "longrope" those of a text as long as in training and those of a longer one, [2, D/2]."""
        if self.rope_type == "default":
            return self._frequencies_of(self.config.rope_parameters["rope_theta"], "cpu")
        compute = ROPE_INIT_FUNCTIONS[self.rope_type]
        with torch.device("cpu"):
            frequencies, self.attention_scaling = compute(self.config, torch.device("cpu"))
            if self.rope_type == "longrope":
                longer, _ = compute(self.config, torch.device("cpu"), seq_len=self._trained_length() + 1)
                frequencies = torch.stack((frequencies, longer))
        return frequencies

    def _trained_length(self) -> int:
        return self.config.rope_parameters["original_max_position_embeddings"]

    def _frequencies_of(self, theta, device):
        even = torch.arange(0, self.config.head_dim, 2, dtype=torch.int64, device=device).float()
        return 1.0 / (theta ** (even / self.config.head_dim))

    def _frequencies_at(self, position_ids):
        if self.rope_type == "dynamic":
            rope, trained, size = self.config.rope_parameters, self.config.max_position_embeddings, self.config.head_dim
            longer = (position_ids.max() + 1).clamp(min=trained) / trained
            stretch = (rope["factor"] * longer - (rope["factor"] - 1)) ** (size / (size - 2))
            return self._frequencies_of(rope["rope_theta"] * stretch, position_ids.device)
        if self.rope_type == "longrope":
            return torch.where(position_ids.max() >= self._trained_length(), self.inv_freq[1], self.inv_freq[0])
        return self.inv_freq

    @torch.no_grad()
    def forward(self, hidden_states, position_ids):
        frequencies = self._frequencies_at(position_ids).to(hidden_states.device)
        angles = position_ids[..., None].float() * frequencies  # [B, T, D/2]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # [B, T, D]
        return cos.to(hidden_states.dtype)[:, None], sin.to(hidden_states.dtype)[:, None]


def rotate(states, cos, sin):
    """Turn each pair (x_i, x_{i + D/2}) of a head by its position's angle: (x cos - y sin, y cos + x sin).

    Shapes: states [B, H, T, D]; cos and signed sin [B, 1, T, D], of `RotaryPositions` -> [B, H, T, D].
    """
    return states * cos + states.roll(states.shape[-1] // 2, dims=-1) * sin


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
