"""A decoder's next token by compiled parts, and what calls them.

B rows, n beams of a source, S tokens with the new one, R room of a cache, E source length, K key/value heads, D head
size, V vocabulary.
"""

import functools
import inspect
import threading

import torch
from torch.export import Dim
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, Seq2SeqLMOutput

from ..input_checks import check_inputs, check_positions
from ..modeling_decoder import BlockformerDecoderForCausalLM
from ..modeling_encoder_decoder import BlockformerEncoderDecoderForConditionalGeneration
from ..positions import rotations_of
from .compiled import CompiledFunction, Modules
from .few_rows import BLOCK, MOST_ROWS
from .four_bit_rows import OrderedWeights
from .growing_cache import GrowingLayer
from .measure import is_enabled
from .step_parts import WRITTEN, FirstPart, LastPart, LayerPart, position_bias

# What `generate` passes along that says nothing of a step.
_SAYS_NOTHING = {"use_cache": (None, True), "return_dict": (None, True), "logits_to_keep": (0, 1)}
_ROWS = 3  # in an example; other than any size of the model that could be taken for it


class CompiledSteps:
    """The compiled steps of a decoder with a language model head, one for each kind of batch.

    Args:
        model: a model that writes, in evaluation mode and without gradients.
    """

    def __init__(self, model):
        self._model = model
        self._parts = Modules(model)
        self._ordered = OrderedWeights(model)
        self._functions: dict[tuple, _Functions | None] = {}
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
        functions = self._functions_for(sources, rows // sources)
        if functions is None:
            return None
        _, vocab_size = self._stack.config.stack_sizes(True)
        check_inputs(self._stack.config, vocab_size, input_ids, None, attention_mask, own, {})
        mask, positions = self._seen(attention_mask, position_ids, rows, length)
        buffers = [layer.reserve(WRITTEN) for layer in own.layers]
        place = torch.tensor([length - 1])
        sources_of = [(None, None, None)] * len(buffers) if cross is None else self._source(cross, source_mask)
        logits = functions.run(input_ids.long(), positions, mask, place, buffers, sources_of)
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
        blocks = F.pad(mask[:, 0, 0], (0, max(-length % BLOCK, WRITTEN - length))).unflatten(1, (-1, BLOCK))
        return blocks, positions

    def _source(self, cross, source_mask) -> list[tuple]:
        """What each layer is told of the source: mask, keys, values."""
        for layer in cross.layers:
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()
        rows, _, length, _ = cross.layers[0].keys.shape
        if source_mask is None:
            mask = torch.ones(rows, 1, 1, length, dtype=torch.bool)
        else:
            mask = source_mask[:, None, None, :] != 0
        return [(mask, layer.keys, layer.values) for layer in cross.layers]

    def _functions_for(self, sources: int, beams: int):
        """The compiled parts for a batch of one source or several, with so many beams each; None if there are none."""
        config, rows = self._stack.config, sources * beams
        is_alone = bool(getattr(config, "num_experts", None))  # rows that share an expert multiply by it together
        if (is_alone and rows > 1) or (getattr(config, "linear_bits", None) and rows > MOST_ROWS):
            return None
        kind = ("one" if sources == 1 else "few" if beams == 1 and rows <= MOST_ROWS else "many", beams)
        if kind not in self._functions:
            with self._lock:
                if kind not in self._functions:
                    self._functions[kind] = _Functions.of(self._model, *kind)
        return self._functions[kind]


class _Functions:
    """The compiled parts of a step for one kind of batch.

    Args:
        layers: of each layer its type and its function.
        turning: the layer types that rotary positions turn, in order.
    """

    def __init__(self, first, layers: list[tuple], last, turning: list[str]):
        self._first, self._layers, self._last, self._turning = first, layers, last, turning

    @classmethod
    def of(cls, model, sources: str, beams: int):
        """Load or compile them; None if that fails.

        Args:
            sources: "one", "few" (2 to `MOST_ROWS`) or "many".
        """
        stack = model.get_decoder()
        example = _Example(stack, sources, beams)
        parts = [(FirstPart(stack), *example.first()), (LastPart(model, stack.norm), *example.last())]
        parts += [(LayerPart(layer, stack.config), *example.layer(layer)) for layer in stack.layers]
        functions = []
        for part in parts:
            functions.append(CompiledFunction.of(*part))
            if functions[-1] is None:
                return None
        types = [layer.layer_type for layer in stack.layers]
        return cls(functions[0], list(zip(types, functions[2:], strict=True)), functions[1], example.turning)

    def run(self, input_ids, positions, mask, place, buffers: list[tuple], sources: list[tuple]):
        """The logits [B, 1, V]; None once a tensor of the model has another dtype, shape or device.

        Args:
            buffers: of each layer keys and values; `sources` what `LayerPart` is told of the encoder.
        """
        output = self._first(input_ids, positions, mask, place)
        if output is None:
            return None
        states, turns, windows, biases = output
        masks = {"full_attention": mask, "sliding_attention": windows[0] if windows else None}
        by_type = dict(zip(self._turning, zip(turns[::2], turns[1::2], strict=True), strict=True))
        bias = biases[0] if biases else None
        for (kind, layer), pair, source in zip(self._layers, buffers, sources, strict=True):
            states = layer(states, masks[kind], place, list(by_type.get(kind, ())), bias, *pair, *source)
            if states is None:
                return None
        return self._last(states)


class _Example:
    """Example arguments of the parts, and which of their sizes vary.

    Args:
        sources, beams: as `_Functions.of` has them.
    """

    def __init__(self, stack, sources: str, beams: int):
        self.stack, self.blocks = stack, 11
        self.sources = 1 if sources == "one" else _ROWS
        self.rows = self.sources * beams
        dim = Dim("sources", min=2, max=MOST_ROWS) if sources == "few" else Dim("sources", min=2)
        self.by_source = {} if sources == "one" else {0: dim}
        self.by_row = {} if sources == "one" else {0: dim if beams == 1 else beams * dim}
        rotations = rotations_of(stack.rotary_emb, stack.config, *self._states_and_positions())
        self.turning = sorted(rotations)
        self.turns = {kind: [turn.clone() for turn in turns] for kind, turns in rotations.items()}

    def first(self):
        """Of a `FirstPart`."""
        ids = torch.zeros(self.rows, 1, dtype=torch.long)
        varying = (self.by_row, self.by_row, {**self.by_row, 1: Dim.DYNAMIC}, None)
        return (ids, self._states_and_positions()[1], self._mask(), self._place()), varying

    def layer(self, layer):
        """Of a `LayerPart`."""
        stack, config = self.stack, self.stack.config
        states, _ = self._states_and_positions()
        room, length = 101, 53
        own = torch.zeros(self.rows, config.num_key_value_heads, room, config.head_dim, dtype=states.dtype)
        turns = self.turns.get(layer.layer_type, [])
        bias = position_bias(stack, self._place(), self.blocks)
        arguments = (states, self._mask(), self._place(), turns, bias, own, own.clone())
        room_varies = {**self.by_row, 2: Dim.DYNAMIC}
        varying: tuple = (
            self.by_row,
            {**self.by_row, 1: Dim.DYNAMIC},
            None,
            [self.by_row if turn.shape[0] > 1 else None for turn in turns],
            None if bias is None else {2: Dim.DYNAMIC},
            room_varies,
            room_varies,
        )
        if not config.is_encoder_decoder:
            return (*arguments, None, None, None), (*varying, None, None, None)
        mask = torch.ones(self.sources, 1, 1, length, dtype=torch.bool)
        other = torch.zeros(self.sources, config.num_key_value_heads, length, config.head_dim, dtype=states.dtype)
        length_varies = {**self.by_source, 2: Dim.DYNAMIC}
        varying = (*varying, {**self.by_source, 3: Dim.DYNAMIC}, length_varies, length_varies)
        return (*arguments, mask, other, other.clone()), varying

    def last(self):
        """Of a `LastPart`."""
        return self._states_and_positions()[:1], (self.by_row,)

    def _states_and_positions(self):
        dtype = self.stack.embed_tokens.weight.dtype
        states = torch.zeros(self.rows, 1, self.stack.config.hidden_size, dtype=dtype)
        return states, torch.full((self.rows, 1), self.blocks * BLOCK - 2)

    def _mask(self):
        return torch.ones(self.rows, self.blocks, BLOCK, dtype=torch.bool)

    def _place(self):
        return torch.tensor([self.blocks * BLOCK - 2])


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
