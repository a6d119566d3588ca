"""Positions that are added to the tokens' vectors: their fields, where padding stands among them, and learned ones.

B batch, T query length, S key length, C hidden size.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .axes import Part, axis
from .positions import LEARNED, SINUSOIDAL


@dataclass(eq=False, repr=False)
class VectorPositionFields(Part):
    """The fields of positions that have vectors."""

    position_offset: int = axis(0, "an integer of 0 or more", "positions", "rows of a learned table before position 0")
    padding_position: str = axis(
        "index",
        ("index", "before", "by_token"),
        "positions",
        "padding's own: its index in the row, or the one before the first token's; by_token: pad_token_id's too",
    )

    def check(self):
        """There is a position before the first where one is needed."""
        has_vectors = self.position_type in (*LEARNED, *SINUSOIDAL)
        if self.padding_position != "index" and not (has_vectors and self.position_offset):
            need = "learned or sinusoidal positions and position_offset of 1 or more"
            raise ValueError(f"padding_position='{self.padding_position}' needs {need}: set them, or leave it out.")


def padding_before(config, places, is_token, input_ids):
    """Which keys are real, bool [B, S], or [B, T] without a mask, and padding's position [T], before the first (OPT).

    "by_token", `pad_token_id` is padding wherever it stands, also unmasked (RoBERTa).

    Args:
        places: int [T], indices of the tokens among the keys.
        is_token: bool [B, S], which keys a mask shows; None: all.
        input_ids: int [B, T], or None for embeddings.
    """
    if config.padding_position == "by_token" and input_ids is not None and config.pad_token_id is not None:
        own = input_ids != config.pad_token_id
        is_token = own if is_token is None else is_token.index_copy(1, places, is_token[:, places] & own)
    return is_token, torch.full_like(places, -1)


class LearnedPositions(nn.Embedding):
    """One trained vector for each position, as in BERT and GPT-2. position_ids [B, T] -> [B, T, C].

    The first `position_offset` rows belong to no token. Padding may take the last, which learns unless `by_token`.
    """

    def __init__(self, config):
        self.offset = offset = config.position_offset
        padding_idx = offset - 1 if config.padding_position == "by_token" else None
        super().__init__(config.max_position_embeddings + offset, config.embedding_size, padding_idx)

    def forward(self, position_ids):
        return super().forward(position_ids + self.offset if self.offset else position_ids)
