"""Whether a float32 matrix in oneDNN's layout is multiplied faster than plain layers, for what its model does.

O outputs of a layer, I inputs.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..stack import Stack
from . import onednn
from .few_rows import MOST_ROWS
from .linear import kind_of, quickest
from .measure import MANY_ROWS, is_measured, is_quicker, random_matrix, some_weights

# More rows than `MOST_ROWS`, such as some texts' or beams'.
_SOME_ROWS = 16


def rows_of_layers(model: nn.Module) -> dict[nn.Module, int]:
    """For each layer of a stack the number of rows that its products must not be slower with, see `linear.kind_of`.

    A decoder alone writes a text at a time; that of an encoder-decoder several, or some beams.
    """
    rows: dict[nn.Module, int] = {}
    for stack in (each for each in model.modules() if isinstance(each, Stack) and each.is_causal):
        rows |= dict.fromkeys(stack.modules(), MOST_ROWS if stack.config.is_encoder_decoder else 1)
    head = getattr(model, "lm_head", None)
    return rows if head is None or not rows else {**rows, head: min(rows.values())}


def is_quicker_packed_for(rows: int, outputs: tuple[int, ...], inputs: int) -> bool:
    """Whether a packed float32 matrix is faster than plain layers [each of the outputs, inputs] in its place.

    With few rows it must not be slower, and faster with more of them.
    """

    def measure():
        if rows == MANY_ROWS:
            return _is_faster(MANY_ROWS, outputs, inputs, 0.95)
        is_slower = not _is_faster(rows, outputs, inputs, 1.05)
        return not is_slower and _is_faster(_SOME_ROWS, outputs, inputs, 0.9)

    return is_measured(("packed", rows, outputs, inputs), measure)


@torch.no_grad()
def _is_faster(rows: int, outputs: tuple[int, ...], inputs: int, share: float) -> bool:
    states, weights = random_matrix(rows, inputs), some_weights(rows, sum(outputs), inputs)
    packed = [onednn.packed(weight) for weight in weights]
    if len(weights[0]) < sum(outputs):  # a part of a large head
        outputs = (len(weights[0]),)
    parts = [part for weight in weights for part in weight.split(outputs)]
    products = [quickest(kind_of(rows), part) or F.linear for part in parts[: len(outputs)]] * len(weights)

    def others():
        return [product(states, part) for product, part in zip(products, parts, strict=True)]

    return is_quicker(lambda: [onednn.product(states, weight) for weight in packed], others, rounds=5, share=share)
