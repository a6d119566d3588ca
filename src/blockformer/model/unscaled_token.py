"""A token that embeddings do not scale, with its own vector (T5Gemma 2, for the end of a picture)."""

import torch
from torch import nn
from transformers import initialization as init

from .scaled_embedding import ScaledEmbedding


class PartlyScaledEmbedding(ScaledEmbedding):
    """A `ScaledEmbedding` in which one token has the vector `unscaled` [C] in place of its row, as it is."""

    tied = {"decoder.embed_tokens.unscaled": "encoder.embed_tokens.unscaled"}  # where the two stacks share embeddings

    def __init__(self, vocab_size, width, padding_idx, config):
        super().__init__(vocab_size, width, padding_idx, config)
        self.unscaled_token_id = config.unscaled_token_id
        self.unscaled = nn.Parameter(torch.zeros(width))

    @classmethod
    def of(cls, table, config):
        """One like another embedding, fresh."""
        made = cls(table.num_embeddings, table.embedding_dim, table.padding_idx, config)
        made.initializer_factor = table.initializer_factor
        return made

    def init_tensors(self) -> None:
        """A fresh vector is 0."""
        init.zeros_(self.unscaled)

    def forward(self, input_ids):
        is_unscaled = (input_ids == self.unscaled_token_id)[..., None]
        vectors = super().forward(input_ids)
        return torch.where(is_unscaled, self.unscaled.to(vectors.dtype), vectors)
