"""A cache that a caller of `generate` passes, or gets back: whether a text can go on from it, and be appended to it.

B rows, T tokens of the prompt.
"""

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..model.compat import CACHE
from .fallbacks import OtherLoop
from .step_parts import has_state, held_by

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def seen_cache(named: dict):
    """The cache that the caller sees after a call of `generate` with these arguments of its loop; None if none is seen.

    Raises:
        OtherLoop: it is of another kind than a decoder's without beams.
    """
    cache, settings = named.get(CACHE), named["generation_config"]
    is_returned = getattr(settings, "return_dict_in_generate", False)
    if cache is None or (getattr(cache, "is_of_generate", False) and not is_returned):
        return None
    if type(cache) is not DynamicCache or cache.offloading or (getattr(settings, "num_beams", None) or 1) > 1:
        raise OtherLoop("return_dict_in_generate is given" if is_returned else f"a {type(cache).__name__} is given")
    return cache


def tokens_in(cache, stack, input_ids, named: dict, is_late: bool) -> int:
    """How many of the prompt's tokens int [B, T] a cache holds.

    Args:
        stack: the decoder.
        named: arguments of the loop.
        is_late: whether more tokens may be written than are kept, which no state can take back.

    Raises:
        OtherLoop: its layers are of another kind, or it does not hold the beginning of this prompt in this model.
    """
    layers = cache.layers
    if not all(type(layer) in _LAYERS or has_state(layer) for layer in layers):
        raise OtherLoop("a cache of layers of another kind is given")
    if is_late and any(map(has_state, layers)):
        raise OtherLoop("a cache with states is given")
    keys = [held_by(layer)[0] for layer in layers if has_state(layer) or layer.is_initialized]
    keys = [each for each in keys if each is not None]
    if not keys:
        return 0
    (rows, length), weight = input_ids.shape, stack.embed_tokens.weight
    kinds = {(len(each), each.dtype, each.device) for each in keys}
    mask, settings = named.get("attention_mask"), named["generation_config"]
    seen = getattr(settings, "_mask_length", -1) if mask is None else mask.shape[1]  # a prompt may begin behind it
    held = next(layer.get_seq_length() for layer in layers if not has_state(layer))
    if len(keys) != len(stack.layers) or kinds != {(rows, weight.dtype, weight.device)} or seen != length:
        raise OtherLoop("a cache is given that does not hold the beginning of the prompt")
    if not 0 < held < length:
        raise OtherLoop("a cache is given that holds no less than the prompt")
    return held
