"""A decoder's next token as a function of tensors alone, for the compiler, and what calls it.

B rows, n beams of a source, S tokens with the new one, R room of a cache, E source length, K key/value heads, D head
size, V vocabulary.
"""

import functools
import inspect
import threading
from dataclasses import dataclass

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, Seq2SeqLMOutput

from ..input_checks import check_inputs, check_positions
from ..layer import Batch
from ..modeling_decoder import BlockformerDecoderForCausalLM
from ..modeling_encoder_decoder import BlockformerEncoderDecoderForConditionalGeneration
from ..positions import rotations_of
from .compiled import CompiledFunction, Modules
from .four_bit_row import OrderedWeights
from .growing_cache import GrowingLayer
from .measure import is_enabled
from .one_row import BLOCK

# What `generate` passes along that says nothing of a step.
_SAYS_NOTHING = {"use_cache": (None, True), "return_dict": (None, True), "logits_to_keep": (0, 1)}
_WRITTEN = 2 * BLOCK  # places in a buffer that a step writes: the new token's, and zeros
_ROWS = 3  # in an example; other than any size of the model that could be taken for it


class _BufferLayers(Cache):
    """The keys and values of all layers in buffers [B, K, R, D], of which the new token's place is `place`."""

    def __init__(self, keys, values, place, length):
        super().__init__(layers=[])
        self.keys, self.values, self.place, self.length = keys, values, place, length

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write the new token's keys and values [B, K, 1, D]; returns those of all, [B, K, S, D].

        Behind it come zeros, since keys and values are read in whole blocks, and at least two of them.
        """
        buffers = self.keys[layer_idx], self.values[layer_idx]
        places = self.place + torch.arange(_WRITTEN)
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer.index_copy_(2, places, F.pad(states, (0, 0, 0, _WRITTEN - 1)))
        return tuple(buffer.narrow(2, 0, self.length) for buffer in buffers)

    def get_mask_sizes(self, query_length, layer_idx=0):
        """Length of the keys, and where they begin."""
        return self.length, 0


@dataclass
class _SourceLayer:
    """One layer's keys and values of the encoder's states, [B / n, K, E, D]."""

    keys: torch.Tensor
    values: torch.Tensor


class _Caches(EncoderDecoderCache):
    """The buffers, and the keys and values of the encoder's states, which are there already."""

    def __init__(self, own, keys, values):
        self.self_attention_cache = own
        layers = [_SourceLayer(*pair) for pair in zip(keys, values, strict=True)]
        self.cross_attention_cache = Cache(layers=layers)
        self.is_updated = dict.fromkeys(range(len(layers)), True)


class _Step(nn.Module):
    """Tokens [B, 1] to logits [B, 1, V]; writes the new keys and values into the buffers."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.has_source = model.config.is_encoder_decoder

    def forward(self, input_ids, position_ids, mask, place, keys, values, source_mask, source_keys, source_values):
        """Run the step.

        Args:
            input_ids: int64 [B, 1], the new tokens; `position_ids` int64 [B, 1] their positions.
            mask: bool [B, S / BLOCK, BLOCK], which tokens are seen.
            place: int64 [1], where in the buffers the new token goes: S - 1.
            keys, values: of each layer a buffer [B, K, R, D].
            source_mask: bool [B / n, 1, 1, E], and `source_keys`, `source_values` of each layer [B / n, K, E, D]; None
                without an encoder.
        """
        stack = self.model.get_decoder()
        mask = mask.flatten(1)[:, None, None, :]
        cache = _BufferLayers(keys, values, place, mask.shape[-1])
        states = stack._embed(stack._embed_tokens(input_ids, None, None, None), position_ids)
        rotations = rotations_of(stack.rotary_emb, stack.config, states, position_ids)
        bias = stack._position_bias(place, cache)
        if self.has_source:
            beams = input_ids.shape[0] // source_mask.shape[0]
            source_mask = source_mask.expand(-1, -1, beams, -1)
            cache = _Caches(cache, source_keys, source_values)
        masks = {"full_attention": mask}
        if stack.config.sliding_window is not None:
            near = torch.arange(mask.shape[-1]) > place - stack.config.sliding_window
            masks["sliding_attention"] = mask & near
        batch = Batch(masks, rotations, place, source_mask)
        source = states if self.has_source else None  # any tensor: its keys and values are cached
        for layer in stack.layers:
            states = _cut(layer.forward(states, source, bias, batch=batch, past_key_values=cache))
        return self.model.logits_of(states if stack.norm is None else stack.norm(states))


def _cut(states):
    """The same states, by an operator that the compiler calls and fuses with nothing.

    So layers are functions of their own: those that are alike share one, which is compiled once.
    """
    return states[None].cumsum(0)[0]


class CompiledSteps:
    """The compiled steps of a decoder with a language model head, one for each kind of batch.

    Args:
        model: a model that writes, in evaluation mode and without gradients.
    """

    def __init__(self, model):
        self._model = model
        self._parts = Modules(model)
        self._ordered = OrderedWeights(model)
        self._functions: dict[tuple, CompiledFunction | None] = {}
        self._lock = threading.Lock()

    def __reduce__(self):
        return CompiledSteps, (None,), self._model  # a copy finds its functions on the disk

    def __setstate__(self, model):
        self.__init__(model)  # type: ignore[misc]

    @functools.cached_property
    def _stack(self):
        return self._model.get_decoder()

    def logits(self, input_ids, attention_mask, position_ids, cache, source_mask, others):
        """The logits [B, 1, V] of one more token a row, or None if this call is nothing for a compiled step.

        Args:
            input_ids: int [B, 1].
            attention_mask: [B, S] of 0 and 1 or None; `source_mask` [B / n, E] likewise.
            position_ids: int [B, 1] or None.
            cache: a growing cache that holds S - 1 tokens; it holds S afterwards.
            others: what else `forward` was given, by name.
        """
        if not _is_step(input_ids, attention_mask, position_ids, cache, others) or self._model.training:
            return None
        if not self._parts.are_untouched() or getattr(self._model.config, "output_router_logits", False):
            return None
        own, cross = cache, None
        if self._model.config.is_encoder_decoder:
            if not isinstance(cache, EncoderDecoderCache) or not all(cache.is_updated.values()):
                return None
            own, cross = cache.self_attention_cache, cache.cross_attention_cache
        if type(own) is not DynamicCache or not all(type(layer) is GrowingLayer for layer in own.layers):
            return None
        # The compiled code reads and writes as many bytes as the sizes say, whatever there is: all of them are checked.
        held, read = self._shape(own), None if cross is None else self._shape(cross)
        if held is None or (cross is not None and read is None):
            return None
        rows, length = input_ids.shape[0], held[2] + 1
        sources = rows if read is None else read[0]
        if held[0] != rows or rows % sources or (position_ids is not None and position_ids.shape[0] not in (1, rows)):
            return None
        if read is not None and source_mask is not None and source_mask.shape != (read[0], read[2]):
            return None
        self._ordered.refresh()
        function = self._function(sources == 1, rows // sources)
        if function is None:
            return None
        _, vocab_size = self._stack.config.stack_sizes(True)
        check_inputs(self._stack.config, vocab_size, input_ids, None, attention_mask, own, {})
        mask, positions = self._seen(attention_mask, position_ids, rows, length)
        buffers = [layer.reserve(_WRITTEN) for layer in own.layers]
        keys, values = [pair[0] for pair in buffers], [pair[1] for pair in buffers]
        place = torch.tensor([length - 1])
        source = (None, None, None) if cross is None else self._source(cross, source_mask)
        logits = function(input_ids.long(), positions, mask, place, keys, values, *source)
        if logits is None:
            return None
        for layer in own.layers:
            layer.advance(1)
        return logits

    def _shape(self, cache):
        """[B, K, S, D] of the keys and values of all layers; None if there are none, or they are not this model's."""
        config, dtype = self._stack.config, self._stack.embed_tokens.weight.dtype
        states = [each for layer in cache.layers if layer.is_initialized for each in (layer.keys, layer.values)]
        if len(states) != 2 * len(self._stack.layers):
            return None
        shape = states[0].shape
        if shape.numel() == 0 or (shape[1], shape[3]) != (config.num_key_value_heads, config.head_dim):
            return None
        fits = all(each.shape == shape and each.dtype is dtype and each.device.type == "cpu" for each in states)
        return shape if fits else None

    def _seen(self, attention_mask, position_ids, rows: int, length: int):
        """What is seen, bool [B, S / BLOCK rounded up, BLOCK], and where the tokens stand, int64 [B, 1]."""
        if attention_mask is None:
            mask = torch.ones(rows, 1, 1, length, dtype=torch.bool)
        else:
            mask = attention_mask[:, None, None, :] != 0
        if position_ids is not None:
            positions = position_ids.long().expand(rows, 1)
        else:
            positions = (mask.sum(-1)[:, 0] - 1).clamp(min=0)
        check_positions(self._stack.config, positions, (rows, 1), None)
        blocks = F.pad(mask[:, 0, 0], (0, max(-length % BLOCK, _WRITTEN - length))).unflatten(1, (-1, BLOCK))
        return blocks, positions

    def _source(self, cross, source_mask):
        for layer in cross.layers:
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()
        rows, _, length, _ = cross.layers[0].keys.shape
        if source_mask is None:
            mask = torch.ones(rows, 1, 1, length, dtype=torch.bool)
        else:
            mask = source_mask[:, None, None, :] != 0
        return mask, [layer.keys for layer in cross.layers], [layer.values for layer in cross.layers]

    def _function(self, is_one: bool, beams: int):
        """The compiled step for one row or several, with so many beams of each source."""
        config = self._stack.config
        if not is_one and (getattr(config, "num_experts", None) or getattr(config, "linear_bits", None)):
            return None  # rows that share an expert, or weights of 4 bits, multiply by them together
        kind = (is_one, beams)
        if kind not in self._functions:
            with self._lock:
                if kind not in self._functions:
                    self._functions[kind] = CompiledFunction.of(_Step(self._model), *self._example(is_one, beams))
        return self._functions[kind]

    def _example(self, is_one: bool, beams: int):
        """Example arguments of the step, and which of their sizes vary."""
        config, dtype = self._stack.config, self._stack.embed_tokens.weight.dtype
        sources = 1 if is_one else _ROWS
        rows, blocks, room, source_length = sources * beams, 11, 101, 53
        source_dim = None if is_one else Dim("sources", min=2)
        row_dim = source_dim if is_one or beams == 1 else beams * source_dim
        own = torch.zeros(rows, config.num_key_value_heads, room, config.head_dim, dtype=dtype)
        other = torch.zeros(sources, config.num_key_value_heads, source_length, config.head_dim, dtype=dtype)
        layers = len(self._stack.layers)
        by_row = {} if is_one else {0: row_dim}
        by_source = {} if is_one else {0: source_dim}
        arguments = (
            torch.zeros(rows, 1, dtype=torch.long),
            torch.full((rows, 1), blocks * BLOCK - 2),
            torch.ones(rows, blocks, BLOCK, dtype=torch.bool),
            torch.tensor([blocks * BLOCK - 2]),
            *([own.clone() for _ in range(layers)] for _ in range(2)),
        )
        varying = (by_row, by_row, {**by_row, 1: Dim.DYNAMIC}, None, *[[{**by_row, 2: Dim.DYNAMIC}] * layers] * 2)
        if not config.is_encoder_decoder:
            return (*arguments, None, None, None), (*varying, None, None, None)
        mask = torch.ones(sources, 1, 1, source_length, dtype=torch.bool)
        source = (mask, *([other.clone() for _ in range(layers)] for _ in range(2)))
        varying_source = [[{**by_source, 2: Dim.DYNAMIC}] * layers] * 2
        return (*arguments, *source), (*varying, {**by_source, 3: Dim.DYNAMIC}, *varying_source)


def _is_step(input_ids, attention_mask, position_ids, cache, others: dict) -> bool:
    """Whether a call asks for the logits of one more token a row on the CPU, and for nothing else."""
    if cache is None or not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.shape[1] != 1:
        return False
    if input_ids.device.type != "cpu" or not is_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2):
        return False
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != 1):
        return False
    return all(value is None or value in _SAYS_NOTHING.get(name, ()) for name, value in others.items())


def can_compile(model) -> bool:
    """Whether the model writes text, so that it has a step."""
    return isinstance(model, BlockformerDecoderForCausalLM | BlockformerEncoderDecoderForConditionalGeneration)


def plug_in() -> None:
    """Have this package's models that write take their compiled steps, once `prepare_for_inference` has made some."""
    decoder, both = BlockformerDecoderForCausalLM, BlockformerEncoderDecoderForConditionalGeneration
    decoder.forward = _stepping(decoder.forward, _decoder_step)  # type: ignore[method-assign]
    both.forward = _stepping(both.forward, _encoder_decoder_step)  # type: ignore[method-assign]


def _stepping(forward, step):
    signature = inspect.signature(forward)
    names = list(signature.parameters)[1:]

    @functools.wraps(forward)
    def stepping_forward(self, *args, **kwargs):
        steps = self.__dict__.get("_steps")
        output = None if steps is None else step(steps, **dict(zip(names, args, strict=False)), **kwargs)
        return forward(self, *args, **kwargs) if output is None else output

    stepping_forward.__signature__ = signature  # type: ignore[attr-defined]  # `generate` looks at it in every step
    return stepping_forward


def _decoder_step(steps, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **others):
    logits = steps.logits(input_ids, attention_mask, position_ids, past_key_values, None, others)
    return None if logits is None else CausalLMOutputWithCrossAttentions(logits=logits, past_key_values=past_key_values)


def _encoder_decoder_step(
    steps,
    decoder_input_ids=None,
    decoder_attention_mask=None,
    decoder_position_ids=None,
    past_key_values=None,
    attention_mask=None,
    encoder_outputs=None,
    **others,
):
    given = (decoder_input_ids, decoder_attention_mask, decoder_position_ids, past_key_values, attention_mask, others)
    logits = None if encoder_outputs is None else steps.logits(*given)
    if logits is None:
        return None
    states = encoder_outputs[0]
    return Seq2SeqLMOutput(logits=logits, past_key_values=past_key_values, encoder_last_hidden_state=states)
