"""Token vectors that are scaled where they are looked up, so that all who call the embedding see them scaled."""

from dataclasses import dataclass

import torch
from torch import nn

from .axes import FLAG, Part, axis


@dataclass(eq=False, repr=False)
class ScaledEmbeddingFields(Part):
    """Where token vectors are scaled."""

    scales_in_embedding: bool | str = axis(
        False,
        (*FLAG, "rounded"),
        "embeddings",
        "the embedding's own output is scaled, inputs_embeds are not; rounded: by the factor in the weights' dtype",
    )


class ScaledEmbedding(nn.Embedding):
    """An embedding that multiplies what it looks up: tokens int [B, T] -> [B, T, C].

    Noise on its output (NEFTune), trained prompts and `inputs_embeds` that its caller changes are then as large next to
    its vectors as in the official classes that scale here. PEFT reads `embed_scale` by this name.
    """

    def __init__(self, vocab_size, width, padding_idx, config):
        super().__init__(vocab_size, width, padding_idx)
        self.embed_scale, self.is_rounded = config.embedding_scale, config.scales_in_embedding == "rounded"

    def forward(self, input_ids):
        scale = torch.tensor(self.embed_scale, dtype=self.weight.dtype) if self.is_rounded else self.embed_scale
        return super().forward(input_ids) * scale
