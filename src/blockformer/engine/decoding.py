"""The loop of a prepared model that writes: greedy search and sampling, as in the library's `_sample`, and beams.

Keys and values lie in buffers with room to spare, and the beams of a source share the encoder's. A step is
compiled, captured on a GPU, or the model's own `forward`. Processors and stopping criteria are the library's. If the
caller's code changes the model between two tokens, for example by a hook, the model's `forward` writes the rest.

B rows, n beams of a source, T tokens of the prompt, S tokens so far, V vocabulary.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    MaxLengthCriteria,
)

from ..model.compat import CACHE
from ..model.modeling_decoder import BlockformerDecoderForCausalLM
from ..watched import Modules, is_watched, shows_cache, unknown_code
from .attention import PreparedAttention, is_in_use
from .choices import is_enabled
from .graphs import ModelStep, Prompt, Steps, room_for
from .search import BeamSearch, Sampling
from .step_functions import Fallbacks, OtherLoop
from .step_parts import has_state, held_by

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_MOST_FREE = 2  # buffers that wait for later calls, by hand: two threads that write at once
_SAYS_NOTHING = {"use_cache": (None, True), "synced_gpus": (None, False), "logits_to_keep": (None, 0, 1)}
_KNOWN = {
    "logits_processor", "stopping_criteria", "generation_config", "streamer", "attention_mask", "position_ids",
    "encoder_outputs", "decoder_attention_mask", "past_key_values", "cache", "tokenizer", *_SAYS_NOTHING,
}  # fmt: skip
# Methods of the library's loops that this one does not call: a prefix comes in by the first.
_NOT_CALLED = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
_OF_DECODERS = BlockformerDecoderForCausalLM.prepare_inputs_for_generation  # for texts that outgrow their keys
_LOOPS = ("_sample", "_beam_search")
# What this loop does not know of the settings of a call, and of a config's, by which every call returns more.
_UNKNOWN = (
    "output_hidden_states", "output_attentions", "output_router_logits", "output_scores", "output_logits",
    "cache_implementation", "prefill_chunk_size", "is_assistant",
)  # fmt: skip
_UNKNOWN_OF_BEAMS = ("do_sample", "low_memory")
_TOUCHED = "a module was replaced or wrapped, has a hook, another setting or kind of weight, or is in training mode"


class Decoding:
    """Greedy search, sampling and beam search of a prepared model.

    It does not keep the model, which keeps it: each call passes the model, so `del model` frees its memory.

    Args:
        device: the kind of device that it serves.
        steps: what makes the functions of a step: `CompiledSteps` for a CPU, or `CapturedSteps` for a GPU, which a CPU
            runs as they are, for tests. None: a step is the model's own `forward`.
    """

    def __init__(self, device: str, steps: Callable | None = None):
        self._arguments = (device, steps)
        self._device = device
        self.steps: Any = None if steps is None else steps()
        self.by_graphs = steps is not None and self.steps.by_graphs
        self.fallbacks = Fallbacks(is_logged=steps is not None)
        self._lock = threading.RLock()
        self._watched: Modules | None = None
        self._unknown: str | None = None
        self._free: list[Steps] = []

    def __reduce__(self):
        return Decoding, self._arguments  # a copy compiles and captures anew

    def undo(self) -> None:
        """Take back what was done to the model's weights."""
        with self._lock:
            self._free = []
            if self.by_graphs:
                self.steps.undo()

    def write(self, model, input_ids, arguments: tuple, named: dict):
        """What the library's loop returns for prompts [B, T], or None for that loop, which has the same arguments."""
        named = without_own_cache(named)
        try:
            call = self._checked(model, input_ids, arguments, named)
            steps, scores = self._read(call)
        except OtherLoop as reason:
            self.fallbacks.note(str(reason))
            return None
        try:
            text = (Sampling if call.beams == 1 else BeamSearch)(call, steps, scores).written()
            return call.returned(text, steps)
        except BaseException:  # of the caller's code, or an interrupt: the caller may go on from what was written
            call.fill(steps, call.held)
            raise
        finally:
            if steps.problem is not None:
                self.fallbacks.note(steps.problem)
            steps.end()
            with self._lock:
                if self.by_graphs and steps.parts is call.parts:
                    self._free = [*self._free[-_MOST_FREE + 1 :], steps]

    def _checked(self, model, input_ids, arguments, named) -> "Call":
        """The call, or `OtherLoop` with what this loop does not know."""
        settings = named.get("generation_config")
        others = [name for name, value in named.items() if name not in _KNOWN and value is not None]
        others += [name for name, quiet in _SAYS_NOTHING.items() if named.get(name) not in quiet]
        config = model.get_decoder().config
        others += [name for each in (settings, config) for name in _UNKNOWN if getattr(each, name, None)]
        others += [name for name in _UNKNOWN_OF_BEAMS if beams_of(named) > 1 and getattr(settings, name, None)]
        if input_ids.device.type != self._device or not is_enabled():
            raise OtherLoop(f"fast paths are off, or the prompt is not on '{self._device}'")
        if input_ids.shape[1] == 0:
            raise OtherLoop("the prompt has no token ids")
        if arguments or others:
            raise OtherLoop(f"{(*others, 'a positional argument')[0]} is given")
        mask = named.get("decoder_attention_mask")
        if mask is not None and not mask.all():
            raise OtherLoop("the target is padded")
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self._device):
            raise OtherLoop("gradients are on" if torch.is_grad_enabled() else "autocast is on")
        for name in (*_LOOPS, *_NOT_CALLED):
            usual, own = getattr(GenerationMixin, name), getattr(getattr(model, name), "__func__", None)
            is_other = name in _NOT_CALLED and own not in (usual, _OF_DECODERS)
            if is_other or not _is_of_library(usual):
                raise OtherLoop(f"{name} was replaced")
        call = Call(model, input_ids, named, self.by_graphs)
        if call.may_outgrow_keys():
            raise OtherLoop("the text may outgrow the frequencies that its first keys turn by ('longrope')")
        if self.steps is not None:
            self._find_steps(call)
        if call.watched is None and shows_cache(model):
            raise OtherLoop("a hook, or a function in place of a method, gets the cache and might change it")
        if call.watched is None and call.beams > 1 and self._sees_beams(model):
            raise OtherLoop("beams share a prompt, which a hook, a part in training mode or other attention would see")
        if call.watched is None and call.kind[1] > 1 and call.runs_code:
            raise OtherLoop("beams share a source, and code of the caller's might change the model")
        if call.beams > 1:
            begins = (input_ids, mask, named.get("attention_mask"), *(named.get("encoder_outputs") or ())[:1])
            if not all(each is None or are_equal(each, call.beams) for each in begins):
                raise OtherLoop("beams begin with different texts")
        return call

    def _find_steps(self, call: "Call") -> None:
        """Have a call written by functions, or on a CPU, where these cannot be used, by the model itself.

        Raises:
            OtherLoop: a GPU's cannot be used.
        """
        try:
            if not is_in_use(call.model.config):
                raise OtherLoop(f"attention is computed by '{call.model.config._attn_implementation}'")
            with self._lock:
                if self._watched is None:
                    # An encoder has read its source before.
                    encoder = call.model.get_encoder() if call.model.config.is_encoder_decoder else None
                    self._watched = Modules(call.model, without=encoder)
                    self._unknown = unknown_code(call.model)
                if not self._watched.are_untouched():
                    raise OtherLoop(_TOUCHED)
                if self._unknown is not None:
                    raise OtherLoop(f"the model contains code of another package: {self._unknown}")
                if self.steps.has_moved(call.model):
                    self.undo()
                call.parts, call.watched = self.steps.functions_for(call.model, *call.kind), self._watched
                call.has_moved = self.steps.has_moved
        except OtherLoop as reason:
            if self.by_graphs:
                raise
            self.fallbacks.note(str(reason))

    @staticmethod
    def _sees_beams(model) -> bool:
        """Whether something in a model would see that a prompt is read once for all of its beams."""
        return not is_in_use(model.config) or is_watched(model) or any(each.training for each in model.modules())

    def _read(self, call: "Call"):
        """Steps that stand after the prompt, and the scores [B, V] of the first new token."""
        prompt, scores = call.read()
        length = call.input_ids.shape[1]
        # On a CPU room for half as much again, by hand, also where buffers grow.
        longest = call.longest if self.by_graphs else min(length + length // 2, call.longest)
        room = room_for(longest + 1)
        with self._lock:
            self._free = [steps for steps in self._free if steps.parts is call.parts]
            free = next((steps for steps in self._free if steps.fits(prompt, room)), None)
            if free is not None:
                self._free.remove(free)
        steps = free or Steps(call.parts, prompt, room, scores.shape[-1])
        steps.begin(prompt, call.input_ids, call.ends, call.pad)
        return steps, scores


class Call:
    """A call of `generate`: what is to be read, and how tokens are chosen.

    Attributes:
        kind: how many sources, and how many beams of each share it: see `CompiledSteps`.
        cache: the library's that the caller sees afterwards, or None.
        is_late: whether the host goes on before it knows a token.
        is_greedy: whether the step itself chooses the token.
        held: how many tokens the buffers hold.
        pads_ended: whether a row that has ended gets padding, by the library's sign that a criterion knows end tokens.
        parts: what computes a step: functions, or the model itself.
        watched: the modules that the functions were compiled of; None if a step is the model's own.
        has_moved: see `CapturedSteps`.

    Args:
        by_graphs: whether the steps are a GPU's.
    """

    def __init__(self, model, input_ids, named: dict, by_graphs: bool):
        self.model, self.input_ids, self._named = model, input_ids, named
        self.watched: Modules | None = None
        self.has_moved: Any = None
        self.held = input_ids.shape[1]
        self.settings = named["generation_config"]
        self.processors, self.criteria = named["logits_processor"], named["stopping_criteria"]
        self.streamer, self.beams = named.get("streamer"), beams_of(named)
        sharing = self.beams if model.config.is_encoder_decoder else 1  # a decoder's beams are rows like others
        self.kind = (len(input_ids) // sharing, sharing)
        self.parts: Any = self.by_model(self.kind[1])
        # The library asks how long a text may be only after a token: one is written in any case.
        self.longest = max(self.criteria.max_length or self.settings.max_length, self.held + 1)
        ends = [each.eos_token_id for each in self.criteria if isinstance(each, EosTokenCriteria)]
        self.ends = [int(token) for each in ends for token in each.flatten().tolist()]
        self.pads_ended = any(hasattr(each, "eos_token_id") for each in self.criteria)
        pad = self.settings._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.own_criteria = [each for each in self.criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria)]
        self.runs_code = any(map(_may_be_own, (*self.processors, *self.criteria, self.streamer)))
        # What a streamer of the caller's does to a model counts from the next token on.
        self.is_late = by_graphs and not _may_be_own(self.streamer)
        is_plain = not self.settings.do_sample and not self.processors and not self.own_criteria
        self.is_greedy = self.beams == 1 and is_plain
        self._has_dict = getattr(self.settings, "return_dict_in_generate", False)
        self.cache = seen_cache(named)
        self._past = 0
        if self.cache is not None:
            self._past = tokens_in(self.cache, model.get_decoder(), input_ids, named, is_late=by_graphs)

    def may_outgrow_keys(self) -> bool:
        """Whether cached keys may have to turn by other frequencies, which only the library's loop sees to."""
        if not (switches := self.model.get_decoder().switches):
            return False
        mask = self._named.get("attention_mask")
        is_fresh = not self._past and isinstance(mask, torch.Tensor) and mask.dim() == 2
        begins = int(mask.sum(-1).max()) if is_fresh else self._past
        return any(begins <= at < self.longest for at in switches)

    def by_model(self, beams: int = 1) -> "ModelStep":
        """Steps by the model's `forward`, with so many beams that share a source."""
        if not self.model.config.is_encoder_decoder:
            return ModelStep(self.model, {})
        source = {name: self._named.get(name) for name in ("encoder_outputs", "attention_mask")}
        layers = self.model.get_decoder().layers
        can_share = all(isinstance(getattr(layer, "cross_attn", None), PreparedAttention) for layer in layers)
        return ModelStep(self.model, source, beams if can_share else 1)

    def advance(self, steps: Steps, length: int) -> None:
        """`Steps.advance`; after a change of the model, or where the compiler fails, by the model itself."""
        is_ours = self.watched is not None and steps.parts is self.parts
        if is_ours and self.runs_code and (self.has_moved(self.model) or not self.watched.are_untouched()):
            self._go_on_plainly(steps, "code of the caller's has changed the model in the middle of a text")
        try:
            steps.advance(length, self.is_greedy)
        except OtherLoop as reason:
            self._go_on_plainly(steps, str(reason))
            steps.advance(length, self.is_greedy)
        self.held = length

    def _go_on_plainly(self, steps: Steps, problem: str) -> None:
        steps.problem, steps.parts = problem, self.by_model()

    def shown(self, text):
        """Tokens int [B, S] for processors and criteria: the caller's own get a tensor that no buffer lies behind."""
        return text.clone() if self.runs_code else text

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
        named, stack = self._named, self.model.get_decoder()
        mask = named.get("attention_mask")
        rows, length = self.input_ids.shape
        first = slice(None, None, self.beams)  # a prompt is read once for all of its beams
        if self.model.config.is_encoder_decoder:
            cache = stack.new_cache(for_cross_attention=True)
            output = self.model(
                encoder_outputs=(named["encoder_outputs"][0][first],), decoder_input_ids=self.input_ids[first],
                attention_mask=None if mask is None else mask[first],
                past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True,
            )  # fmt: skip
            visible = self.input_ids.new_ones(rows, length, dtype=torch.bool)
            positions = self.input_ids.new_full((rows, 1), length)
            source_mask = None if mask is None else mask != 0
            prompt = Prompt(cache.self_attention_cache, visible, positions, cache.cross_attention_cache, source_mask)
        else:
            cache = stack.new_cache() if self.cache is None else self.cache
            positions = named.get("position_ids")
            if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != (rows, length)):
                raise OtherLoop("the attention mask is not [batch, length]")
            inputs = {"input_ids": self.input_ids[:, self._past :], "attention_mask": mask, "position_ids": positions}
            if positions is not None:
                inputs["position_ids"] = positions[:, self._past - length :]
            inputs = {name: None if each is None else each[first] for name, each in inputs.items()}
            output = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True)
            visible = self.input_ids.new_ones(rows, length, dtype=torch.bool) if mask is None else mask != 0
            last = visible.sum(-1, keepdim=True) - 1 if positions is None else positions[:, -1:].expand(rows, 1)
            prompt = Prompt(cache, visible, last.clamp(min=0) + 1)
        logits = output.logits[:, -1].to(copy=True, dtype=torch.float32).repeat_interleave(self.beams, 0)
        least = 1 if self.watched is None else len(stack.layers)  # in training, checkpointing leaves a cache empty
        if logits.shape[0] != rows or len(prompt.layers) < least:
            raise OtherLoop("the cache does not hold this model's keys and values")
        return prompt, logits


def _is_of_library(function) -> bool:
    """Whether the outermost code of a function is transformers' own, decorated or not."""
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] == "transformers"


def _may_be_own(part) -> bool:
    """Whether a processor, a criterion or a streamer runs code from outside of the library, its own or one it holds."""
    if part is None:
        return False
    if type(part).__module__.partition(".")[0] != "transformers":
        return True
    held = (each for each in vars(part).values() if not isinstance(each, PreTrainedTokenizerBase))
    return any(map(callable, held))


def are_equal(rows, beams: int) -> bool:
    """Whether each `beams` rows of [B * n, ...] are equal."""
    groups = rows.unflatten(0, (-1, beams))
    return torch.equal(groups, groups[:, :1].expand_as(groups))


def beams_of(named: dict) -> int:
    """How many beams the arguments of a loop ask for."""
    return getattr(named.get("generation_config"), "num_beams", None) or 1


def without_own_cache(named: dict) -> dict:
    """Arguments of the library's loop without a cache that `generate` has made for them, if the caller never sees it.

    It loses its mark: if the caller gets it, a later call may bring it as the caller's own, emptied.
    """
    cache = named.get(CACHE)
    if not getattr(cache, "is_of_generate", False):
        return named
    cache.is_of_generate = False
    is_returned = getattr(named["generation_config"], "return_dict_in_generate", False)
    return named if is_returned or cache.get_seq_length() else {**named, CACHE: None}


def seen_cache(named: dict):
    """The cache that the caller sees after a call of `generate` with these arguments of its loop; None if none is seen.

    Raises:
        OtherLoop: it is of another kind than a decoder's without beams.
    """
    cache, settings = named.get(CACHE), named["generation_config"]
    is_returned = getattr(settings, "return_dict_in_generate", False)
    if cache is None:
        return None
    if type(cache) is not DynamicCache or cache.offloading or beams_of(named) > 1:
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
    rows, length = input_ids.shape
    kinds = {(len(each), each.dtype, each.device) for each in keys}
    mask, settings = named.get("attention_mask"), named["generation_config"]
    seen = getattr(settings, "_mask_length", -1) if mask is None else mask.shape[1]  # a prompt may begin behind it
    held = next(layer.get_seq_length() for layer in layers if not has_state(layer))
    if len(keys) != len(stack.layers) or kinds != {(rows, stack.dtype, stack.device)} or seen != length:
        raise OtherLoop("a cache is given that does not hold the beginning of the prompt")
    if not 0 < held < length:
        raise OtherLoop("a cache is given that holds no less than the prompt")
    return held
