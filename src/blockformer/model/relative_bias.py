"""Trained biases of the attention scores for how far apart two tokens are, in buckets.

T query length, S key length, H heads.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from .axes import SHARED, Part, axis, flag
from .positions import RELATIVE_BIAS


@dataclass(eq=False, repr=False)
class RelativeBiasFields(Part):
    """The fields of a relative bias."""

    relative_attention_num_buckets: int = axis(32, "an integer above 1", "positions", "buckets of a relative bias")
    relative_attention_max_distance: int = axis(
        128, "a positive integer", "positions", "distance in tokens beyond which all share the last bucket"
    )
    relative_bias_per_layer: bool = flag(False, "positions", "a relative bias in every layer, not one for the stack")

    def check(self):
        """A bias has buckets enough, and no field is set that the position type does not read."""
        if self.relative_bias_per_layer and self.position_type not in RELATIVE_BIAS:
            raise ValueError("relative_bias_per_layer=True needs position_type='relative_bias': set both or neither.")
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

    def share_out(self, plan, has_cross_attention):
        """A bias belongs to no single head: it is whole in each process, and its gradients are added."""
        if self.position_type in RELATIVE_BIAS:
            owner = "layers.*.self_attn." if self.relative_bias_per_layer else ""
            plan[f"{owner}relative_bias.embedding"] = SHARED


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

    def forward(self, places, key_length: int):
        """places [T] -> [1, H, T, S], to be added to the attention scores."""
        keys = torch.arange(key_length, device=places.device)
        buckets = self.bucket(keys[None, :] - places[:, None])  # [T, S]
        return self.embedding(buckets).permute(2, 0, 1)[None]  # [1, H, T, S]
