"""Token dropout (Rives et al., 2021; Lin et al., 2023): masked tokens have no vector, and the others make up for it.

B batch, T length, C width of the embeddings.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .axes import Part, axis
from .positions import starts_of, texts_of


@dataclass(eq=False, repr=False)
class TokenDropoutFields(Part):
    """The fields of token dropout."""

    token_dropout: float | None = axis(
        None,
        "a probability from 0 to 1",
        "embeddings",
        "p: masked tokens are 0, others times (1 - p) / (1 - their share)",
    )
    mask_token_id: int | None = axis(None, "an integer of 0 or more", "tokens", "the mask, for token_dropout")

    def check(self):
        """Masked tokens are known, and are tokens of the vocabulary."""
        if self.mask_token_id is not None and self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id must be a token from 0 to {self.vocab_size - 1}, not {self.mask_token_id}."
            )
        if self.token_dropout is not None and (self.mask_token_id is None or not 0 < self.token_dropout < 1):
            fix = "it needs mask_token_id and a share above 0 and below 1; set both or leave it out"
            raise ValueError(f"token_dropout={self.token_dropout} with mask_token_id={self.mask_token_id}: {fix}.")


class TokenDropout(nn.Module):
    """Embeddings, zero for masked tokens, scaled as a dropout of probability p would scale them in training.

    In training a share p of the tokens is masked. A text of which another share is masked, none in most uses, is scaled
    by (1 - p) / (1 - share), as in ESM-2. Embeddings that the caller gives are left as they are.
    """

    def __init__(self, config):
        super().__init__()
        self.share, self.mask_token = config.token_dropout, config.mask_token_id

    def forward(self, states, input_ids, attention_mask=None, position_ids=None):
        """States [B, T, C] of tokens int [B, T] -> [B, T, C].

        Args:
            states: the tokens' vectors.
            input_ids: the tokens.
            attention_mask: [B, T] of 0 and 1; a mask of another form says nothing of the length of a text.
            position_ids: int [B, T], which begin again where a row holds several texts; each has its own share.
        """
        is_masked = input_ids == self.mask_token
        counts = is_masked.float()
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            lengths, counts = attention_mask.sum(-1, keepdim=True), counts.sum(-1, keepdim=True)
        elif position_ids is None or attention_mask is not None:
            lengths, counts = torch.full_like(counts[:, :1], counts.shape[1]), counts.sum(-1, keepdim=True)
        else:
            texts = starts_of(texts_of(position_ids)).cumsum(-1) - 1
            none = torch.zeros_like(counts)
            lengths = none.scatter_add(1, texts, torch.ones_like(counts)).gather(1, texts)
            counts = none.scatter_add(1, texts, counts).gather(1, texts)
        kept = (1 - counts / lengths.clamp(min=1)).clamp(min=torch.finfo(torch.float32).eps)[..., None]
        return (states.masked_fill(is_masked[..., None], 0) * (1 - self.share) / kept).to(states.dtype)
