"""The compiled functions of a step for one kind of batch: its first part, the layers and the last part.

B rows, n beams of a source, S tokens with the new one, R room of a cache, E source length, K key/value heads, D head
size, V vocabulary.
"""

import itertools

import torch
from torch.export import Dim
from torch.nn import functional as F

from ..model.positions import rotations_of
from .compiled import functions_of
from .compiling import Varying
from .fallbacks import OTHER_WEIGHTS, Uncompiled
from .few_rows import BLOCK, MOST_ROWS
from .onednn import PackedCopies
from .step_parts import WRITTEN, FirstPart, LastPart, LayersPart, position_bias

# Bytes of weights up to which a layer takes no longer than calling it, and how many of these form one function.
_SMALL_LAYER, _SMALL_LAYERS = 1 << 23, 8
_ROWS = 3  # in an example; other than any size of the model that could be taken for it


class StepFunctions:
    """The compiled parts of a step for one kind of batch.

    Args:
        layers: functions of one or more layers each, `sizes` how many and `kinds` of which type.
    """

    def __init__(self, first, layers: list, sizes: list[int], kinds: list[str], last):
        self._first, self._layers, self._sizes, self._kinds, self._last = first, layers, sizes, kinds, last

    @classmethod
    def of(cls, model, sources: str, beams: int, copies: PackedCopies):
        """Load or compile them; None if that fails.

        Args:
            sources: "one", "few" (2 to `MOST_ROWS`) or "many".
            copies: of the weights, for oneDNN's products.
        """
        stack = model.get_decoder()
        groups = _groups_of(stack.layers)
        with torch.device("cpu"):
            example = Example(stack, sources, beams)
            parts = [LayersPart(group, stack.config, example.rotating, beams) for group in groups]
            layers = [(part, *example.layers(len(part.layers))) for part in parts]
            others = [(FirstPart(stack), *example.first()), (LastPart(model, stack), *example.last())]
        functions = functions_of([layers[0], *others, *layers[1:]], copies)
        if functions is None:
            return None
        layer, first, last, *more = functions
        sizes, kinds = [len(group) for group in groups], [group[0].layer_type for group in groups]
        return cls(first, [layer, *more], sizes, kinds, last)

    def run(self, input_ids, positions, seen: dict, buffers: list, source_mask, sources: list):
        """The logits [B, 1, V]; `Uncompiled` once a tensor of the model has another dtype, shape or device.

        Args:
            seen: layer type -> which places of its buffers are seen, and the new token's.
            buffers: of each layer keys and values; `sources` likewise of the encoder's states, or none.
        """
        output = self._first(input_ids, positions, *next(iter(seen.values())))
        if output is None:
            raise Uncompiled(OTHER_WEIGHTS)
        states, cos_sin, biases = output
        bias, start = biases[0] if biases else None, 0
        for function, size, kind in zip(self._layers, self._sizes, self._kinds, strict=True):
            own = [[each for pair in pairs[start : start + size] for each in pair] for pairs in (buffers, sources)]
            states = function(states, *seen[kind], cos_sin, bias, own[0], source_mask, own[1])
            if states is None:
                raise Uncompiled(OTHER_WEIGHTS)
            start += size
        if (logits := self._last(states)) is None:
            raise Uncompiled(OTHER_WEIGHTS)
        return logits


def in_buffers(visible, place: int, window: int | None = None) -> tuple:
    """Which places of buffers are seen, bool [B, places / BLOCK rounded up, BLOCK], and the new token's, int64 [1].

    Args:
        visible: bool [B, S], of all tokens; the buffers hold the last `place + 1` of them, with the new one.
        window: how many tokens are seen at most; None: all.
    """
    count = place + 1
    visible = visible[:, -count:]
    if window is not None and count > window:
        visible = F.pad(visible[:, -window:], (count - window, 0))
    blocks = F.pad(visible, (0, max(-count % BLOCK, WRITTEN - count))).unflatten(1, (-1, BLOCK))
    return blocks, torch.tensor([place], device="cpu")


def _groups_of(layers) -> list[list]:
    """The layers that are a function together: each by itself, or some of one type that are small."""
    sizes = [sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers())) for layer in layers]
    count = _SMALL_LAYERS if max(sizes) <= _SMALL_LAYER else 1
    alike = [list(group) for _, group in itertools.groupby(layers, lambda layer: layer.layer_type)]
    return [group[start : start + count] for group in alike for start in range(0, len(group), count)]


class Example:
    """Example arguments of the parts, and which of their sizes vary.

    Args:
        sources, beams: as `StepFunctions.of` has them.
    """

    def __init__(self, stack, sources: str, beams: int):
        self.stack, self.blocks = stack, 11
        self.sources = 1 if sources == "one" else _ROWS
        self.rows = self.sources * beams
        most = MOST_ROWS if sources == "few" else None
        self.by_source = {} if sources == "one" else {0: Varying("sources", 2, most)}
        self.by_row = {} if sources == "one" else {0: Varying("sources", 2, most, times=beams)}
        self.rotations = rotations_of(stack.rotary_emb, stack.config, *self._states_and_positions())
        self.rotating = sorted(self.rotations)

    def first(self):
        """Of a `FirstPart`."""
        ids = torch.zeros(self.rows, 1, dtype=torch.long)
        varying = (self.by_row, self.by_row, {**self.by_row, 1: Dim.DYNAMIC}, None)
        return (ids, self._states_and_positions()[1], self._mask(), self._place()), varying

    def layers(self, count: int):
        """Of a `LayersPart` of so many layers."""
        stack, config = self.stack, self.stack.config
        states, _ = self._states_and_positions()
        room, length = 101, 53
        shape = (self.rows, config.num_key_value_heads, room, config.head_dim)
        own = [torch.zeros(shape, dtype=states.dtype) for _ in range(2 * count)]
        cos_sin = [each.clone() for kind in self.rotating for each in self.rotations[kind]]
        bias = position_bias(stack, self._place(), self.blocks)
        arguments = (states, self._mask(), self._place(), cos_sin, bias, own)
        varying: tuple = (
            self.by_row,
            {**self.by_row, 1: Dim.DYNAMIC},
            None,
            [self.by_row if each.shape[0] > 1 else None for each in cos_sin],
            None if bias is None else {2: Dim.DYNAMIC},
            [{**self.by_row, 2: Dim.DYNAMIC}] * len(own),
        )
        if not config.is_encoder_decoder:
            return (*arguments, None, []), (*varying, None, [])
        mask = torch.ones(self.sources, 1, 1, length, dtype=torch.bool)
        shape = (self.sources, config.num_key_value_heads, length, config.head_dim)
        sources = [torch.zeros(shape, dtype=states.dtype) for _ in range(2 * count)]
        sources_vary = [{**self.by_source, 2: Dim.DYNAMIC}] * len(sources)
        return (*arguments, mask, sources), (*varying, {**self.by_source, 3: Dim.DYNAMIC}, sources_vary)

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
