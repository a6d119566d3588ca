"""The loop of a prepared model that writes: greedy search and sampling, as in the library's `_sample`, and beams.

Keys and values lie in buffers with room to spare, and the beams of a source share the encoder's. A step is
compiled, captured on a GPU, or the model's own `forward`. Processors and stopping criteria are the library's. If the
caller's code changes the model between two tokens, for example by a hook, the model's `forward` writes the rest.

B rows, n beams of a source, T tokens of the prompt, S tokens so far, V vocabulary.
"""

import threading
from typing import Any

import torch
from transformers.generation import GenerationMixin

from ..watched import Modules, is_watched
from .attention import is_in_use
from .beam_search import BeamSearch
from .call import Call, are_equal, beams_of
from .choices import Fallbacks, OtherLoop, is_enabled
from .gpu_step import GPUStep
from .graphs import Steps, room_for
from .sampling import Sampling
from .step import CompiledSteps
from .step_parts import WRITTEN

_MOST_FREE = 2  # buffers that wait for later calls, by hand: two threads that write at once
_SAYS_NOTHING = {"use_cache": (None, True), "synced_gpus": (None, False), "logits_to_keep": (None, 0, 1)}
_KNOWN = {
    "logits_processor", "stopping_criteria", "generation_config", "streamer", "attention_mask", "position_ids",
    "encoder_outputs", "decoder_attention_mask", "past_key_values", "cache", *_SAYS_NOTHING,
}  # fmt: skip
# Methods of the library's loop that this one does not call: a prefix comes in by the first.
_NOT_CALLED = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
# Fields of a config by which every call returns more, and of a call's settings.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
_RETURNED_TOO = (*_COLLECTED[:2], "output_scores", "output_logits")
_TOUCHED = "a module was replaced or wrapped, has a hook, another setting or kind of weight, or is in training mode"


class Decoding:
    """Greedy search, sampling and beam search of a prepared model.

    Args:
        model: prepared, in evaluation mode and without gradients.
        device: the kind of device that it serves.
        compiled: the steps that a CPU compiles.
        by_graphs: whether a GPU captures the steps; a CPU runs the same ones as they are, for tests. Without this and
            `compiled` a step is the model's own `forward`.
    """

    def __init__(self, model, device: str, compiled: CompiledSteps | None = None, by_graphs: bool = False):
        self._model, self._device, self.compiled, self.by_graphs = model, device, compiled, by_graphs
        self._by_model = compiled is None and not by_graphs
        self.fallbacks = Fallbacks(is_logged=not self._by_model)
        self._lock = threading.Lock()
        self._parts: GPUStep | None = None
        self._watched: Modules | None = None
        self._free: list[Steps] = []

    def __reduce__(self):
        arguments = (self._model, self._device, self.compiled, self.by_graphs)
        return Decoding, (None, ""), arguments  # a copy captures graphs of its own

    def __setstate__(self, state):
        self.__init__(*state)  # type: ignore[misc]

    def undo(self) -> None:
        """Take back what was done to the model's weights."""
        with self._lock:
            if self._parts is not None:
                self._parts.undo()
            self._parts, self._free = None, []

    def write(self, model, input_ids, arguments: tuple, named: dict):
        """What the library's loop returns for prompts [B, T], or None for that loop, which has the same arguments."""
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
            for problem in filter(None, (call.problem, steps.problem)):
                self.fallbacks.note(problem)
            steps.end()
            with self._lock:
                if steps.parts is self._parts and self.by_graphs:
                    self._free = [*self._free[-_MOST_FREE + 1 :], steps]

    def _checked(self, model, input_ids, arguments, named) -> Call:
        """The call, or `OtherLoop` with what this loop does not know."""
        settings = named.get("generation_config")
        others = [name for name, value in named.items() if name not in _KNOWN and value is not None]
        others += [name for name, quiet in _SAYS_NOTHING.items() if named.get(name) not in quiet]
        others += [name for name in _RETURNED_TOO if getattr(settings, name, False)]
        unknown = ("prefill_chunk_size", "is_assistant", *(("do_sample", "low_memory") if beams_of(named) > 1 else ()))
        others += [name for name in unknown if getattr(settings, name, None)]
        others += [name for name in _COLLECTED if getattr(self._model.get_decoder().config, name, False)]
        if input_ids.device.type != self._device or not is_enabled():
            raise OtherLoop(f"fast paths are off, or the prompt is not on '{self._device}'")
        if input_ids.shape[1] == 0:
            raise OtherLoop("the prompt has no token ids")
        if arguments or others:
            raise OtherLoop(f"{(*others, 'a positional argument')[0]} is given")
        if getattr(settings, "cache_implementation", None) is not None:
            raise OtherLoop(f"the cache is to be '{settings.cache_implementation}'")
        mask = named.get("decoder_attention_mask")
        if mask is not None and not mask.all():
            raise OtherLoop("the target is padded")
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self._device):
            raise OtherLoop("gradients are on" if torch.is_grad_enabled() else "autocast is on")
        for name in _NOT_CALLED:
            if getattr(getattr(model, name), "__func__", None) is not getattr(GenerationMixin, name):
                raise OtherLoop(f"{name} was replaced")
        call = Call(model, input_ids, named, self.by_graphs)
        if not self._by_model:
            self._check_steps(call)
        if call.watched is None and call.beams > 1 and self._sees_beams(model):
            raise OtherLoop("beams share a prompt, which a hook, a part in training mode or other attention would see")
        if call.watched is None and call.shares_source and call.runs_code:
            raise OtherLoop("beams share a source, and code of the caller's might change the model")
        if call.beams > 1 and call.own_criteria:
            raise OtherLoop(f"{type(call.own_criteria[0]).__name__} is given")
        if call.beams > 1:
            begins = (input_ids, mask, named.get("attention_mask"), *(named.get("encoder_outputs") or ())[:1])
            if not all(each is None or are_equal(each, call.beams) for each in begins):
                raise OtherLoop("beams begin with different texts")
        return call

    def _check_steps(self, call: Call) -> None:
        """Have a call written by compiled steps, or on a CPU, where these cannot be used, by the model's own.

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
                is_touched = not self._watched.are_untouched()
            if is_touched:
                raise OtherLoop(_TOUCHED)
            if self.compiled is not None:
                self.compiled.functions_for(*call.kind)
            call.watched = self._watched
        except OtherLoop as reason:
            if self.by_graphs:
                raise
            self.fallbacks.note(str(reason))

    @staticmethod
    def _sees_beams(model) -> bool:
        """Whether something in a model would see that a prompt is read once for all of its beams."""
        return not is_in_use(model.config) or is_watched(model) or any(each.training for each in model.modules())

    def _read(self, call: Call):
        """Steps that stand after the prompt, and the scores [B, V] of the first new token."""
        prompt, scores = call.read()
        if not self.by_graphs:
            if call.watched is None:
                parts: Any = call.by_model(call.kind[1])
            else:
                parts = self.compiled.functions_for(*call.kind)
                self.compiled.refresh()
            length = call.input_ids.shape[1]
            room = room_for(min(length + length // 2, call.longest) + WRITTEN)
            steps = Steps(parts, prompt, room, scores.shape[-1])
            steps.begin(prompt, call.input_ids, call.ends, call.pad)
            return steps, scores
        room = room_for(call.longest + 1)
        with self._lock:
            if self._parts is not None and not self._parts.are_current():
                self._parts.undo()
                self._parts, self._free = None, []
            if self._parts is None:
                self._parts = GPUStep(call.model, is_compiled=self._device != "cpu")
            free = next((steps for steps in self._free if steps.fits(prompt, room)), None)
            if free is not None:
                self._free.remove(free)
        steps = free or Steps(self._parts, prompt, room, scores.shape[-1])
        steps.begin(prompt, call.input_ids, call.ends, call.pad)
        return steps, scores
