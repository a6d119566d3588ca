"""A decoder's next token by compiled functions, for the calls that they can serve.

B rows, n beams of a source, S tokens with the new one, R room of a cache, E source length, K key/value heads, D head
size, V vocabulary.
"""

import functools
import inspect
import threading

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, Seq2SeqLMOutput
from transformers.utils import logging

from ..model.awq_linear import QuantizedLinear
from ..model.compat import CACHE
from ..model.input_checks import check_inputs, check_positions, check_source
from ..model.modeling_decoder import BlockformerDecoderForCausalLM
from ..model.modeling_encoder_decoder import BlockformerEncoderDecoderForConditionalGeneration
from ..model.token_inputs import OF_LAYERS
from ..model.varied_attention import VARIED
from .attention import is_in_use
from .beams import fill, has_state, held_by, shared_beams, sources_of_mask
from .compiler import has_compiler, is_of_compiler, progress
from .eight_bit_head import RoundedHead
from .fallbacks import NO_CODE, Fallbacks, Uncompiled
from .few_rows import MOST_ROWS, Rows
from .four_bit_rows import OrderedLinear
from .growing_cache import GrowingLayer, GrowingWindowLayer
from .measure import is_enabled
from .onednn import PackedCopy
from .origin import Following
from .step_functions import StepFunctions, in_buffers
from .step_layers import StepLayers, can_be_packed
from .step_parts import WRITTEN, keeps_state
from .watched import Modules, is_transformed, unknown_code

logger = logging.get_logger(__name__)

# What `generate` passes along that says nothing of a step.
_SAYS_NOTHING = {"use_cache": (None, True), "return_dict": (None, True), "logits_to_keep": (0, 1)}
# Fields of a config by which every call returns more.
COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


class CompiledSteps:
    """The compiled steps of a decoder with a language model head, one for each kind of batch.

    Args:
        model: a model that writes, in evaluation mode and without gradients.
        head_bits: 8 for a head that is rounded where a step is for few rows.
    """

    def __init__(self, model, head_bits: int | None = None):
        self._model, self._head_bits = model, head_bits
        self.fallbacks = Fallbacks("one more token")
        self._functions: dict[tuple, StepFunctions | None] = {}
        self._lock = threading.Lock()

    def __reduce__(self):
        return CompiledSteps, (None,), (self._model, self._head_bits)  # a copy compiles functions of its own

    def __setstate__(self, state):
        self.__init__(*state)  # type: ignore[misc]

    @functools.cached_property
    def _unknown_code(self):
        return unknown_code(self._model)

    @functools.cached_property
    def _ordered(self) -> Following:
        layers = [module for module in self._stack.modules() if isinstance(module, QuantizedLinear)]
        return Following([OrderedLinear(layer) for layer in layers])

    @functools.cached_property
    def _rounded(self) -> Following:
        return Following([RoundedHead(self._model.lm_head)] if self._head_bits else [], sampled=True)

    @functools.cached_property
    def _packed(self) -> Following:
        """Of the decoder and the head, for steps of many rows."""
        parts = [*self._stack.modules(), self._model.lm_head]
        return Following([PackedCopy(part) for part in dict.fromkeys(parts) if can_be_packed(part)], sampled=True)

    @functools.cached_property
    def _stack(self):
        return self._model.get_decoder()

    @functools.cached_property
    def _parts(self):
        encoder = self._model.get_encoder() if self._model.config.is_encoder_decoder else None
        return Modules(self._model, without=encoder)

    def refresh(self) -> None:
        """Update the copies of weights that have changed."""
        for copies in self._followed():
            copies.refresh()

    def _followed(self) -> list[Following]:
        """The copies; packed ones only once a step of many rows has asked for them."""
        packed = vars(self).get("_packed")
        return [self._ordered, self._rounded, *([] if packed is None else [packed])]

    def bytes_of_copies(self) -> int:
        """Of weights in another layout, held in addition to the plain ones."""
        return sum(copies.nbytes for copies in self._followed())

    def logits(self, input_ids, attention_mask, position_ids, cache, source_mask, others, source=None):
        """The logits [B, 1, V] of one more token a row, or None if this call is nothing for a compiled step.

        Args:
            input_ids: int [B, 1].
            attention_mask: [B, S] of 0 and 1 or None; `source_mask` [B, E] likewise.
            position_ids: int [B, 1] or None.
            cache: a growing cache that holds S - 1 tokens; it holds S afterwards.
            others: what else `forward` was given, by name.
            source: the encoder's states [B, E, C], for a cache that has no keys and values of them yet.
        """
        if not _is_step(input_ids, cache):
            return None
        try:
            self._check(attention_mask, position_ids, cache, others)
            return self._logits(input_ids, attention_mask, position_ids, cache, source_mask, source)
        except Uncompiled as reason:
            self.fallbacks.note(str(reason), is_said=str(reason) == NO_CODE)
            return None

    def _check(self, attention_mask, position_ids, cache, others: dict) -> None:
        """Refuse what the compiled code does not support: see `Uncompiled`."""
        config = self._stack.config
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        growing = (GrowingLayer, GrowingWindowLayer)
        is_growing = type(own) is DynamicCache and all(has_state(each) or type(each) in growing for each in own.layers)
        asked = [name for name in COLLECTED if getattr(config, name, False)]
        asked += [name for name, value in others.items() if not _says_nothing(name, value)]
        if torch.is_autocast_enabled("cpu"):
            raise Uncompiled("autocast is on")
        if is_transformed():
            raise Uncompiled("torch.func is at work")
        if asked:
            raise Uncompiled(f"{asked[0]} is given")
        if torch.is_grad_enabled() and any(each.requires_grad for each in self._model.parameters()):
            raise Uncompiled("a weight is to learn")
        if isinstance(cache, EncoderDecoderCache) != self._model.config.is_encoder_decoder or not is_growing:
            raise Uncompiled(f"the cache ({type(own).__name__}) is not the one that grows in place")
        if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2):
            raise Uncompiled("the attention mask is not [batch, length]")
        if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != 1):
            raise Uncompiled("position_ids are not [batch, 1]")
        if not self._parts.are_untouched():
            raise Uncompiled("a module was replaced or wrapped, has a hook or another setting, or is in training mode")
        if not is_in_use(config):
            raise Uncompiled(f"attention is computed by '{config._attn_implementation}', not by the package's 'sdpa'")

    def _logits(self, input_ids, attention_mask, position_ids, cache, source_mask, source):
        config = self._stack.config
        own, cross = cache, None
        if isinstance(cache, EncoderDecoderCache):
            own, cross = cache.self_attention_cache, cache.cross_attention_cache
        _, vocab_size = config.stack_sizes(True)
        check_inputs(config, vocab_size, input_ids, None, attention_mask, own, {})
        if cross is not None and not any(cache.is_updated.values()):
            self._begin(cache, input_ids.shape[0], position_ids, source, source_mask)
        # The compiled code reads and writes as many bytes as the sizes say, whatever there is: all of them are checked.
        if cross is not None:
            source_mask = sources_of_mask(source_mask, cross.layers)
        held, read = self._shape(own), None if cross is None else self._shape(cross)
        has_source = cross is None or (cache.is_updated and all(cache.is_updated.values()) and read and read[2])
        if held is None or not has_source:
            raise Uncompiled("the cache does not hold this model's keys and values, in its dtype")
        if torch.is_grad_enabled() and any(map(_learns, own.layers if cross is None else (*own.layers, *cross.layers))):
            raise Uncompiled("the cache is to take gradients")
        rows, length = input_ids.shape[0], held[2] + 1
        sources = rows if read is None else read[0]
        if held[0] != rows or rows % sources or (position_ids is not None and position_ids.shape[0] not in (1, rows)):
            raise Uncompiled("the cache or position_ids have another batch size")
        if read is not None and source_mask is not None and source_mask.shape != (read[0], read[2]):
            raise Uncompiled("the mask of the source does not fit it")
        functions = self.functions_for(sources, rows // sources)
        self.refresh()
        visible, positions = self._seen(attention_mask, position_ids, rows, length)
        buffers = [_written(layer) if has_state(layer) else layer.reserve(WRITTEN) for layer in own.layers]
        slots = self._slots(own)
        seen = {kind: in_buffers(visible, slot, self._window_of(kind)) for kind, slot in slots.items()}
        told = (None, []) if cross is None else self._source(cross, source_mask)
        with torch.inference_mode(False), torch.no_grad():
            logits = self.computed(functions, input_ids.long(), positions, seen, buffers, *told)
        for layer, written in zip(own.layers, buffers, strict=True):
            if has_state(layer):
                for tensor, new in zip(held_by(layer), written, strict=True):
                    if tensor.data_ptr() != new.data_ptr():
                        tensor.copy_(new)
            else:
                layer.advance(1)
        return logits

    def _begin(self, cache, rows: int, position_ids, source, source_mask) -> None:
        """Make the first token a step like all others: an empty cache gets keys and values of the encoder's states.

        Nothing happens to a cache that is of no use to a compiled step.
        """
        stack, own = self._stack, cache.self_attention_cache
        if len(own.layers) != len(stack.layers) or own.get_seq_length() or not isinstance(source, torch.Tensor):
            return
        if source.dtype is not stack.embed_tokens.weight.dtype or source.device.type != "cpu" or source.requires_grad:
            return
        check_source(stack, source, source_mask, rows, None)
        if position_ids is not None:
            check_positions(stack.config, position_ids, (rows, 1), None)
        beams = shared_beams(stack.layers[0].cross_attn, source, cache)
        self.functions_for(rows // beams, beams)
        for layer in stack.layers:
            fill(layer.cross_attn, source, cache)
        empty = source.new_empty(rows, stack.config.num_key_value_heads, 0, stack.config.head_dim)
        for layer in own.layers:
            layer.update(empty, empty)

    def _shape(self, cache):
        """[B, K, S, D] of the keys and values of all layers; None if there are none, or they are not this model's.

        A layer with a window holds the last ones of the S tokens, and one with a state has neither keys nor values.
        """
        config, dtype = self._stack.config, self._stack.embed_tokens.weight.dtype
        if [has_state(layer) for layer in cache.layers] != [keeps_state(layer) for layer in self._stack.layers]:
            return None
        layers = [layer for layer in cache.layers if not has_state(layer)]
        if not all(layer.is_initialized for layer in layers):
            return None
        length, shape = layers[0].get_seq_length(), held_by(layers[0])[0].shape
        if shape[0] == 0 or (shape[1], shape[3]) != (config.num_key_value_heads, config.head_dim):
            return None
        for layer in layers:
            is_window = isinstance(layer, GrowingWindowLayer)
            least = min(length, layer.sliding_window - 1) if is_window else length
            pair = held_by(layer)
            held = pair[0].shape[2]
            wanted = (*shape[:2], held, shape[3])
            if layer.get_seq_length() != length or held < least or (held != length and not is_window):
                return None
            if any(each.shape != wanted or each.dtype is not dtype or each.device.type != "cpu" for each in pair):
                return None
        for past, _ in (held_by(layer) for layer in cache.layers if has_state(layer)):
            if past is None or len(past) != shape[0] or past.dtype is not dtype or past.device.type != "cpu":
                return None
        return (*shape[:2], length, shape[3])

    def _seen(self, attention_mask, position_ids, rows: int, length: int):
        """The visible tokens, bool [B, S], and the new ones' positions, int64 [B, 1]."""
        if attention_mask is None:
            visible = torch.ones(rows, length, dtype=torch.bool, device="cpu")
        else:
            visible = attention_mask != 0
        if position_ids is not None:
            positions = position_ids.long().expand(rows, 1)
        else:
            positions = (visible.sum(-1, keepdim=True) - 1).clamp(min=0)
        check_positions(self._stack.config, positions, (rows, 1), None)
        return visible, positions

    def _slots(self, cache) -> dict[str, int]:
        """Layer type -> where in its layers' buffers the new token goes."""
        slots: dict[str, int] = {}
        for layer, held in zip(self._stack.layers, cache.layers, strict=True):
            if not has_state(held) and slots.setdefault(layer.layer_type, held.written) != held.written:
                raise Uncompiled("the cache's layers hold their tokens in different slots")
        of_states = {layer.layer_type for layer in self._stack.layers if keeps_state(layer)}
        return slots | dict.fromkeys(of_states, next(iter(slots.values())))

    def _window_of(self, kind: str) -> int | None:
        return self._stack.config.sliding_window if kind == "sliding_attention" else None

    def _source(self, cross, source_mask) -> tuple:
        """The mask of the source, and keys and values of each layer."""
        pairs = [tuple(each.contiguous() for each in held_by(layer)) for layer in cross.layers]
        rows, _, length, _ = pairs[0][0].shape
        if source_mask is None:
            mask = torch.ones(rows, 1, 1, length, dtype=torch.bool, device="cpu")
        else:
            mask = source_mask[:, None, None, :] != 0
        return mask, pairs

    def functions_for(self, sources: int, beams: int) -> StepFunctions:
        """The compiled parts for a batch of one source or several, with so many beams each.

        Raises:
            Uncompiled: there are none.
        """
        config, rows = self._stack.config, sources * beams
        if getattr(config, "num_experts", None) and rows > 1:  # rows that share an expert multiply by it together
            raise Uncompiled("a model with experts has more than one row to write")
        if getattr(config, "linear_bits", None) and rows > MOST_ROWS:
            raise Uncompiled(f"a model with 4-bit weights has more than {MOST_ROWS} rows to write")
        if self._unknown_code is not None:
            raise Uncompiled(f"the model contains code of another package: {self._unknown_code}")
        kind = ("one" if sources == 1 else "few" if beams == 1 and rows <= MOST_ROWS else "many", beams)
        if not self._has(kind):
            with self._lock:
                if not self._has(kind):  # a thread that waits for it may find them made
                    self._functions[kind] = self._made(*kind)
        functions = self._functions[kind]
        if functions is None:
            raise Uncompiled(NO_CODE)
        return functions

    def _has(self, kind: tuple) -> bool:
        functions = self._functions.get(kind)
        return kind in self._functions and (functions is None or functions.dtype is self._model.dtype)

    def _made(self, sources: str, beams: int) -> StepFunctions | None:
        if not has_compiler():
            fix = "install g++ or clang++, or set CXX"
            logger.warning_once(f"no C++ compiler was found, so the model runs uncompiled: {fix}.")
            return None
        loops = {"one": Rows(beams) if beams <= MOST_ROWS else None, "few": Rows(MOST_ROWS, varies=True), "many": None}
        rows = loops[sources]
        in_place = {layer: copy for copy in self._ordered.copies for layer in copy.layers}
        if rows is not None:
            in_place |= {layer: copy for copy in self._rounded.copies for layer in copy.layers}
        packed = {layer for copy in self._packed.copies for layer in copy.layers} if rows is None else set()
        copied = StepLayers(rows, self._model.dtype, in_place, packed)
        return StepFunctions(self._model, beams, copied=copied, device="cpu")

    def computed(self, functions: StepFunctions, *arguments):
        """The logits of these functions, see `StepFunctions.logits`; the first call waits for the compiler.

        Raises:
            Uncompiled: the compiler failed.
        """
        try:
            if functions.is_ready:
                return functions.logits(*arguments)
            with self._lock, progress():
                logits = functions.logits(*arguments)
            functions.is_ready = True
            return logits
        except Exception as error:
            if not is_of_compiler(error):
                raise
            reason = " ".join(str(error).split())[:300]
            logger.warning_once(f"the model runs uncompiled because compiling it failed: {reason}")
            self._functions = {key: None if each is functions else each for key, each in self._functions.items()}
            raise Uncompiled(NO_CODE) from error


def _is_step(input_ids, cache) -> bool:
    """Whether a call asks for one more token a row on the CPU, where fast ways are allowed."""
    if cache is None or not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.shape[1] != 1:
        return False
    return input_ids.device.type == "cpu" and is_enabled()


def _written(layer) -> tuple:
    """What a cache's layer with a state holds, for a step to write over; copies if only inference mode may do so.

    They are other tensors of the same memory: the library has marked its own as constants of one CUDA graph.
    """
    with torch.inference_mode(False):
        return tuple(each.clone() if each.is_inference() else each.detach() for each in held_by(layer))


def _learns(layer) -> bool:
    return any(each is not None and each.requires_grad for each in held_by(layer))


def _says_nothing(name: str, value) -> bool:
    return value is None or (isinstance(value, bool | int) and value in _SAYS_NOTHING.get(name, ()))


def uncompiled_field(config) -> str | None:
    """A field by which layers differ in what no compiled step knows, or None."""
    return next((name for name in (*VARIED, *OF_LAYERS) if getattr(config, name, None)), None)


def can_compile(model) -> bool:
    """Whether the model writes text, so that it has a step."""
    is_writer = isinstance(model, BlockformerDecoderForCausalLM | BlockformerEncoderDecoderForConditionalGeneration)
    return is_writer and not getattr(model.config, "bidirectional", False)


def output_of(steps: CompiledSteps, model, arguments: tuple, named: dict):
    """A model's output for these arguments of its `forward` by a compiled step, or None if none can compute it."""
    given = dict(zip(_names(type(model).forward), arguments, strict=False))
    return (_encoder_decoder_step if model.config.is_encoder_decoder else _decoder_step)(steps, **given, **named)


@functools.cache
def _names(forward) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def _decoder_step(steps, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **others):
    logits = steps.logits(input_ids, attention_mask, position_ids, past_key_values, None, others)
    return None if logits is None else CausalLMOutputWithCrossAttentions(logits=logits, **{CACHE: past_key_values})


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
    if encoder_outputs is None:
        return None
    states = encoder_outputs["last_hidden_state"] if isinstance(encoder_outputs, dict) else encoder_outputs[0]
    logits = steps.logits(*given, states)
    if logits is None:
        return None
    return Seq2SeqLMOutput(logits=logits, **{CACHE: past_key_values}, encoder_last_hidden_state=states)
