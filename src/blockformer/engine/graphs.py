"""The buffers of a text, into which a step writes: a compiled one, the model's own, or on a GPU a CUDA graph of it.

B rows, S tokens that a graph looks at, R room of the buffers, E room for an encoder's states, K key/value heads, D head
size, C hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from .few_rows import BLOCK
from .search import choose
from .step_parts import State, has_state, held_by

_LEAST_ROOM = 128  # slots, by hand: a text of a hundred tokens needs one graph


def room_for(length: int) -> int:
    """Places for so many tokens: few different numbers, at most an eighth more than needed in long texts."""
    step = max(_LEAST_ROOM, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


@dataclass
class Prompt:
    """What a model has read so far.

    Attributes:
        cache: of the library's, with all keys and values [B, K, T, D] of the T tokens, or [B / n, K, T, D] for n equal
            rows each.
        visible: bool [B, T], which of them are seen.
        positions: int [B, 1] of the first new token.
        cross: the cache of the encoder's keys and values [B, K, S, D], or None; `source_mask` bool [B, S] says which of
            its states are seen, or is None.
    """

    cache: Cache
    visible: torch.Tensor
    positions: torch.Tensor
    cross: Cache | None = None
    source_mask: torch.Tensor | None = None

    @property
    def layers(self) -> list:
        """The layers of the cache but the last ones that share earlier ones' keys, which hold nothing."""
        return [layer for layer in self.cache.layers if held_by(layer)[0] is not None]


class Steps:
    """The buffers of a batch of B rows, and the graphs that write one more token into them.

    Only one text is written with it at a time. On a CPU, where no graph holds addresses, buffers grow with the text.

    Attributes:
        logits: [B, 1, V], what `advance` has computed.
        problem: why steps are not captured but launched piece by piece, or the model itself has gone on; else None.
        buffers: of each layer keys and values [B, K, R, D], or what its convolution sees and its state (`has_state`).
        windows: how many tokens a layer of the library's cache holds, or None.

    Args:
        parts: what computes the logits: `StepFunctions`, or the model itself.
        prompt: of which keys and values have the sizes.
        room: slots of the buffers; on a GPU for the whole text.
        vocabulary: the number of tokens.
    """

    def __init__(self, parts, prompt: Prompt, room: int, vocabulary: int):
        self.parts = parts
        self.room = room
        with torch.inference_mode(False), torch.no_grad():
            rows, device = len(prompt.visible), prompt.visible.device
            self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
            self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
            self.slot = torch.zeros(1, dtype=torch.long, device=device)
            self.visible = torch.zeros(rows, room, dtype=torch.bool, device=device)
            self.output = torch.zeros(rows, room, dtype=torch.long, device=device)
            self.unfinished = torch.ones(rows, dtype=torch.bool, device=device)
            self.is_end = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.pad = torch.zeros((), dtype=torch.long, device=device)
            self.count = torch.zeros((), dtype=torch.long, device=device)
            self.columns = torch.arange(room, device=device)
            self.has_state = [has_state(layer) for layer in prompt.layers]
            self.windows = [getattr(layer, "sliding_window", None) for layer in prompt.layers]
            leads = [BLOCK if window else 0 for window in parts.cut] or [0] * len(self.has_state)
            self.buffers = [_buffers(layer, rows, room, lead) for layer, lead in zip(prompt.layers, leads, strict=True)]
            self.sources: list = [[] for _ in self.buffers]
            self.source_visible = None
            if prompt.cross is not None:
                sources, length = rows // parts.beams, held_by(prompt.cross.layers[0])[0].shape[2]
                length = length if device.type == "cpu" else room_for(length)
                self.sources = [_buffers(layer, sources, length) for layer in prompt.cross.layers]
                self.source_visible = torch.zeros(sources, 1, 1, length, dtype=torch.bool, device=device)
        self._is_fresh = True
        self.logits: torch.Tensor | None = None
        self.problem: str | None = None
        self._graphs: dict[tuple[int, bool], tuple | None] = {}
        self._pool: Any = None
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def fits(self, prompt: Prompt, room: int) -> bool:
        """Whether a prompt that becomes so many tokens long fits into the buffers."""
        is_as_wide = len(prompt.visible) == len(self.visible) and room <= self.room
        if prompt.cross is None or not is_as_wide:
            return is_as_wide
        return held_by(prompt.cross.layers[0])[0].shape[2] <= self.sources[0][0].shape[2]

    @torch.no_grad()
    def begin(self, prompt: Prompt, input_ids, ends: list[int], pad: int) -> None:
        """Take a prompt of tokens int [B, T]. `ends` are tokens after which a row gets only `pad`."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)  # another stream may have used the buffers last
        length = prompt.visible.shape[1]
        for pair, layer, keeps in zip(self.buffers, prompt.layers, self.has_state, strict=True):
            for buffer, states in zip(pair, held_by(layer), strict=True):
                if not self._is_fresh and not keeps:
                    buffer.zero_()  # what is hidden is multiplied by 0, which NaN survives
                of_rows = buffer.unflatten(0, (len(states), -1))
                # A layer with a window may hold the end of a prompt only.
                (of_rows if keeps else of_rows[..., length - states.shape[2] : length, :])[:] = states[:, None]
        if prompt.cross is not None:
            source_length = held_by(prompt.cross.layers[0])[0].shape[2]
            for pair, layer in zip(self.sources, prompt.cross.layers, strict=True):
                for buffer, states in zip(pair, held_by(layer), strict=True):
                    buffer.unflatten(0, (len(states), -1))[..., :source_length, :] = states[:, None]
                    if not self._is_fresh:
                        buffer[:, :, source_length:].zero_()
            assert self.source_visible is not None
            self.source_visible.zero_()
            mask = prompt.source_mask
            self.source_visible[:, 0, 0, :source_length] = True if mask is None else mask[:: self.parts.beams]
        self.visible.zero_()
        self.visible[:, :length] = prompt.visible
        self.positions.copy_(prompt.positions)
        self.slot.fill_(length)
        self.pad.fill_(pad)
        self.is_end.zero_()
        if ends := [each for each in ends if 0 <= each < len(self.is_end)]:
            self.is_end[torch.tensor(ends, device=self.ids.device)] = True
        self.unfinished.fill_(True)
        self.count.zero_()
        self.output[:, :length].copy_(input_ids)
        self._is_fresh = False

    def advance(self, length: int, greedy: bool) -> None:
        """Write one more token after `length` tokens, the last of which is in `ids`.

        With `greedy` its choice goes into `output` and `ids`; otherwise `logits` [B, 1, V] are there for the caller.
        """
        captured, is_cpu = None, self.ids.device.type == "cpu"
        if is_cpu and length + 1 > self.room:
            self._grow(room_for(length + length // 2 + 1))
        if is_cpu or not self.parts.can_be_captured:
            seen = self.parts.slots_for(length)
        else:
            seen = min(room_for(length), self.room)
            if (seen, greedy) not in self._graphs:
                self._graphs[seen, greedy] = self._captured(seen, greedy)
            captured = self._graphs[seen, greedy]
        if captured is None:
            with torch.inference_mode(False), torch.no_grad():  # one code for every mode of the caller
                self._run(seen, greedy)
        else:
            graph, self.logits = captured
            graph.replay()

    @torch.no_grad()
    def _grow(self, room: int) -> None:
        """Give the buffers so many slots, and take over what they hold."""

        def grown(tensor, dim: int):
            larger = _zeros(tensor, tensor.shape, dim, room, BLOCK if tensor.storage_offset() else 0)
            larger.narrow(dim, 0, self.room).copy_(tensor)
            return larger

        with torch.inference_mode(False):
            for pair, keeps in zip(self.buffers, self.has_state, strict=True):
                if not keeps:
                    pair[:] = [grown(buffer, 2) for buffer in pair]
            self.visible, self.output = grown(self.visible, 1), grown(self.output, 1)
            self.columns = torch.arange(room, device=self.ids.device)
        self.room = room

    @torch.no_grad()
    def copy_rows(self, rows: list[tuple[int, int, int]], length: int) -> None:
        """Copy keys and values of `length` tokens from row to row: source, target and the first token that differs.

        A state is copied whole.
        """
        if not rows:
            return
        *ends, firsts = zip(*rows, strict=True)
        sources, targets = torch.tensor(ends).to(self.ids.device)
        for buffer in self._states():
            buffer.index_copy_(0, targets, buffer.index_select(0, sources))
        pairs = zip(self.buffers, self.has_state, strict=True)
        for buffer in (buffer for pair, keeps in pairs if not keeps for buffer in pair):
            if buffer.device.type == "cpu":
                for source, target, first in rows:
                    buffer[target, :, first:length] = buffer[source, :, first:length]
            else:  # on a GPU a call takes longer than the numbers
                part = buffer[:, :, min(firsts) : length]
                part.index_copy_(0, targets, part.index_select(0, sources))

    @torch.no_grad()
    def fill(self, cache, start: int, length: int) -> None:
        """Append tokens from `start` to `length` to a cache of the library's, whose states become the present ones."""
        for index, (pair, keeps) in enumerate(zip(self.buffers, self.has_state, strict=True)):
            if keeps:
                past, state = pair
                cache.layers[index].update_conv_state(past)
                if state.numel():
                    cache.layers[index].update_recurrent_state(state)
            elif start < length:
                cache.update(*(buffer[:, :, start:length].clone() for buffer in pair), index)

    def end(self) -> None:
        """The text is written."""
        if self._done is not None:
            self._done.record()

    def _run(self, seen: int, greedy: bool) -> None:
        self.visible.index_fill_(1, self.slot, True)
        self.logits = self.parts.logits(self, seen)
        if greedy:
            state = (self.ids, self.output, self.slot, self.unfinished, self.is_end, self.pad, self.count)
            self.parts.choose(self.logits, *state)
        self.slot.add_(1)
        self.positions.add_(1)

    @torch.no_grad()
    def _captured(self, seen: int, greedy: bool):
        """A graph of one token and where its logits are, or None with a `problem`: a step that waits for the device."""
        held = [each.clone() for each in self._state()]
        before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode(False):
            for _ in range(2):  # what is compiled and tuned is not captured
                self._run(seen, greedy)
        torch.cuda.current_stream().wait_stream(stream)
        graph, mode = torch.cuda.CUDAGraph(), "thread_local"
        # cuBLAS keeps its memory from one call to the next. What a graph uses of it must be the graph's own, since
        # other programs' graphs let go of the rest.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.inference_mode(False), torch.cuda.graph(graph, self._pool, capture_error_mode=mode):
                self._run(seen, greedy)
            self._pool, captured = graph.pool(), (graph, self.logits)
        except RuntimeError as error:
            torch.cuda.set_stream(before)
            self.problem, captured = str(error).partition("\n")[0], None
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        for tensor, value in zip(self._state(), held, strict=True):
            tensor.copy_(value)
        return captured

    def _state(self):
        own = (self.ids, self.positions, self.slot, self.visible, self.output, self.unfinished, self.count)
        return (*own, *self._states())

    def _states(self) -> list[torch.Tensor]:
        """What layers that keep a state hold."""
        pairs = zip(self.buffers, self.has_state, strict=True)
        return [buffer for pair, keeps in pairs if keeps for buffer in pair]


def _buffers(layer, rows: int, room: int, lead: int = 0) -> list[torch.Tensor]:
    """Zeros for keys and values [B, K, room, D] of a cache's layer, or for its state."""
    if has_state(layer):
        return [states.new_zeros(rows, *states.shape[1:]) for states in held_by(layer)]
    return [_zeros(states, (rows, *states.shape[1:]), 2, room, lead) for states in held_by(layer)]


def _zeros(like, sizes, dim: int, room: int, lead: int = 0):
    """Zeros of these sizes with so much room in one dimension.

    Where buffers are to be cut, they begin behind a `lead`: the compiler makes other code for what begins at 0.
    """
    sizes = [*sizes[:dim], lead + room, *sizes[dim + 1 :]]
    return torch.zeros(sizes, dtype=like.dtype, device=like.device).narrow(dim, lead, room)


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
        self.choose = choose
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
        self.keys, self.values = (buffer.narrow(2, first, length - first) for buffer in self._pair)

    def _first_of(self, length: int) -> int:
        """The first of so many tokens that a new one may see."""
        return 0

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the key and value of one token [B, K, 1, D]; return all that it sees."""
        for buffer, states in zip(self._pair, (key_states, value_states), strict=True):
            buffer.narrow(2, self._length, 1).copy_(states)
        self._hold(self._length + 1)
        return self.keys, self.values


class _WindowInBuffers(_InBuffers, DynamicSlidingWindowLayer):
    """The same of a layer with a window."""

    def _hold(self, length):
        self.cumulative_length = length
        super()._hold(length)

    def _first_of(self, length):
        return max(0, length - self.sliding_window)
