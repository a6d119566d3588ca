"""A step as functions of tensors, compiled: its first part, the layers and the last part.

The layers are copies of the same parameters, in which matmuls may be computed in another way.

B rows, n beams of a source, S tokens with the new one, R room of a cache, E source length, K key/value heads, D head
size, V vocabulary.
"""

import copy
import gc
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

import torch
from torch import nn
from transformers.utils import logging

from .compiler import compiled, is_of_compiler, progress
from .few_rows import BLOCK
from .search import choose
from .step_parts import FirstPart, LastPart, LayersPart, keeps_state

logger = logging.get_logger(__name__)
NO_CODE = "code for such a batch could not be compiled"
_COMPILING = threading.Lock()
# Bytes of weights up to which a layer takes no longer than calling it, and how many of these form one function. By
# hand: more in one function take longer to compile, in proportion.
_SMALL_LAYER, _SMALL_LAYERS = 1 << 23, 8


class OtherLoop(Exception):
    """A call that goes to transformers' own loop, or a step that the model's `forward` takes. The message says why."""


class Fallbacks:
    """Why texts were written by transformers' own loop, and how often.

    Args:
        is_logged: whether a new reason is a warning, since somebody waited for a compiler.
    """

    def __init__(self, is_logged: bool):
        self.reasons, self._is_logged = Counter[str](), is_logged

    def note(self, reason: str) -> None:
        """Count a call, and log its reason if that is a new one."""
        self.reasons[reason] += 1
        if self.reasons[reason] == 1 and self._is_logged:
            logger.warning(f"writing runs uncompiled: {reason}.")


def twin(module: nn.Module, copied: Callable = copy.copy) -> nn.Module:
    """A module of the same parameters and of copies of its parts, whose index among the layers is 0.

    Code that is compiled for one layer then serves all that are alike. They have no hooks: those that a step may pass
    over are transformers' own, left behind by a call for hidden states, and the compiler cannot trace them. They have
    no runtime, which holds the step that holds them.

    Args:
        copied: makes the copy of each part, or of what takes its place.
    """
    own = copied(module)
    parts = {name: None if part is None else twin(part, copied) for name, part in own._modules.items()}
    vars(own).update(_modules=parts, _forward_hooks=OrderedDict())
    vars(own).pop("runtime", None)
    if "layer_idx" in vars(own):
        vars(own)["layer_idx"] = 0
    return own


class StepFunctions:
    """The compiled parts of a step. What is compiled once serves all layers that are alike.

    Attributes:
        windows: layer type -> how many tokens its layers see, or None.
        cut: of each layer how many tokens of its buffers are enough, or None: all; empty if no layer has a window.
        dtype: of the model.
        is_ready: whether they have computed before, so that they need not be compiled.
        has_failed: whether the compiler could not compile them.
        can_be_captured: whether a GPU can run them as a graph.

    Args:
        model: a decoder with a language model head, or an encoder-decoder.
        beams: rows of a source.
        rows: how many they are for; None: any number.
        copied: see `twin`.
        device: whose code it is; None: uncompiled.
    """

    can_be_captured = True

    def __init__(
        self,
        model,
        beams: int = 1,
        rows: int | None = None,
        copied: Callable = copy.copy,
        device: str | None = None,
    ):
        stack = model.get_decoder()
        config = stack.config
        groups = _groups_of(stack.layers, _SMALL_LAYERS if device == "cpu" else 1)
        layers = [[twin(layer, copied) for layer in group] for group in groups]
        self._layers = [LayersPart(group, config, beams) for group in layers]
        first, last = (twin(part, copied) for part in (FirstPart(stack), LastPart(model, stack)))
        self._first, self._last = first, last
        self._sizes, self._kinds = [len(group) for group in groups], [group[0].layer_type for group in groups]
        self._keeps_state = [keeps_state(layer) for layer in stack.layers]
        self.is_ready, self.has_failed = device != "cpu", False
        self.beams, self.dtype, self._rows = beams, model.dtype, rows
        self.windows = {kind: config.sliding_window if kind == "sliding_attention" else None for kind in self._kinds}
        cut = [self.windows[layer.layer_type] for layer in stack.layers]
        self.cut = cut if any(cut) else []

        def for_device(function):
            return function if device is None else compiled(function, device)

        alike = {_structure(group): for_device(_run) for group in groups}
        self._run_layers = [alike[_structure(group)] for group in groups]
        self._run_first, self._run_last = for_device(_run), for_device(_run)
        self.choose = choose if device == "cpu" else for_device(choose)

    def slots_for(self, length: int) -> int:
        """How many slots a step of so many tokens sees on a CPU: whole blocks, and at least two of them.

        The compiler makes other code for a single one.
        """
        return max(2 * BLOCK, -(-length // BLOCK) * BLOCK)

    def logits(self, steps, seen: int):
        """The logits [B, 1, V] of the new tokens in `Steps`, which see so many slots, a multiple of `BLOCK`.

        On a CPU the first call waits for the compiler.

        Raises:
            OtherLoop: the compiler failed. Nothing has changed but what the new token's slots hold. It also compiles
                later, for another number of threads for example. Then some layers may have taken the token into their
                states: such a model cannot go on, and the compiler's own error is raised.
        """
        buffers = steps.buffers
        seen_by = {kind: self._seen(steps, seen, window) for kind, window in self.windows.items()}
        if self.cut:
            starts = [self._start(seen, window) for window in self.cut]
            pairs = zip(buffers, starts, strict=True)
            buffers = [[buffer[:, :, start:] for buffer in pair] if start else pair for pair, start in pairs]
        arguments = (steps.ids, steps.positions, seen_by, buffers, steps.source_visible, steps.sources)
        try:
            if not self.is_ready:
                with _COMPILING, progress():
                    self._compile(*arguments)
            return self.computed(*arguments)
        except Exception as error:
            if not is_of_compiler(error):
                raise
            reason = " ".join(str(error).split())[:300]
            logger.warning_once(f"the model runs uncompiled because compiling it failed: {reason}")
            self.has_failed = True
            if self.is_ready and any(self._keeps_state):
                raise
            raise OtherLoop(NO_CODE) from error

    def _seen(self, steps, seen: int, window: int | None):
        """Which slots are seen, bool [B, S / BLOCK, BLOCK], and the new token's, of buffers that begin at `_start`."""
        start = self._start(seen, window)
        visible = steps.visible[:, start:seen]
        if window is not None:
            visible = visible & (steps.columns[start:seen] > steps.slot - window)
        return visible.unflatten(1, (-1, BLOCK)), steps.slot - start if start else steps.slot

    def _start(self, seen: int, window: int | None) -> int:
        """Where buffers begin that are cut to a window, of which at least two blocks are seen."""
        is_cut = window is not None and bool(self.cut)
        return max(0, seen - BLOCK - window) // BLOCK * BLOCK if is_cut else 0

    def computed(self, input_ids, positions, seen: dict, buffers: list, source_mask=None, sources=()):
        """The logits [B, 1, V] of new tokens, int64 [B, 1], at their positions, int64 [B, 1].

        Args:
            seen: layer type -> which slots of its buffers are seen, bool [B, S / BLOCK, BLOCK], and the new token's,
                int64 [1].
            buffers: of each layer keys and values [B, K, R, D], or what its convolution sees [B, D, W] and its state.
            source_mask: bool [B / n, 1, 1, E]; `sources` of each layer keys and values of the encoder's states
                [B / n, K, E, D]. None and none without an encoder.
        """
        for tensor in (input_ids, positions):
            self._vary(tensor)
        for mask, _ in seen.values():
            self._vary(mask, 1)
        if source_mask is not None:
            self._vary(source_mask, 3)
        for pair, keeps in zip((*buffers, *sources), (*self._keeps_state, *(False for _ in sources)), strict=True):
            for tensor in pair:
                self._vary(tensor, None if keeps else 2)
        states, rotations, bias = self._run_first(self._first, input_ids, positions, *next(iter(seen.values())))
        if bias is not None:
            self._vary(bias, 2)
        for tensor in itertools.chain(*rotations.values()):
            self._vary(tensor)
        start = 0
        for run, part, size, kind in zip(self._run_layers, self._layers, self._sizes, self._kinds, strict=True):
            own = [[each for pair in pairs[start : start + size] for each in pair] for pairs in (buffers, sources)]
            self._vary(states)
            states = run(part, states, *seen[kind], rotations, bias, own[0], source_mask, own[1])
            start += size
        self._vary(states)
        return self._run_last(self._last, states)

    def _compile(self, input_ids, positions, seen: dict, buffers: list, *source) -> None:
        """Compute logits once, for the compiler, and leave states as they are."""
        if self.is_ready:  # another thread has compiled them meanwhile
            return
        pairs = zip(buffers, self._keeps_state, strict=True)
        buffers = [[*map(torch.clone, pair)] if keeps else pair for pair, keeps in pairs]
        self.computed(input_ids, positions, seen, buffers, *source)
        gc.collect()  # the compiler leaves cycles that keep the weights
        self.is_ready = True

    def _vary(self, tensor, dim: int | None = None) -> None:
        """Tell the compiler that a dimension of a tensor varies, and so does the number of rows, unless it is fixed."""
        if dim is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        if self._rows is None and tensor.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _run(part, *arguments):
    return part.forward(*arguments)


def _structure(group: list) -> str:
    """A description that two groups share if they can share code: their modules and the shapes of their weights."""
    return str([(layer.layer_type, layer, [each.shape for each in layer.state_dict().values()]) for layer in group])


def _groups_of(layers, most: int) -> list[list]:
    """The layers that are a function together: each by itself, or up to `most` of one type that are small."""
    sizes = [sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers())) for layer in layers]
    most = most if max(sizes) <= _SMALL_LAYER else 1
    groups: list[list] = []
    for _, own in itertools.groupby(layers, lambda layer: layer.layer_type):
        alike = list(own)
        size = _size_of_groups(len(alike), most)
        groups += [alike[start : start + size] for start in range(0, len(alike), size)]
    return groups


def _size_of_groups(layers: int, most: int) -> int:
    """How many of so many layers are a function, so that few are compiled, and traced again in each process.

    30 are five times 6, and not three times 8 and once 6. A step calls at most a quarter more functions for that.
    """
    most_calls = -(-layers // most) * 5 // 4
    sizes = [size for size in range(1, most + 1) if -(-layers // size) <= most_calls]
    return min(sizes, key=lambda size: (size + layers % size, -size))
