"""Copies of weights in other layouts, which follow their weights.

I inputs and O outputs of a linear layer.
"""

import threading
from operator import is_

import torch

_SAMPLED = 16  # numbers of a weight at most, by hand
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Following:
    """Copies of weights in another layout, made once they are needed, and again once the weights have changed.

    The weights and their memory are held, so that nothing else can come to lie there. Writes to tensors of inference
    mode are not counted. A copy or a pickle of it starts without copies: its tensors' writes are counted from zero.

    Args:
        copies: each with the `holders` of what it is a copy of (for each tensor the dict of its module that holds it,
            and its name there), and `make`, which makes it.
        sampled: look at some of their numbers as well, since PyTorch does not count a write through `.data`, by which
            adapters are merged. A write to single numbers, or to few rows or columns, may stay unseen.
    """

    def __init__(self, copies: list, sampled: bool = False):
        self.copies, self._sampled = copies, sampled
        self._holders = [holder for copy in copies for holder in copy.holders]
        self._tensors: list | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(each.numel() * each.element_size() for copy in self.copies for each in copy.buffers())

    def refresh(self) -> None:
        """Make the copies that are missing or out of date."""
        if self._is_current():
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not self._is_current():  # a thread that waits for it may find them made
                tensors = [held[name] for held, name in self._holders]
                self._memory = [tensor.detach() for tensor in tensors]
                self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
                self._samples = [_sample_of(tensor) for tensor in self._memory] if self._sampled else []
                state = self._state_of(tensors)  # before the copies: a write meanwhile makes them again
                for copy in self.copies:
                    copy.make()
                self._tensors, self._state = tensors, state

    def _is_current(self) -> bool:
        if not self.copies:
            return True
        tensors = self._tensors
        if tensors is None or not all(map(is_, [held.get(name) for held, name in self._holders], tensors)):
            return False
        return self._state_of(tensors) == self._state

    def _state_of(self, tensors: list) -> list:
        # A compiled step checks all 4-bit weights by this.
        now: list = [tensor.data_ptr() for tensor in tensors] + [tensor._version for tensor in self._counted]
        return now + [sample.tobytes() for sample in self._samples]


def _sample_of(tensor):
    """A NumPy array over the memory of some numbers of a weight [O, I], of any dtype, as integers.

    They lie on its diagonal: whoever writes to some rows or columns, such as a head's, writes to one of them.
    """
    numbers = tensor.view(_INTEGERS[tensor.element_size()])
    steps = [-(-size // _SAMPLED) for size in tensor.shape]
    count = min(-(-size // step) for size, step in zip(tensor.shape, steps, strict=True))
    stride = sum(step * each for step, each in zip(steps, tensor.stride(), strict=True))
    return numbers.as_strided((count,), (stride,)).numpy()
