"""Value embeddings (Jordan et al., 2024), of "modded-nanogpt"."""

import torch
from torch import nn

from .attention import Attention
from .blocks import block, leave, read


@block("attention_type", "value_embeddings")
class ValueEmbeddings(Attention):
    """Values are own * v + looked_up * e, with e a token's vector in a table of the first layer, which all read."""

    def __init__(self, config, layer_idx, is_causal):
        super().__init__(config, layer_idx, is_causal)
        self.value_shares = nn.Parameter(torch.tensor([0.5, 0.5]))
        if layer_idx == 0:
            self.value_table = nn.Embedding(config.stack_sizes(is_causal)[1], self.v_proj.out_features)

    def before_cache(self, key, value, earlier):
        if self.layer_idx == 0:
            input_ids = read(earlier, "input_ids")
            if input_ids is None:
                raise ValueError("value embeddings are looked up by input_ids: give them, not inputs_embeds.")
            leave(earlier, "value_embeddings", self._split_heads(self.value_table(input_ids)))
        own, looked_up = self.value_shares
        return key, own * value + looked_up * read(earlier, "value_embeddings").to(value.device)
