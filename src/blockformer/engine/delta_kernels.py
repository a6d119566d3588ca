"""The gated delta rule by the kernels of the package `fla` (flash-linear-attention), where that is installed.

They take the place of the rule itself and of nothing else: projections, convolution, norm and cache are the layer's
own, so hooks see what they see without them. Products are computed in the layer's 16 bits, as in transformers; states
stay in float32.

B batch, T length, H value heads, K key size, V value size.
"""

import functools

import torch
from transformers.utils import logging
from transformers.utils.import_utils import is_flash_linear_attention_available

from ..model.compat import is_mapped
from .choices import is_enabled

logger = logging.get_logger(__name__)
DEVICES = ("cuda", "xpu")
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_KEY = 256  # that a kernel holds


@functools.cache
def kernels():
    """`fla`'s functions for a text and for one token, or None where it is missing, too old or cannot be imported."""
    if not is_flash_linear_attention_available():
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except Exception as error:  # of any kind: it compiles for this device
        logger.warning(f"fla is installed and cannot be imported ({error}): layers with a state run without it.")
        return None
    return chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def apply_rule(usual, layer, query, key, value, decay, step, state, sequences, dtype):
    """What `GatedDeltaRule.apply_rule` gives, by a kernel where there is one for these tensors.

    `usual` serves the others: float32 and float64, which the kernels round; texts in a row, which they take only one
    after the other; a token that learns, for which they have no gradient; and graphs that are traced.
    """
    if query.shape[2] == 1 and torch.is_grad_enabled():
        found = None
    else:
        found = kernels() if _fits(query, dtype) and sequences is None and is_enabled() else None
    if found is None:
        return usual(layer, query, key, value, decay, step, state, sequences, dtype)
    by_chunk, by_token = found
    given = [each.transpose(1, 2).to(dtype) for each in (query, key, value)]  # [B, T, H, K or V]
    rates = {"g": decay.transpose(1, 2), "beta": step.transpose(1, 2), "scale": 1.0}
    run = by_chunk if query.shape[2] > 1 else by_token
    output, state = run(*given, **rates, initial_state=state, output_final_state=True)
    return output.transpose(1, 2), state


def _fits(query, dtype) -> bool:
    fits = query.device.type in DEVICES and dtype in _DTYPES and query.shape[-1] <= _LARGEST_KEY
    return fits and not torch.compiler.is_compiling() and not is_mapped(query)
