"""What the numbers in a checkpoint say: not finite, all zero, never trained, equal to another checkpoint's.

Each tensor goes by once, in parts; no more than a part of it is in memory.

A matrix that nobody trained is a draw of independent numbers. Training makes some rows and columns larger than others,
and the tails heavier. So three things are measured, each of which a draw has within narrow, known bounds: how the mean
squares of rows and of columns scatter, and the kurtosis (3 for normal numbers, 1.8 for uniform ones).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockformer.files.finite import nonfinite
from blockformer.files.progress import Progress
from blockformer.files.quantized import PLAIN
from blockformer.files.safetensors_io import TensorInfo

SMALLEST = 4096
"""Elements of the smallest matrix that is judged, and rows and columns of it."""
SMALLEST_SIDE = 16
SIGMAS = 5.0
"""How many standard deviations from a draw's expected value still count as a draw."""
SAMPLED = 3
"""Parts of a large tensor that are judged: its first, its middle and its last."""
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes of which torch finds no minimum."""
KURTOSES = {3.0: 24.0, 2.829: 10.6, 2.366: 3.8, 1.8: 0.66}
"""Kurtosis of normal numbers, of those cut at 3 and at 2 deviations, of uniform ones -> n times a sample's variance."""


@dataclass(frozen=True)
class Values:
    """What one tensor's numbers are.

    Attributes:
        nonfinite: how many are NaN or infinite.
        constant: their value, if all are one; else None.
        is_drawn: whether a matrix looks like a draw of independent numbers; None: it is too small to tell.
        is_misread: whether a matrix of 16 bits looks like one of the other 16-bit dtype; None: it is not judged.
        is_equal: whether it is the other checkpoint's, bit for bit; None without one to compare with.
    """

    nonfinite: int
    constant: float | None
    is_drawn: bool | None
    is_equal: bool | None = None
    is_misread: bool | None = None


def values_of(
    tensors: Mapping[str, TensorInfo],
    parts: Callable[[str], Iterator[Tensor]],
    others: Callable[[str], Iterator[Tensor]] | None,
    comparable: Collection[str],
    progress: Progress,
) -> dict[str, Values]:
    """Name -> what its numbers are.

    Args:
        tensors: name -> header of the tensors to look at.
        parts: name -> its elements in order, flat, in parts.
        others: the same of another checkpoint, if there is one.
        comparable: names of tensors that both have, of one shape and dtype.
        progress: receives progress reports.
    """
    found: dict[str, Values] = {}
    done, total = 0, sum(info.nbytes for info in tensors.values())
    for name, info in tensors.items():
        other = others(name) if others is not None and name in comparable else None
        found[name] = _values(info, parts(name), other)
        done += info.nbytes
        progress("reading the weights", done, total)
    return found


def _values(info: TensorInfo, parts: Iterator[Tensor], others: Iterator[Tensor] | None) -> Values:
    bad, low, high, equal = 0, math.inf, -math.inf, None if others is None else True
    sample: list[Tensor] = []
    judged = is_matrix(info)
    seen, whole = 0, max(1, torch.Size(info.shape).numel())
    chosen = [share * whole / max(1, SAMPLED - 1) for share in range(SAMPLED)]
    for part in parts:
        bad += nonfinite(part)
        wide = part.float() if part.is_floating_point() or part.dtype in UNSIGNED else part
        if part.numel() and not part.is_complex():
            low, high = min(low, wide.min().item()), max(high, wide.max().item())
        if others is not None and equal:
            other = next(others, None)
            equal = other is not None and torch.equal(_bits(part), _bits(other))
        if judged and (len(sample) < SAMPLED) and seen + part.numel() >= chosen[len(sample)]:
            rows = _whole_rows(wide, seen, info.shape[-1])
            sample += [rows] if len(rows) else []
        seen += part.numel()
    constant = low if low == high else None
    drawn = is_drawn(torch.cat(sample)) if sample and not bad and constant is None else None
    misread = _is_misread(torch.cat(sample), info.dtype) if sample and constant is None else None
    return Values(bad, constant, drawn, equal, misread)


def _is_misread(rows: Tensor, dtype: torch.dtype) -> bool | None:
    """Whether numbers of one 16-bit dtype have been read as the other.

    As float16, weights of bfloat16 are nearly all from 1/4 to 4; as bfloat16, float16 weights are far below 1e-8.
    """
    sizes = rows[rows != 0].abs()
    if dtype not in (torch.float16, torch.bfloat16) or len(sizes) < SMALLEST // 2:
        return None
    if dtype is torch.float16:
        return bool(((sizes >= 0.25) & (sizes < 4)).float().mean() > 0.99)
    return bool(sizes.nanmedian() < 1e-8)


def _bits(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


def is_matrix(info: TensorInfo) -> bool:
    """Whether a tensor is large enough to tell a draw from trained weights."""
    sides = info.shape[-2:]
    is_large = len(sides) == 2 and min(sides) >= SMALLEST_SIDE and math.prod(info.shape) >= SMALLEST
    return is_large and info.dtype in PLAIN


def _whole_rows(part: Tensor, begin: int, width: int) -> Tensor:
    """The rows that lie wholly in a part, [rows, width]; it begins at this element of the tensor."""
    first = -begin % width
    count = max(0, (len(part) - first) // width)
    return part[first : first + count * width].reshape(count, width).clone()


def is_drawn(rows: Tensor) -> bool | None:
    """Whether a matrix looks like independent draws from one normal or uniform distribution; None: too few rows.

    Args:
        rows: [N, M], float; rows of zeros, such as that of padding, are left out.
    """
    rows = rows[(rows != 0).any(dim=1)].double()
    count, width = rows.shape
    if count < SMALLEST_SIDE or rows.numel() < SMALLEST:
        return None
    squares = rows.square()
    mean_square = squares.mean()
    kurtosis = ((squares.square().mean()) / mean_square.square()).item()
    mean = (rows.mean() / mean_square.sqrt() * math.sqrt(rows.numel())).abs().item()
    if mean > SIGMAS:
        return False
    for expected, variance in KURTOSES.items():
        if abs(kurtosis - expected) <= SIGMAS * math.sqrt(variance / rows.numel()):
            return all(
                _scatters(squares.mean(dim=axis) / mean_square, size, expected)
                for axis, size in ((1, width), (0, count))
            )
    return False


def _scatters(mean_squares: Tensor, size: int, kurtosis: float) -> bool:
    """Whether means of `size` squares each scatter as means of independent draws do."""
    expected = (kurtosis - 1) / size
    found = mean_squares.var().item()
    # The variance of a sample's variance, from the kurtosis of a mean of so many squares, which is nearly normal.
    count = len(mean_squares)
    error = expected * math.sqrt(2 / max(1, count - 1) + 12 / (size * count))
    return abs(found - expected) <= SIGMAS * error
