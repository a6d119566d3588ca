"""What computes the logits of a step: compiled parts on a GPU or on a CPU, or the model itself.

B rows, R room of the buffers, V vocabulary.
"""

import torch
from torch import nn

from .compiler import compiled
from .fallbacks import Uncompiled
from .joined import join
from .step_functions import StepFunctions, log_sums
from .watched import unknown_code


class Parts:
    """The parts of a model's step for a GPU, as functions of tensors.

    Attributes:
        beams: rows that share the keys and values of their source.
        windows: layer type -> how many tokens its layers see, or None.
        cut: see `StepFunctions`; a graph reads whole buffers.

    Args:
        model: a decoder with a language model head, or an encoder-decoder.
        is_compiled: whether the parts are compiled; a CPU runs them as they are.
    """

    beams, cut = 1, ()

    def __init__(self, model, is_compiled: bool):
        if (unknown := unknown_code(model)) is not None:
            raise Uncompiled(f"the model contains code of another package: {unknown}")
        stack = model.get_decoder()
        if stack.passes > 1:
            raise Uncompiled("layers share their weights")
        self._joined = join(stack.layers)
        in_place: dict[nn.Module, nn.Module] = {
            layer: part for product in self._joined for layer, part in zip(product.layers, product.parts(), strict=True)
        }
        device = "cuda" if is_compiled else None
        functions = StepFunctions(model, written=1, in_place=in_place, device=device)
        self.windows, self.logits, self.log_sums = functions.windows, functions.logits, functions.log_sums
        self.choose = _choose if device is None else compiled(_choose, device)
        self._model = model
        self._places = self._addresses()

    def are_current(self) -> bool:
        """Whether every weight still lies where the graphs read it."""
        return self._places == self._addresses()

    def undo(self) -> None:
        """Take the joined products apart."""
        for product in self._joined:
            product.undo()

    def _addresses(self) -> list[tuple[int, int]]:
        """Which tensors the weights are, and where; a quantized one, whose numbers are in other tensors, is at 0."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        return [(id(tensor), tensor.data_ptr()) for tensor in tensors]


class CPUParts:
    """The parts of a step on a CPU, in place of `Parts`.

    Args:
        steps: the model's `CompiledSteps`.
        sources, beams: of a batch, and of each of them.
    """

    def __init__(self, steps, sources: int, beams: int = 1):
        self._steps, self._functions, self.choose = steps, steps.functions_for(sources, beams), _choose
        self.windows, self.log_sums, self.beams = self._functions.windows, self._functions.log_sums, beams
        self.cut = self._functions.cut
        steps.refresh()

    def logits(self, *given):
        """As `StepFunctions.logits`."""
        return self._steps.computed(self._functions, *given)


class PlainParts:
    """The model itself in place of compiled parts: it writes the rest of a text in whose middle it was changed.

    Args:
        model: as the caller has it by now.
        cache: the library's, with all tokens but the last one.
        source: what an encoder-decoder's `forward` gets of its source, by name.
    """

    windows: dict = {"": None}
    cut = ()

    def __init__(self, model, cache, beams: int, source: dict):
        self._model, self.cache, self.beams, self._source = model, cache, beams, source
        self.choose, self.log_sums = _choose, log_sums

    def logits(self, input_ids, positions, seen: dict, *_):
        """As `StepFunctions.logits`."""
        given = {"past_key_values": self.cache, "use_cache": True, "return_dict": True}
        if self._source:
            return self._model(decoder_input_ids=input_ids, **self._source, **given).logits
        ((blocks, slot),) = seen.values()
        mask = blocks.flatten(1)[:, : int(slot) + 1].long()
        return self._model(input_ids=input_ids, attention_mask=mask, position_ids=positions, **given).logits


def _choose(logits, state_ids, output, slot, unfinished, is_end, pad, count):
    """Greedy choice from logits [B, 1, V], kept in `output` [B, R]; a row that has ended gets padding."""
    token = logits[:, -1].float().argmax(-1)
    token = torch.where(unfinished, token, pad)
    count.add_(unfinished.any())
    unfinished.logical_and_(~is_end[token])
    state_ids.copy_(token[:, None])
    output.index_copy_(1, slot + 1, token[:, None])
