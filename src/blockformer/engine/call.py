"""A call of `generate`: what is to be read, how tokens are chosen, and the cache that its caller sees.

B rows, n beams of a source, T tokens of the prompt, S tokens so far, R room of the buffers, K key/value heads, D head
size, V vocabulary.
"""

import torch
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from ..model.compat import CACHE
from ..watched import Modules
from .attention import PreparedAttention
from .choices import OtherLoop
from .graphs import Prompt, Steps
from .sampling import choose, log_sums
from .step_parts import State, has_state, held_by, keeps_state

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class Call:
    """A call of `generate`: what is to be read, and how tokens are chosen.

    Attributes:
        cache: the library's that the caller sees afterwards, or None.
        problem: why the model itself has written a part of the text, or None.
        is_late: whether the host goes on before it knows a token.
        held: how many tokens the buffers hold.
        watched: the modules that the steps were compiled of; None if a step is the model's own.

    Args:
        by_graphs: whether the steps are a GPU's.
    """

    def __init__(self, model, input_ids, named: dict, by_graphs: bool):
        self.model, self.input_ids, self._named = model, input_ids, named
        self.watched: Modules | None = None
        self.problem: str | None = None
        self._by_graphs, self.held = by_graphs, input_ids.shape[1]
        self.settings = named["generation_config"]
        self.processors, self.criteria = named["logits_processor"], named["stopping_criteria"]
        self.streamer, self.beams = named.get("streamer"), beams_of(named)
        sharing = self.beams if model.config.is_encoder_decoder else 1  # a decoder's beams are rows like others
        self.kind, self.shares_source = (len(input_ids) // sharing, sharing), sharing > 1
        self.longest = self.criteria.max_length or self.settings.max_length
        ends = [each.eos_token_id for each in self.criteria if hasattr(each, "eos_token_id")]
        self.ends = [int(token) for each in ends for token in each.flatten().tolist()]
        pad = self.settings._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.own_criteria = [each for each in self.criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria)]
        self.runs_code = any(map(_may_be_own, (*self.processors, *self.criteria, self.streamer)))
        # What a streamer of the caller's does to a model counts from the next token on.
        self.is_late = by_graphs and not _may_be_own(self.streamer)
        self.is_greedy = not self.settings.do_sample and not self.processors and not self.own_criteria
        self._has_dict = getattr(self.settings, "return_dict_in_generate", False)
        self.cache = seen_cache(named)
        self._past = 0
        if self.cache is not None:
            self._past = tokens_in(self.cache, model.get_decoder(), input_ids, named, is_late=by_graphs)

    def _fresh(self, cache):
        """On a CPU the model's own, of which windows need less memory."""
        if not self._by_graphs:
            cache = self.model.get_decoder().new_cache(for_cross_attention=self.model.config.is_encoder_decoder)
        return cache

    def by_model(self, beams: int = 1) -> "ModelStep":
        """Steps by the model's `forward`, with so many beams that share a source."""
        if not self.model.config.is_encoder_decoder:
            return ModelStep(self.model, {})
        source = {name: self._named.get(name) for name in ("encoder_outputs", "attention_mask")}
        can_share = all(isinstance(layer.cross_attn, PreparedAttention) for layer in self.model.get_decoder().layers)
        return ModelStep(self.model, source, beams if can_share else 1)

    def advance(self, steps: Steps, length: int, greedy: bool = False) -> None:
        """`Steps.advance`; after a change of the model, or where the compiler fails, by the model itself."""
        is_compiled = self.watched is not None and not isinstance(steps.parts, ModelStep)
        if is_compiled and self.runs_code and not self.watched.are_untouched():
            self._go_on_plainly(steps, "code of the caller's has changed the model in the middle of a text")
        try:
            steps.advance(length, greedy)
        except OtherLoop as reason:
            self._go_on_plainly(steps, str(reason))
            steps.advance(length, greedy)
        self.held = length

    def _go_on_plainly(self, steps: Steps, problem: str) -> None:
        self.problem, steps.parts = problem, self.by_model()

    def fill(self, steps: Steps, length: int) -> None:
        """Have the caller's cache, if there is one, hold so many tokens of the text."""
        if self.cache is not None:
            steps.fill(self.cache, self.input_ids.shape[1], length)

    def returned(self, text, steps: Steps):
        """What `generate` is to return for a text [B, S]; the caller's cache holds all of it but the last token."""
        self.fill(steps, text.shape[1] - 1)
        return GenerateDecoderOnlyOutput(sequences=text, past_key_values=self.cache) if self._has_dict else text

    def read(self):
        """The prompt in a cache of the library's, and float32 scores [B, V] of the next token."""
        named, config = self._named, self.model.config
        mask = named.get("attention_mask")
        rows, length = self.input_ids.shape
        first = slice(None, None, self.beams)  # a prompt is read once for all of its beams
        if config.is_encoder_decoder:
            cache = self._fresh(EncoderDecoderCache(DynamicCache(), DynamicCache()))
            output = self.model(
                encoder_outputs=(named["encoder_outputs"][0][first],), decoder_input_ids=self.input_ids[first],
                attention_mask=None if mask is None else mask[first],
                past_key_values=cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            visible = self.input_ids.new_ones(rows, length, dtype=torch.bool)
            positions = self.input_ids.new_full((rows, 1), length)
            source_mask = None if mask is None else mask != 0
            prompt = Prompt(cache.self_attention_cache, visible, positions, cache.cross_attention_cache, source_mask)
        else:
            keeps = any(map(keeps_state, self.model.get_decoder().layers))
            cache = self.cache
            if cache is None:
                cache = self._fresh(DynamicCache(config=config) if keeps else DynamicCache())
            positions = named.get("position_ids")
            if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != (rows, length)):
                raise OtherLoop("the attention mask is not [batch, length]")
            inputs = {"input_ids": self.input_ids[:, self._past :], "attention_mask": mask, "position_ids": positions}
            if positions is not None:
                inputs["position_ids"] = positions[:, self._past - length :]
            inputs = {name: None if each is None else each[first] for name, each in inputs.items()}
            output = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            visible = self.input_ids.new_ones(rows, length, dtype=torch.bool) if mask is None else mask != 0
            last = visible.sum(-1, keepdim=True) - 1 if positions is None else positions[:, -1:].expand(rows, 1)
            prompt = Prompt(cache, visible, last.clamp(min=0) + 1)
        logits = output.logits[:, -1].to(copy=True, dtype=torch.float32).repeat_interleave(self.beams, 0)
        is_whole = self.watched is None or len(prompt.layers) == len(self.model.get_decoder().layers)
        if logits.shape[0] != rows or not is_whole:
            raise OtherLoop("the cache does not hold this model's keys and values")
        return prompt, logits


class ModelStep:
    """The model itself: its `forward` reads the new tokens, with a cache that lies in the buffers of `Steps`.

    Args:
        model: as the caller has it by now.
        source: what an encoder-decoder's `forward` gets of its source, by name; the states have a row for each beam.
        beams: rows that share the keys and values of their source, by `PreparedAttention`.
    """

    can_be_captured = False
    cut = ()

    def __init__(self, model, source: dict, beams: int = 1):
        self._model, self._source, self.beams = model, source, beams
        self.choose, self.log_sums = choose, log_sums
        self._cache: DynamicCache | EncoderDecoderCache | None = None

    def logits(self, steps, seen: int):
        """The logits [B, 1, V] of the new tokens in `Steps`, which see so many slots."""
        if self._cache is None:
            self._cache = self._in_buffers(steps, seen - 1)
            self._is_padded = not bool(steps.visible[:, : seen - 1].all())
        cached = {"past_key_values": self._cache, "use_cache": True, "return_dict": True}
        if self._source:
            return self._model(decoder_input_ids=steps.ids, **self._source, **cached).logits
        mask = steps.visible[:, :seen].long() if self._is_padded else None
        return self._model(input_ids=steps.ids, attention_mask=mask, position_ids=steps.positions, **cached).logits

    def slots_for(self, length: int) -> int:
        """How many slots a step of so many tokens sees."""
        return length

    def _in_buffers(self, steps, length: int):
        """A cache of the library's kind of so many tokens."""
        cache = DynamicCache()
        for pair, keeps, window in zip(steps.buffers, steps.has_state, steps.windows, strict=True):
            if keeps:
                cache.layers.append(State(pair))
            else:
                in_buffers = _InBuffers(pair, length) if window is None else _WindowInBuffers(pair, length, window)
                cache.layers.append(in_buffers)
        if not self._source:
            return cache
        cross, source_length = DynamicCache(), self._source["encoder_outputs"][0].shape[1]
        times = len(steps.ids) // (len(steps.sources[0][0]) * self.beams)
        for index, pair in enumerate(steps.sources):
            states = (each[:, :, :source_length].repeat_interleave(times, 0) for each in pair)
            cross.update(*states, index)
        return EncoderDecoderCache(cache, cross)


class _InBuffers(DynamicLayer):
    """A layer's keys and values [B, K, S, D] as views of two buffers [B, K, R, D], which the new token is written into.

    Args:
        pair: the buffers, in a list that gets larger ones when they are full.
        length: how many tokens they hold.
    """

    def __init__(self, pair: list, length: int, *window: int):
        super().__init__(*window)
        self._pair, self.is_initialized = pair, True
        self.dtype, self.device = pair[0].dtype, pair[0].device
        self._hold(length)

    def _hold(self, length: int) -> None:
        self._length, first = length, self._first_of(length)
        self.keys, self.values = (buffer[:, :, first:length] for buffer in self._pair)

    def _first_of(self, length: int) -> int:
        """The first of so many tokens that a new one may see."""
        return 0

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the key and value of one token [B, K, 1, D]; return all that it sees."""
        for buffer, states in zip(self._pair, (key_states, value_states), strict=True):
            buffer[:, :, self._length : self._length + 1] = states
        self._hold(self._length + 1)
        return self.keys, self.values


class _WindowInBuffers(_InBuffers, DynamicSlidingWindowLayer):
    """The same of a layer with a window."""

    def _hold(self, length):
        self.cumulative_length = length
        super()._hold(length)

    def _first_of(self, length):
        return max(0, length - self.sliding_window)


def _may_be_own(part) -> bool:
    """Whether a processor, a criterion or a streamer runs code from outside of the library, its own or one it holds."""
    if part is None:
        return False
    held = (each for each in vars(part).values() if not isinstance(each, PreTrainedTokenizerBase))
    return type(part).__module__.partition(".")[0] != "transformers" or any(map(callable, held))


def are_equal(rows, beams: int) -> bool:
    """Whether each `beams` rows of [B * n, ...] are equal."""
    groups = rows.unflatten(0, (-1, beams))
    return torch.equal(groups, groups[:, :1].expand_as(groups))


def beams_of(named: dict) -> int:
    """How many beams the arguments of a loop ask for."""
    return getattr(named.get("generation_config"), "num_beams", None) or 1


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
        is_late: whether tokens may be written after the end of the text, which no state can take back.

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
