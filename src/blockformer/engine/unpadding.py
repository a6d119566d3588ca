"""Real tokens of a padded batch, packed into one row and unpacked again, so that no layer works on padding.

Norms, projections and the feed-forward network treat each token by itself: they run on the packed row. Attention runs
once for each sequence, or for short ones side by side. The result equals the padded run's, with zeros where the padding
was.

Layers see it by the mask: an `Unpadding` stands where the library's mask would. It is made only where nobody watches:
a hook, or an adapter for each row, would meet a single row.

B batch, T padded length, N real tokens, n sequences, L tokens of the longest, H heads, K key/value heads, D head size,
C hidden size.
"""

import copy
import functools
from typing import Any

import torch
from torch.nn import functional as F

from ..model.attention import Attention, sdpa_attention, with_bias
from ..model.compat import is_mapped
from ..model.positions import starts_of


class Unpadding:
    """Which tokens of [B, T] are real, and where each sequence lies in the packed row.

    Args:
        indices: int64 [N], the real tokens' indices in the flattened batch, sequence after sequence; None: all of them.
        lengths: the sequences' lengths in tokens, together N; None: `starts` says them.
        starts: int32 [n + 1], where each sequence begins in the flattened batch and the last one ends, or None.
        longest: the tokens of the longest sequence, or None.

    Attributes:
        masks: one mask for each sequence, or None where they have no more than the bias.
        bias: [1, H, L or more, L or more] of scores, which all layers and sequences share, or None.
        side_by_side: see `_side_by_side`, once that was needed.
    """

    masks = None
    bias = None
    side_by_side = None

    def __init__(self, shape, indices, lengths: list[int] | None = None, starts=None, longest: int | None = None):
        self.shape, self.indices, self.starts = tuple(shape), indices, starts
        self._lengths, self._longest = lengths, longest

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Of the sequences, in tokens. If only `starts` says them, this waits for the device."""
        return self.starts.diff().tolist() if self._lengths is None else self._lengths

    @functools.cached_property
    def longest(self) -> int:
        """The tokens of the longest sequence."""
        return max(self.lengths) if self._longest is None else self._longest

    @classmethod
    def of_mask(cls, attention_mask, least: int = 1):
        """The unpadding of a mask [B, T] of 0 and 1; None for holes in a row or too little padding."""
        real = attention_mask != 0
        changes = F.pad(real, (1, 1)).diff(dim=-1)  # of a solid row: one start and one end
        counts = real.sum(-1)
        lengths, changes = torch.stack((counts, changes.sum(-1))).tolist()
        if sum(lengths) == real.numel():
            return cls(real.shape, None, lengths)
        if real.numel() - sum(lengths) < least or max(changes) > 2 or not any(lengths):
            return None
        # Their number is known, so that an accelerator need not be queried again.
        indices = torch.nonzero_static(real.flatten(), size=sum(lengths)).flatten()
        return cls(real.shape, indices, lengths, F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)))

    @classmethod
    def of_positions(cls, position_ids):
        """The unpadding of rows of several sequences, by positions [B, T]; None where each row is one sequence."""
        starts = starts_of(position_ids)
        if not starts[:, 1:].any():
            return None
        total = starts.numel()
        lengths = F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=total).diff().tolist()
        return cls(starts.shape, None, lengths)

    def with_masks(self, masks):
        """The same sequences, each attended to with its own mask."""
        other = copy.copy(self)
        other.masks, other.bias = masks, None
        return other

    def with_bias(self, bias):
        """The same sequences with a bias of the scores."""
        other = copy.copy(self)
        other.bias = bias
        return other

    def mask_of_each(self):
        """For each sequence its mask, its part of the bias, or None."""
        if self.masks is not None:
            return self.masks
        return (None if self.bias is None else self.bias[..., :length, :length] for length in self.lengths)

    def gather(self, states):
        """[B, T, ...] -> [1, N, ...]; a batch dimension of 1 is taken for all rows."""
        states = states.expand(*self.shape, *states.shape[2:]).flatten(0, 1)
        return (states if self.indices is None else states.index_select(0, self.indices))[None]

    def scatter(self, states):
        """[1, N, C] -> [B, T, C], zeros at the padding."""
        if self.indices is None:
            return states.view(*self.shape, -1)
        flat = states.new_zeros(self.shape[0] * self.shape[1], states.shape[-1])
        return flat.index_copy(0, self.indices.to(states.device), states[0]).view(*self.shape, -1)

    def split(self, states):
        """[1, heads, N, D] -> one [1, heads, length, D] for each sequence."""
        return states.split(self.lengths, dim=2)


def attend_unpadded(module, query, key, value, unpadding, **kwargs):
    """Each sequence of an unpadded row attends only to itself, by one call with its own mask.

    Queries [1, H, N, D], keys and values [1, K, N, D] -> the weighted values [1, N, H, D].
    """
    masks = unpadding.mask_of_each()
    parts = zip(unpadding.split(query), unpadding.split(key), unpadding.split(value), masks, strict=True)
    outputs = [sdpa_attention(module, q, k, v, mask, **kwargs)[0] for q, k, v, mask in parts if q.shape[2]]
    return torch.cat(outputs, dim=1)


def find_unpadding(config, attention_mask, position_ids, least_saving: int = 0, device: str = "cpu"):
    """The unpadding that gives the same result with less work, or None for the plain way.

    It costs every layer an attention call for each sequence, which must be less than it saves: padding is left in where
    its tokens, times the square of the width, are fewer than `least_saving`.

    Only on this kind of `device`: counting the real tokens makes the host wait for an accelerator. The mask [B, T] of 0
    and 1 and the positions [B, T] are those that the caller gave, or None.
    """
    if (config.is_decoder or config.is_encoder_decoder) and "sliding_attention" in config.layer_types:
        return None
    rows = position_ids if attention_mask is None else attention_mask
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or rows.device.type != device or is_mapped(rows):
        return None
    least = -(-least_saving // config.hidden_size**2)
    return Unpadding.of_positions(rows) if attention_mask is None else Unpadding.of_mask(rows, least)


def plan_without_padding(stack, inputs, unpadding):
    """The inputs of layers that read the packed row [1, N, C]: see `Stack.plan`.

    Where the masks would be stands the unpadding, in an encoder's window with a mask for each sequence.
    """
    config, device = stack.config, inputs.hidden_states.device
    masks, size = dict.fromkeys(config.layer_types, unpadding), config.sliding_window
    if "sliding_attention" in masks:
        index = torch.arange(unpadding.longest, device=device)
        near = ((index[:, None] - index[None, :]).abs() <= size)[None, None]
        windows = [None if length <= size + 1 else near[..., :length, :length] for length in unpadding.lengths]
        masks["sliding_attention"] = unpadding.with_masks(windows)
    if stack.has_shared_bias:
        # Of the longest row, whatever a cache that the prompt fills has room for.
        positions = torch.arange(unpadding.shape[1], device=device)
        bias = stack.shared_bias(inputs.hidden_states, positions, unpadding.shape[1])
        bias = with_bias(config, None, bias, positions if stack.is_causal else None)
        masks = dict.fromkeys(masks, unpadding.with_bias(bias))
    plan = stack.plan(inputs, masks={})
    rotations = {
        kind: tuple(unpadding.gather(each.transpose(1, 2)).transpose(1, 2) for each in pair)
        for kind, pair in plan.rotations.items()
    }
    if inputs.input_ids is not None:
        plan.earlier.input_ids = (unpadding.gather(inputs.input_ids), True)
    vectors = None if plan.token_inputs is None else unpadding.gather(plan.token_inputs)
    return plan._replace(masks=masks, rotations=rotations, token_inputs=vectors)


class PaddingCache:
    """Stands before a cache while an unpadded prompt runs: the cache gets zeros where the padding was.

    Args:
        cache: an empty one of the library's.
        unpadding: where the real tokens of the prompt lie.
    """

    def __init__(self, cache, unpadding: Unpadding):
        self.cache, self.unpadding = getattr(cache, "self_attention_cache", cache), unpadding

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Keep keys and values [1, K, N, D] as [B, K, T, D]; returns them as they came."""
        padded = (self._padded(states) for states in (key_states, value_states))
        self.cache.update(*padded, layer_idx, *args, **kwargs)
        return key_states, value_states

    def _padded(self, states):
        flat = states.transpose(1, 2).flatten(2)  # [1, N, K * D]
        return self.unpadding.scatter(flat).unflatten(-1, (states.shape[1], -1)).transpose(1, 2)


def unpadding_in(layer_inputs) -> Unpadding | None:
    """The unpadding that stands where the masks of these inputs would, or None."""
    mask = next(iter(layer_inputs.masks.values()), None)
    return mask if isinstance(mask, Unpadding) else None


def is_recording(config, named: dict) -> bool:
    """Whether something of each layer is requested, by what a forward gives layers by name or by the config."""
    names = ("output_hidden_states", "output_attentions", "output_router_logits")
    return any(named.get(name, getattr(config, name, False)) for name in names)


def knows_unpadding(stack) -> bool:
    """Whether all self-attention of a stack tells the sequences of a packed row apart."""
    parts = [getattr(layer, "self_attn", None) for layer in stack.layers]
    return all(
        getattr(type(part), "forward", None) is Attention.forward
        and (isinstance(part, KnowsUnpadding) or not part.has_relative_terms)
        for part in parts
    )


class KnowsUnpadding:
    """Mixed into an attention: each sequence of an unpadded row has the position terms that it has by itself."""

    relative_keys: Any
    relative_bias: Any

    def _with_terms(self, query, key, attention_mask, distances, places):
        whole = super()._with_terms  # type: ignore[misc]
        if not isinstance(attention_mask, Unpadding):
            return whole(query, key, attention_mask, distances, places)
        has_own = self.relative_keys is not None or self.relative_bias is not None
        if not has_own and attention_mask.bias is not None and attention_mask.bias.shape[1] == query.shape[1]:
            return query, attention_mask  # it has the bias of all layers
        return query, attention_mask.with_masks(self._masks(attention_mask, whole, query, key, distances))

    def _masks(self, unpadding, whole, query, key, distances):
        """One mask a sequence, made when it is due."""
        parts_of_each = zip(unpadding.split(query), unpadding.split(key), strict=True)
        for mask, parts in zip(unpadding.mask_of_each(), parts_of_each, strict=True):
            yield whole(*parts, mask, distances, torch.arange(parts[0].shape[2], device=query.device))[1]


# Scores of a sequence, times the width of all heads, up to which a separate matmul costs more than padding it, on a
# CPU. By hand, between two measurements: BERT of 6 x 256 gains a third with rows of 3 to 6 tokens and nothing with 20
# to 60.
_SHORT = 1 << 19


def are_short(unpadding, query) -> bool:
    """Whether all sequences of queries [1, H, N, D] are short enough to be padded to the longest."""
    return unpadding.longest**2 * query.shape[1] * query.shape[3] <= _SHORT


def attend_side_by_side(module, query, key, value, unpadding, **kwargs):
    """Attention of each sequence to itself, one under the other.

    Every sequence stands from its row's first column on, so that a causal one needs no mask: padding comes after all
    that is read. In the padding stands the first token of the same sequence, so that a NaN reaches no other one.

    Args:
        query: [1, H, N, D]; `key` and `value` [1, K, N, D].
        unpadding: where the sequences lie; it may have a bias of the scores, a decoder's of which hides what comes
            later.

    Returns:
        [1, N, H, D], contiguous.
    """
    tokens, slots, is_real = _side_by_side(unpadding, query.device)
    # [n, H or K, L, D]
    query, key, value = (each[0].transpose(0, 1)[tokens].transpose(1, 2) for each in (query, key, value))
    if unpadding.bias is not None:
        mask = unpadding.bias[
            ..., : tokens.shape[1], : tokens.shape[1]
        ]  # a batch may be wider than its longest sequence
        mask = mask if is_real is None else mask.masked_fill(~is_real, torch.finfo(mask.dtype).min)
    else:
        mask = None if module.is_causal else is_real
    output = sdpa_attention(module, query, key, value, mask, **kwargs)[0]  # [n, L, H, D]
    return output.flatten(0, 1)[slots][None]


def _side_by_side(unpadding, device):
    """The token in each slot of a padded batch, int64 [n, L], and each token's slot, int64 [N].

    Third, which slots hold a token, bool [n, 1, 1, L]; None if all do.
    """
    if unpadding.side_by_side is None:
        lengths = [length for length in unpadding.lengths if length]
        longest, total = max(lengths), sum(lengths)
        with device:  # whatever the default device is
            counts, columns = torch.tensor(lengths), torch.arange(longest)
            starts = counts.cumsum(0) - counts
            rows = torch.repeat_interleave(counts, output_size=total)
            is_real = columns < counts[:, None]
            tokens = starts[:, None] + columns * is_real
            slots = rows * longest + torch.arange(total) - starts[rows]
        known = None if min(lengths) == longest else is_real[:, None, None]
        unpadding.side_by_side = tokens, slots, known
    return unpadding.side_by_side
