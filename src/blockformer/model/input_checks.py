"""Checks of a model's inputs: what would give an obscure error or, worse, a silently wrong result, is refused here.

Shapes are always checked; values only on the CPU, and never in a traced graph. A ValueError names argument and fix.
"""

import torch
from transformers.utils import logging

from .compat import is_mapped, is_readable
from .positions import LEARNED

logger = logging.get_logger(__name__)
_AS_TENSORS = "use model(**tokenizer(text, return_tensors='pt'))"


def cached_length(past_key_values):
    """Tokens in the cache: an int, or a tensor for a static cache; 0 without a cache."""
    return 0 if past_key_values is None else past_key_values.get_seq_length()


def check_inputs(config, vocab_size, input_ids, inputs_embeds, attention_mask, past_key_values, types: dict, side=""):
    """Refuse inputs of a stack that cannot be right; shapes are as in `Stack.forward`.

    `types` are token types and task types [B, T] by name, or None; errors name the other arguments after `side`. A mask
    that is not [B, S] (4D, a dict, a block mask) is left to the backend. Returns whether it was read and hides nothing.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass exactly one of input_ids and inputs_embeds.")
    for name, ids in {f"{side}input_ids": input_ids, **types}.items():
        if ids is not None and not (isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32)):
            kind = ids.dtype if isinstance(ids, torch.Tensor) else f"{type(ids).__name__}: {_AS_TENSORS}"
            raise ValueError(f"{name} must be a tensor of int64 or int32, not {kind}.")
    inputs, width = (inputs_embeds, config.token_size) if input_ids is None else (input_ids, None)
    shape = list(inputs.shape)
    if input_ids is None and (len(shape) != 3 or shape[-1] != width):
        raise ValueError(f"{side}inputs_embeds must be [batch, length, {width}], not {shape}.")
    if input_ids is not None and len(shape) != 2:
        raise ValueError(f"{side}input_ids must be [batch, length], not {shape}: add a batch dimension.")
    batch, length = shape[:2]
    if batch == 0 or length == 0:
        raise ValueError(f"the input is empty (shape {shape}): pass at least one row with one token.")
    past = cached_length(past_key_values)
    hides_nothing = _check_mask(f"{side}attention_mask", attention_mask, inputs, past, past_key_values, config)
    _check_cache(config, past_key_values, batch, length, past)
    if (wrong := _outside(input_ids, vocab_size)) is not None:
        words = f"the token {wrong}, but the vocabulary has 0 to {vocab_size - 1}"
        raise ValueError(f"{side}input_ids holds {words}: does the tokenizer belong to this model?")
    # Without token types zeros are taken, which say nothing: some tokenizers give them always.
    for (name, ids), field in zip(types.items(), ("type_vocab_size", "task_type_vocab_size"), strict=False):
        field = "vocab_size" if ids is not None and name == "token_type_ids" and config.token_types_as_tokens else field
        if ids is not None and ids.shape != inputs.shape[:2]:
            raise ValueError(f"{name} must be [batch={batch}, length={length}], not {list(ids.shape)}.")
        if ids is not None and (wrong := _outside(ids, max(getattr(config, field), 1))) is not None:
            raise ValueError(f"{name} holds {wrong}, and {field} is {getattr(config, field)}: use smaller ids.")
    return hides_nothing


def check_source(stack, encoder_hidden_states, encoder_attention_mask, batch: int, cu_seq_lens) -> None:
    """Refuse an encoder's states [B, S, C], or their mask [B, S], that a batch of B rows cannot look at."""
    if encoder_hidden_states is None:
        return
    if not stack.has_cross_attention:
        raise ValueError("encoder_hidden_states needs cross-attention: set add_cross_attention=True in the config.")
    if cu_seq_lens is not None:
        raise ValueError("cu_seq_lens_q is not supported with cross-attention: give padded rows, each with a source.")
    shape, width = list(encoder_hidden_states.shape), stack.config.hidden_size
    if len(shape) != 3 or shape[-1] != width:
        raise ValueError(f"encoder_hidden_states must be [batch, length, {width}], not {shape}.")
    if shape[0] != batch or shape[1] == 0:
        many = f"{shape[0]} rows of {shape[1]} states, but what the decoder reads has {batch} rows"
        raise ValueError(f"encoder_hidden_states has {many}: pass one source per row.")
    if isinstance(mask := encoder_attention_mask, torch.Tensor) and mask.dim() < 4:
        if list(mask.shape) != shape[:2]:
            raise ValueError(f"the mask of the source must be {shape[:2]}, not {list(mask.shape)}.")
        _check_place(stack.config, "the mask of the source", mask, encoder_hidden_states.device)
        _check_mask_values(mask)


def check_positions(config, position_ids, shape, longest: int | None) -> None:
    """Refuse positions [1 or B, T] outside a learned table; warn once past the training length of rotary positions.

    `longest` are the tokens of the longest text where shapes show it; None reads the positions, on the CPU.
    """
    batch, length = shape
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ValueError(f"position_ids must be [batch={batch}, length={length}], not {list(position_ids.shape)}.")
    if torch.compiler.is_compiling() or (longest is None and not is_readable(position_ids)):
        return
    limit = config.max_position_embeddings
    if longest is None:
        first, last = _bounds(position_ids)
        if first < 0 and config.position_type in LEARNED and first < -config.position_offset:
            raise ValueError(f"position_ids holds {first}, but learned positions start at {-config.position_offset}.")
        longest = last + 1
    if longest > limit and config.position_type in LEARNED:
        fix = "shorten it, or train with a larger max_position_embeddings"
        raise ValueError(f"the text is {longest} tokens long, but the table of learned positions has {limit}: {fix}.")
    if longest > limit and config.position_type == "rotary" and config.rope_parameters.get("rope_type") == "default":
        trained = f"the {limit} tokens (max_position_embeddings) that the model was trained on"
        logger.warning_once(f"the text is longer than {trained}: expect worse results.")  # once: it names no length


def _bounds(numbers) -> tuple[int, int]:
    """The smallest and the largest of [B, T]."""
    ends = (numbers, numbers) if numbers.numel() == 1 else numbers.aminmax()
    return ends[0].item(), ends[1].item()


def _outside(ids, limit: int) -> int | None:
    """An id that is not from 0 to below `limit`; None where there is none or the ids are not to be read."""
    if ids is None or not is_readable(ids):
        return None
    smallest, largest = _bounds(ids)
    return smallest if smallest < 0 else largest if largest >= limit else None


def _check_mask(name: str, mask, inputs, past, past_key_values, config) -> bool:
    """A static cache knows its length as a tensor, or as a number if its first layer slides; its mask may cover all."""
    batch, length = inputs.shape[:2]
    if not isinstance(mask, torch.Tensor) or mask.dim() >= 4:
        return False
    if mask.dim() != 2 or mask.shape[0] != batch:
        raise ValueError(f"{name} must be [batch={batch}, length] (or 4D), not {list(mask.shape)}.")
    _check_place(config, name, mask, inputs.device)
    if (is_static := not isinstance(past, int)) and not is_readable(mask):
        return False
    past = int(past)
    rooms = (getattr(layer, "max_cache_len", None) for layer in getattr(past_key_values, "layers", ()))
    if mask.shape[1] != past + length and mask.shape[1] not in rooms:
        there = f"{past + length} ({past} of them cached)" if past else past + length
        raise ValueError(f"{name} covers {mask.shape[1]} tokens, but there are {there}: pass one per token.")
    return _check_mask_values(mask) and not is_static


def _check_place(config, name: str, mask, device) -> None:
    """Refuse a mask [B, S] on another device than the input, or without values where the library reads them."""
    if mask.device != device:
        raise ValueError(f"{name} is on '{mask.device}', but the input is on '{device}': move it there.")
    if is_mapped(mask) and not (config.is_decoder and config._attn_implementation == "eager"):
        raise ValueError(f"{name} cannot be read under torch.func.vmap: pass bool [B, 1, T, S], or do not map it.")


def _check_mask_values(mask) -> bool:
    """Refuse what is neither 0 nor 1; whether all are 1, as far as they may be read."""
    if not is_readable(mask):
        return False
    smallest, largest = _bounds(mask)
    if smallest < 0 or largest > 1 or (mask.is_floating_point() and not ((mask == 0) | (mask == 1)).all()):
        raise ValueError("a 2D attention_mask holds 1 for a token and 0 for padding, nothing else.")
    return smallest == 1


def own_layers(past_key_values) -> list:
    """The layers of the cache for self-attention."""
    own = getattr(past_key_values, "self_attention_cache", past_key_values)
    return getattr(own, "layers", None) or []


def _check_cache(config, past_key_values, batch: int, length: int, past) -> None:
    """The cache can work here, holds this batch's rows and has room for its tokens."""
    own = getattr(past_key_values, "self_attention_cache", past_key_values)
    if getattr(own, "offloading", False) and not torch.cuda.is_available():
        raise ValueError("an offloaded cache needs a CUDA device, which this machine lacks: use another cache.")
    layers = own_layers(past_key_values)
    keys = getattr(layers[0], "keys", None) if layers else None
    if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.shape[0] != batch:
        rows = f"{keys.shape[0]} rows, the input has {batch}"
        raise ValueError(f"past_key_values holds {rows}: use a cache of the same batch.")
    for number, (held, kind) in enumerate(zip(layers, config.layer_types, strict=False)):
        if not hasattr(held, "update") and kind in ("full_attention", "sliding_attention"):
            raise ValueError(f"past_key_values has no keys for layer {number}: use DynamicCache(config=model.config).")
    if not torch.compiler.is_compiling():
        on_accelerator = isinstance(past, torch.Tensor) and past.device.type != "cpu"
        check_room(layers, length if on_accelerator else past + length)


def check_room(layers, length) -> None:
    """Refuse a text of `length` tokens that a static cache has no room for."""
    for layer in layers:
        room = getattr(layer, "max_cache_len", None)
        if room is not None and length > room and not getattr(layer, "is_sliding", False):
            needs = f"{room} tokens (max_cache_len), but the text needs {int(length)}"
            raise ValueError(f"past_key_values has room for {needs}: make it larger or shorten the text.")


def check_early_exit(generation_config, depth: int) -> None:
    """Refuse `assistant_early_exit` if a text cannot be drafted with so many of the `depth` first layers."""
    count = generation_config.assistant_early_exit
    if count is not None and (type(count) is not int or not 0 < count <= depth):
        use = f"an integer from 1 to {depth}" if depth else "None, since only decoders draft with their first layers"
        raise ValueError(f"assistant_early_exit must be {use}, not {count!r}.")
