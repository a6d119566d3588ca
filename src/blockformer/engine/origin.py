"""What a copy of weights was made of, and how it is made again without moving."""

from contextlib import contextmanager
from operator import is_

import torch

_last_made = [object()]  # another one for each copy that is made in this process


class Origin:
    """Some tensors of modules, in the state that they are in now.

    They and their memory are held, so that nothing else can come to be in their place. Writes to tensors of inference
    mode are not counted. A copy of a module has no origins: its tensors' writes are counted from zero.

    Args:
        places: for each tensor the dict of its module that holds it, and its name there.
        sampled: look at some of their numbers as well, since PyTorch does not count a write through `.data`, by which
            adapters are merged. A write to single numbers, or to few rows or columns, may stay unseen.
    """

    def __init__(self, places: list[tuple[dict, str]], sampled: bool = False):
        self._tensors = [held[name] for held, name in places]
        self._memory = [tensor.detach() for tensor in self._tensors]
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._samples = [_sample_of(tensor) for tensor in self._memory] if sampled else []
        self._state = self._now()

    def is_of(self, places: list[tuple[dict, str]]) -> bool:
        """Whether these places hold the same tensors, and nobody wrote to them or gave them other memory."""
        held = [held.get(name) for held, name in places]
        return all(map(is_, held, self._tensors)) and self._now() == self._state

    def _now(self) -> list:
        # A compiled step asks this of all 4-bit weights.
        now: list = [tensor.data_ptr() for tensor in self._tensors] + [tensor._version for tensor in self._counted]
        return now + [sample.tobytes() for sample in self._samples]

    def __reduce__(self):
        return type(None), ()


_SAMPLED = 16  # numbers of a weight at most
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


def put_copy(module: torch.nn.Module, name: str, copy: torch.Tensor) -> None:
    """Put a copy of weights into a buffer of a module that no state dict has.

    If there is an older one, its numbers change and it stays: compiled code never lets go of a tensor that it has read.
    """
    held = module._buffers.get(name)
    is_alike = held is not None and (held.shape, held.dtype, held.device) == (copy.shape, copy.dtype, copy.device)
    if is_alike and not held.is_inference():
        held.copy_(copy)
    else:
        module.register_buffer(name, copy, persistent=False)
    _last_made[0] = object()


@contextmanager
def kept(module: torch.nn.Module, names):
    """While it lasts, a module is without these copies: what casts and moves its tensors leaves them as they are."""
    copies = {name: module._buffers.pop(name) for name in names if name in module._buffers}
    try:
        yield
    finally:
        module._buffers.update(copies)


def last_made() -> object:
    """Another object once any copy has been made: as long as it is the same one, all of them are where they were."""
    return _last_made[0]
