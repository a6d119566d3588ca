"""Whether tensors that the config calls tied are equal, with only parts of them in memory."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.safetensors_io import bytes_of


def check_tied(read: Callable[[str], Tensor | Iterable[Tensor]], pairs: Iterable[tuple[str, str]]) -> None:
    """Check that stored tensors which the config calls tied are equal bit for bit.

    Args:
        read: name -> tensor, or its elements in order, in parts of any size; two tensors are read side by side.
        pairs: pairs of stored names.

    Raises:
        ConversionError: naming every pair that differs.
    """
    differ = [f"{shown(one)} and {shown(other)}" for one, other in pairs if not are_same(read(one), read(other))]
    if differ:
        raise ConversionError(
            "the config ties these tensors, but the stored ones differ; set tie_word_embeddings to false, "
            f"or remove the wrong one:{listed(differ)}"
        )


def are_same(one: Tensor | Iterable[Tensor], other: Tensor | Iterable[Tensor]) -> bool:
    """Whether two tensors, or the elements of two in order, in parts of any size, are equal bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape != other.shape:
        return False
    sides = [_flat(each) for each in (one, other)]
    first, second = (next(side, None) for side in sides)
    while first is not None and second is not None:
        count = min(len(first), len(second))
        if first.dtype != second.dtype or not torch.equal(bytes_of(first[:count]), bytes_of(second[:count])):
            return False
        first = first[count:] if len(first) > count else next(sides[0], None)
        second = second[count:] if len(second) > count else next(sides[1], None)
    return first is second


def _flat(parts: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    """Parts with elements, flat."""
    return (part.reshape(-1) for part in ([parts] if isinstance(parts, Tensor) else parts) if part.numel())
