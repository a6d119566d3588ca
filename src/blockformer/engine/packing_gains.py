"""Whether a float32 matrix in oneDNN's layout is multiplied faster than plain layers, for its model's work.

O outputs of a layer, I inputs.
"""

import torch
from torch import nn

from ..model.attention import Attention
from ..model.stack import Stack
from . import onednn
from .few_rows import MOST_ROWS
from .linear import quickest
from .measure import MANY_ROWS, is_measured, is_quicker, random_matrix, some_weights

# More rows than `MOST_ROWS`, such as some texts' or beams'.
_SOME_ROWS = 16


def rows_of_layers(model: nn.Module) -> dict[nn.Module, int]:
    """For each layer of a stack the number of rows that its products must not be slower with, see `linear.kind_of`.

    A decoder writes one text at a time; the decoder of an encoder-decoder several, or some beams. Keys and values of a
    source are products of all its tokens.
    """
    rows: dict[nn.Module, int] = {}
    for stack in (each for each in model.modules() if isinstance(each, Stack) and each.is_causal):
        rows |= dict.fromkeys(stack.modules(), MOST_ROWS if stack.config.is_encoder_decoder else 1)
        for part in stack.modules():
            if isinstance(part, Attention) and part.is_cross_attention:
                rows |= {part.k_proj: MANY_ROWS, part.v_proj: MANY_ROWS}
    head = getattr(model, "lm_head", None)
    return rows if head is None or not rows else {**rows, head: min(rows.values())}


def is_quicker_packed_for(rows: int, outputs: int, inputs: int) -> bool:
    """Whether a packed float32 matrix [outputs, inputs] is faster than a plain one.

    With few rows it must not be slower, and faster with more of them.
    """

    def measure():
        if rows == MANY_ROWS:
            return _is_faster(MANY_ROWS, outputs, inputs, 0.95)
        is_level = all(_is_faster(few, outputs, inputs, 1.05) for few in sorted({rows, MOST_ROWS}))
        return is_level and _is_faster(_SOME_ROWS, outputs, inputs, 0.9)

    return is_measured(("packed", rows, outputs, inputs), measure)


@torch.no_grad()
def _is_faster(rows: int, outputs: int, inputs: int, share: float) -> bool:
    """Whether the packed matrix takes less than that share of the plain one's time with so many rows."""
    states, weights = random_matrix(rows, inputs), some_weights(rows, outputs, inputs)
    packed, product = [onednn.packed(weight) for weight in weights], quickest(rows, outputs, inputs)
    ours, others = (
        lambda by=by, kept=kept: [by(states, weight) for weight in kept]
        for by, kept in ((onednn.product, packed), (product, weights))
    )
    return is_quicker(ours, others, rounds=5, share=share)
