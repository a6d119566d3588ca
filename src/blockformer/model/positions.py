"""How a model learns of order: what all position types share. Each has its own file.

B batch, T query length, S key length, H heads, D head size, C hidden size.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .axes import BLOCKS, SHARED, Part, axis

POSITION_TYPES = tuple(
    "learned sinusoidal sinusoidal_halves sinusoidal_inclusive rotary relative_bias learned_relative_bias "
    "relative_key relative_key_query alibi disentangled none".split()
)
# Positions that are computed, that have a table, and that have a bias of the scores.
SINUSOIDAL = ("sinusoidal", "sinusoidal_halves", "sinusoidal_inclusive")
LEARNED, RELATIVE_BIAS = ("learned", "learned_relative_bias"), ("relative_bias", "learned_relative_bias")
RELATIVE_KEYS = ("relative_key", "relative_key_query")


@dataclass(eq=False, repr=False)
class PositionFields(Part):
    """The fields that say how the model learns of order."""

    position_type: str = axis("rotary", POSITION_TYPES, "positions", "how the model learns of order")
    max_position_embeddings: int = axis(
        2048, "a positive integer", "size", "tokens of context: rows of a learned table, or length in training"
    )

    def check(self):
        """The position type is one of this topology."""
        kind, is_encoder = self.position_type, not (self.is_decoder or self.is_encoder_decoder)
        if not {"alibi": self.is_decoder, "disentangled": is_encoder}.get(kind, True):
            need = "a decoder" if kind == "alibi" else "an encoder"
            raise ValueError(f"position_type='{kind}' needs {need}: choose another position type.")

    def fill_rope_parameters(self, given, rope_theta):
        """Refuse rotary parameters, which only rotary positions have; those take them as `rotary.RotaryFields` says."""
        kind, named = self.position_type, {"rope_theta": rope_theta, "query_growth": self.query_growth}
        named["rope_parameters"] = given or self.rope_parameters or None
        for name in (name for name, value in named.items() if value is not None):
            raise ValueError(f"{name} is set but position_type is '{kind}': drop it, or set position_type='rotary'.")
        self.rope_parameters: dict | None = None

    def share_out(self, plan, has_cross_attention):
        """Vectors of distances are whole in each process, and their gradients are added."""
        if self.position_type in RELATIVE_KEYS:
            plan["layers.*.self_attn.relative_keys.embedding"] = SHARED


def adds_to_scores(kind: str) -> bool:
    """Whether a position type has a bias of the scores or any other term of them."""
    own = getattr(BLOCKS["position_type"].get(kind), "gives", None)
    return own == "biases" or kind in (*RELATIVE_BIAS, *RELATIVE_KEYS, "alibi", "disentangled")


class ComputedPositions(nn.Module):
    """Positions from frequencies that are computed, not trained, and stay in float32 whatever the model's dtype.

    A frequency in bfloat16 would move far positions by whole tokens, so a cast leaves the buffer as it is.
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
        own = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = (self.compute_frequencies() if own.is_meta else own).to(self.inv_freq.device)
        return self


def counted_positions(is_token, columns, of_padding, first):
    """Positions int64 [B, T]: `is_token` bool [B, S] says which keys are real, its `columns` are the new tokens'.

    Real ones are counted from `first` on; padding takes its positions from `of_padding` [T].
    """
    positions = is_token.long().cumsum(-1)[:, columns] + (first - 1)
    return torch.where(is_token[:, columns], positions, of_padding)


def flattened_positions(cu_seq_lens, shape):
    """Positions [B, T] in rows that hold several sequences, each counted from 0 on.

    `cu_seq_lens` int [n + 1] says where each sequence starts in the flattened batch, and where it ends, as
    `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` does.
    """
    if cu_seq_lens.dim() != 1 or len(cu_seq_lens) < 2:
        raise ValueError(f"cu_seq_lens_q must be [sequences + 1], each start and the end, not {[*cu_seq_lens.shape]}.")
    positions = torch.arange(shape.numel(), dtype=cu_seq_lens.dtype, device=cu_seq_lens.device)
    return (positions - cu_seq_lens[torch.searchsorted(cu_seq_lens, positions, right=True) - 1]).long().view(shape)


def texts_of(position_ids):
    """Positions [B, T] where they say that a row holds several texts, each of which counts from 0; else 0, 1, 2, ..."""
    goes_on = position_ids.diff(dim=-1) == 1
    are_texts = (goes_on | (position_ids[:, 1:] == 0)).all(-1, keepdim=True) & goes_on.any(-1, keepdim=True)
    return torch.where(are_texts, position_ids, torch.arange(position_ids.shape[1], device=position_ids.device))


def starts_of(position_ids):
    """Whether a sequence starts at a token, bool [B, T]: the position does not go on. Their sum numbers them."""
    return F.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True)


def rotations_of(rotary: nn.Module | None, config, hidden_states, position_ids) -> dict:
    """Layer type -> cosines, signed sines and, if queries grow, their factor; empty without rotary positions."""
    if rotary is None:
        return {}
    if isinstance(rotary, nn.ModuleDict):
        return {layer_type: part(hidden_states, position_ids) for layer_type, part in rotary.items()}
    return dict.fromkeys(config.layer_types, rotary(hidden_states, position_ids))


def rotate(states, cos, sin):
    """Turn each pair (x_i, x_{i + R/2}) of R channels by its position's angle: (x cos - y sin, y cos + x sin).

    Shapes: states [B, H, T, D]; cos and signed sin [B, 1, T, R], of `RotaryPositions` -> [B, H, T, D].
    """
    if (size := cos.size(3)) < states.shape[-1]:  # fails for transformers' rotary modules, whose sines have no signs
        return torch.cat((rotate(states[..., :size], cos, sin), states[..., size:]), dim=-1)
    swapped = torch.cat(states.chunk(2, dim=-1)[::-1], dim=-1)  # the compiler reads a rolled tensor number by number
    return states * cos + swapped * sin
