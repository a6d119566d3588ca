"""Value residual (Zhou et al., 2024), "Value Residual Learning"."""

import torch
from torch import nn

from .attention import Attention
from .axes import SHARED
from .blocks import block, leave, read


@block("attention_type", "value_residual")
class ValueResidual(Attention):
    """After the first layer, values are own * v + first * v1, with v1 the first layer's values of the same tokens."""

    tensor_parallel_plan = {"": SHARED}

    def __init__(self, config, layer_idx, is_causal):
        super().__init__(config, layer_idx, is_causal)
        if layer_idx > 0:
            self.value_shares = nn.Parameter(torch.tensor([0.5, 0.5]))

    def before_cache(self, key, value, earlier):
        if self.layer_idx == 0:
            leave(earlier, "values", value)
            return key, value
        own, first = self.value_shares
        return key, own * value + first * read(earlier, "values").to(value.device)
