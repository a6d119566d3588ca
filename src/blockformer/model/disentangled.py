"""Disentangled attention: content and distance are matched apart (DeBERTa, He et al., 2021; version 3, 2023).

B batch, T tokens, H heads, D head size, C hidden size, E vectors of distances.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .attention import Attention
from .normalization import make_norm
from .relative_bias import RelativeBiasFields


@dataclass(eq=False, repr=False)
class DisentangledFields(RelativeBiasFields):
    """What holds of a config with this attention; its fields are the same as for a relative bias."""

    def check(self):
        """Queries and keys of distances come from the layers' own projections, one key for each head."""
        if self.position_type != "disentangled":
            return
        if self.qk_norm or self.pruned_heads or self.num_key_value_heads != self.num_attention_heads:
            fix = "set qk_norm=False and leave out num_key_value_heads and pruned_heads"
            raise ValueError(f"position_type='disentangled' needs one key per query head, without a norm: {fix}.")
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or distance <= buckets // 2 + 1:
            if buckets < 4:
                raise ValueError(f"relative_attention_num_buckets must be 4 or more, not {buckets}.")
            fix = f"above {buckets // 2 + 1} (half of relative_attention_num_buckets, and 1), not {distance}"
            raise ValueError(f"relative_attention_max_distance must be {fix}.")


class Distances(nn.Module):
    """A trained and normed vector for each bucket of distances, to either side: [E, C] for all layers.

    Under tensor parallelism it is whole in each process, and so is its gradient: the projections that read it, of which
    each process has some heads, add up what they give their input. Adding it once more would double it.
    """

    def __init__(self, config, bidirectional: bool):
        super().__init__()
        self.embedding = nn.Embedding(2 * config.relative_attention_num_buckets, config.hidden_size)
        self.norm = make_norm(config, config.hidden_size)

    def forward(self):
        return self.norm(self.embedding.weight)


def padding_of(mask):
    """What is padding in a mask [B, 1, T, T]: it does not see itself. bool [B, 1, T, 1]."""
    sees_itself = mask.diagonal(dim1=-2, dim2=-1)[..., None]
    return ~sees_itself if mask.dtype == torch.bool else sees_itself < 0


class DisentangledAttention(Attention):
    """Scores q_i · k_j + q_i · K(d) + k_j · Q(d), with Q and K, the layer's projections, of the vector of distance d.

    Distances up to half of the buckets have a bucket each, farther ones share one, wider with the logarithm. Padding
    sees all tokens alike, as in the official class: some heads read its states.
    """

    def __init__(self, config, *others):
        super().__init__(config, *others)
        self.distance_dropout = nn.Dropout(config.hidden_dropout)

    def _with_terms(self, query, key, attention_mask, distances, places):
        query, mask = super()._with_terms(query, key, attention_mask, distances, places)
        if not isinstance(attention_mask, torch.Tensor):
            return query, mask
        is_padding = padding_of(attention_mask)
        return query.masked_fill(is_padding, 0), mask.masked_fill(is_padding, torch.finfo(mask.dtype).min)

    def _own_terms(self, query, key, distances, places):
        return self._terms_of(query, key, *self._of_distances(distances))

    def _of_distances(self, vectors):
        """Queries and keys [1, H, E, D] of the vectors of `Distances`, [E, C]."""
        vectors = self.distance_dropout(vectors)[None]
        return self._split_heads(self.q_proj(vectors)), self._split_heads(self.k_proj(vectors))

    def _terms_of(self, query, key, queries, keys):
        """Queries and keys [B, H, T, D], and the same of distances -> [B, H, T, T]."""
        length = query.shape[2]
        positions = torch.arange(length, device=query.device)
        buckets = self._bucket(positions[:, None] - positions[None, :])
        buckets = buckets.expand(*query.shape[:2], length, length)
        to_keys = (query @ keys.transpose(2, 3)).gather(-1, buckets)
        to_queries = (key @ queries.transpose(2, 3)).gather(-1, buckets.transpose(2, 3)).transpose(2, 3)
        return (to_keys + to_queries) * self.scaling

    def _bucket(self, distance):
        """Distances query - key, int64 of any shape -> numbers of vectors, of the same shape."""
        span, farthest = self.config.relative_attention_num_buckets, self.config.relative_attention_max_distance
        half = span // 2
        far = distance.abs().clamp(min=half)
        growth = torch.log(far / half) / torch.log(torch.tensor((farthest - 1) / half))
        wide = (torch.ceil(growth * (half - 1)) + half).long() * distance.sign()
        return (torch.where(distance.abs() <= half, distance, wide) + span).clamp(0, 2 * span - 1)
