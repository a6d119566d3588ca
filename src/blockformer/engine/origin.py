"""What a copy of weights was made of, and how it is made again."""

import threading
from operator import is_

import torch


class Origin:
    """Some tensors of modules, in the state that they are in now.

    They and their memory are held, so that nothing else can come to lie there. Writes to tensors of inference
    mode are not counted. A copy of a module has no origins: its tensors' writes are counted from zero.

    Args:
        holders: for each tensor the dict of its module that holds it, and its name there.
        sampled: look at some of their numbers as well, since PyTorch does not count a write through `.data`, by which
            adapters are merged. A write to single numbers, or to few rows or columns, may stay unseen.
    """

    def __init__(self, holders: list[tuple[dict, str]], sampled: bool = False):
        self._tensors = [held[name] for held, name in holders]
        self._memory = [tensor.detach() for tensor in self._tensors]
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._samples = [_sample_of(tensor) for tensor in self._memory] if sampled else []
        self._state = self._now()

    def is_of(self, holders: list[tuple[dict, str]]) -> bool:
        """Whether these holders have the same tensors, and nobody wrote to them or gave them other memory."""
        held = [held.get(name) for held, name in holders]
        return all(map(is_, held, self._tensors)) and self._now() == self._state

    def _now(self) -> list:
        # A compiled step checks all 4-bit weights by this.
        now: list = [tensor.data_ptr() for tensor in self._tensors] + [tensor._version for tensor in self._counted]
        return now + [sample.tobytes() for sample in self._samples]

    def __reduce__(self):
        return type(None), ()


_SAMPLED = 16  # numbers of a weight at most, by hand
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sample_of(tensor):
    """A NumPy array over the memory of some numbers of a weight [O, I], of any dtype, as integers.

    They lie on its diagonal: whoever writes to some rows or columns, such as a head's, writes to one of them.
    """
    numbers = tensor.view(_INTEGERS[tensor.element_size()])
    steps = [-(-size // _SAMPLED) for size in tensor.shape]
    count = min(-(-size // step) for size, step in zip(tensor.shape, steps, strict=True))
    stride = sum(step * each for step, each in zip(steps, tensor.stride(), strict=True))
    return numbers.as_strided((count,), (stride,)).numpy()


class Following:
    """Copies of weights in another layout, made once they are needed, and again once the weights have changed.

    Args:
        copies: each with the `holders` of what it is a copy of, and `make`, which makes it.
        sampled: see `Origin`.
    """

    def __init__(self, copies: list, sampled: bool = False):
        self.copies, self._sampled = copies, sampled
        self._holders = [holder for copy in copies for holder in copy.holders]
        self._origin: Origin | None = None
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
                origin = Origin(self._holders, self._sampled)  # before the copies: a write meanwhile makes them again
                for copy in self.copies:
                    copy.make()
                self._origin = origin

    def _is_current(self) -> bool:
        return not self.copies or (self._origin is not None and self._origin.is_of(self._holders))
