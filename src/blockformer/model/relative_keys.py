"""Relative keys: terms of the attention scores that queries and keys give with a vector for their distance.

B batch, T query length, S key length, H heads, K key/value heads, D head size.
"""

import torch
from torch import nn


class RelativeKeys(nn.Module):
    """A trained vector of head size for each distance, dotted with the query (Shaw et al., 2018).

    "relative_key_query" dots it with the key too (Huang et al., 2020, method 4). Distances are clipped to the table.
    """

    def __init__(self, config):
        super().__init__()
        self.max_distance = config.max_position_embeddings - 1
        self.and_keys = config.position_type == "relative_key_query"
        self.embedding = nn.Embedding(2 * config.max_position_embeddings - 1, config.head_dim)

    def forward(self, query, key, places):
        """query [B, H, T, D], key [B, K, S, D], places [T] -> unscaled scores [B, H, T, S]."""
        keys = torch.arange(key.shape[2], device=key.device)
        distance = (places[:, None] - keys[None, :]).clamp(-self.max_distance, self.max_distance)
        vectors = self.embedding(distance + self.max_distance)  # [T, S, D]
        scores = torch.einsum("bhtd,tsd->bhts", query, vectors)
        if self.and_keys:
            key_scores = torch.einsum("bksd,tsd->bkts", key, vectors)
            scores = scores + key_scores.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return scores
