"""Real tokens of a padded batch, packed into one row and unpacked again, so that no layer works on padding.

Norms, projections and the feed-forward network treat each token by itself: they run on the packed row. Attention runs
once for each sequence. The result equals the padded run's, with zeros where the padding was.

B batch, T padded length, N real tokens, C hidden size.
"""

import itertools

import torch
from torch.nn import functional as F

from .compat import is_mapped


class Unpadding:
    """Which tokens of [B, T] are real, and where each sequence lies in the packed row.

    Args:
        indices: int64 [N], the real tokens' places in the flattened batch, sequence after sequence; None: all of them.
        lengths: the sequences' lengths in tokens, together N.
    """

    def __init__(self, shape, indices, lengths: list):
        self.shape, self.indices, self.lengths = tuple(shape), indices, lengths

    @classmethod
    def of_mask(cls, attention_mask, least: int = 1):
        """The unpadding of a mask [B, T] of 0 and 1; None for holes in a row or too little padding."""
        real = attention_mask != 0
        changes = F.pad(real, (1, 1)).diff(dim=-1)  # of a solid row: one start and one end
        lengths, changes = torch.stack((real.sum(-1), changes.sum(-1))).tolist()
        if sum(lengths) == real.numel():
            return cls(real.shape, None, lengths)
        if real.numel() - sum(lengths) < least or max(changes) > 2 or not any(lengths):
            return None
        # Their number is known, so that an accelerator need not be queried again.
        return cls(real.shape, torch.nonzero_static(real.flatten(), size=sum(lengths)).flatten(), lengths)

    @classmethod
    def of_positions(cls, position_ids):
        """The unpadding of rows of several sequences, by positions [B, T]; None where each row is one sequence."""
        starts = _starts(position_ids)
        if not starts[:, 1:].any():
            return None
        total = starts.numel()
        lengths = F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=total).diff().tolist()
        return cls(starts.shape, torch.arange(total, device=starts.device), lengths)

    def gather(self, states):
        """[B, T, ...] -> [1, N, ...]; a batch dimension of 1 is taken for all rows."""
        states = states.expand(*self.shape, *states.shape[2:])
        return states.flatten(0, 1).index_select(0, self.indices)[None]

    def scatter(self, states):
        """[1, N, C] -> [B, T, C], zeros at the padding."""
        flat = states.new_zeros(self.shape[0] * self.shape[1], states.shape[-1])
        return flat.index_copy(0, self.indices.to(states.device), states[0]).view(*self.shape, -1)

    def split(self, states):
        """[1, heads, N, D] -> one [1, heads, length, D] for each sequence."""
        return states.split(self.lengths, dim=2)


def attend_unpadded(attend, unpadding, module, query, key, value, masks, **kwargs):
    """Each sequence of an unpadded row attends only to itself, by one call of `attend` with its own mask.

    Queries [1, H, N, D], keys and values [1, K, N, D] -> the weighted values [1, N, H, D], None for the probabilities.
    """
    states = zip(*(unpadding.split(each) for each in (query, key, value)), strict=True)
    masks = itertools.repeat(None) if masks is None else masks
    pairs = zip(states, masks, strict=False)
    outputs = [attend(module, *parts, mask, **kwargs)[0] for parts, mask in pairs if parts[0].shape[2]]
    return torch.cat(outputs, dim=1), None


def find_unpadding(config, attention_mask, position_ids, least_saving: int = 0, device: str = "cpu"):
    """The unpadding that gives the same result with less work, or None for the plain way.

    It costs every layer an attention call for each sequence, which must be less than it saves: padding is left in where
    its tokens, times the square of the width, are fewer than `least_saving`.

    Only on this kind of `device`: counting the real tokens makes the host wait for an accelerator. The mask [B, T] of 0
    and 1 and the positions [B, T] are those that the caller gave, or None.
    """
    if config._attn_implementation != "sdpa" or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if (config.is_decoder or config.is_encoder_decoder) and "sliding_attention" in config.layer_types:
        return None
    given = position_ids if attention_mask is None else attention_mask
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.device.type != device or is_mapped(given):
        return None
    least = -(-least_saving // config.hidden_size**2)
    return Unpadding.of_positions(given) if attention_mask is None else Unpadding.of_mask(given, least)


def sequence_numbers(position_ids):
    """Which sequence of its row a token belongs to, int64 [B, T], where rows hold several."""
    return _starts(position_ids).cumsum(-1)


def _starts(position_ids):
    """Whether a sequence starts at a token, bool [B, T]: the position does not continue the one before."""
    return F.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True)
