"""Beams of an input share the keys and values of its source: read once for all of them, and held once.

B inputs, n beams of each, S source length, T target length, H heads, K key/value heads, D head size.
"""

import torch

from ..model.states import states_of


def one_of_each(rows, beams: int):
    """One of each `beams` rows [B * n, ...] -> [B, ...]; None if not all of them are equal."""
    if len(rows) % beams:
        return None
    groups = rows.unflatten(0, (-1, beams))
    return groups[:, 0] if torch.equal(groups, groups[:, :1].expand_as(groups)) else None


def has_state(layer) -> bool:
    """Whether a cache's layer keeps a state in place of keys and values."""
    return hasattr(layer, "update_recurrent_state")


def held_by(layer) -> tuple:
    """Keys and values of a cache's layer, [B, K, S, D].

    Of one with a state, what its convolution sees [B, D, W] and the state, both None as long as it is empty.
    """
    if not has_state(layer):
        return layer.keys, layer.values
    past, state = states_of(layer)
    return past, past.new_empty(len(past), 0) if state is None and past is not None else state


class SharesSources:
    """Mixed into an attention: the n beams of an input are n * T queries of one row of keys and values."""

    is_cross_attention: bool

    def states_of(self, *given, **named):
        """Queries [B, H, n * T, D], keys and values [B, K, S, D]."""
        query, key, value = super().states_of(*given, **named)  # type: ignore[misc]
        if query.shape[0] != key.shape[0]:
            query = query.unflatten(0, (key.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        return query, key, value
