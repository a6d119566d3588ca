"""4-bit weights of AWQ checkpoints (Lin et al., 2023) in the layout called "gemm".

K inputs, N outputs, G inputs per group: `qweight` int32 [K, N / 8], `qzeros` int32 [K / G, N / 8], `scales` float16
[K / G, N] stand for the weight [N, K] of a linear layer. Ours has the same three tensors.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError, listed
from blockformer.model.awq_linear import dequantize

from ..rules.groups import groups_of
from ..rules.operations import Shape
from ..rules.table import Rule
from .low_bits import FIELD, LowBitFormat, lower, told, wrong_entries

PARTS = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}
# What a checkpoint must say of itself, and what it may say without a change of its weights' meaning.
_WANTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("awq",),
    "bits": (4,),
    "version": ("gemm", None),
    "format": ("gemm", None),
    "zero_point": (True,),
    "desc_act": (False, None),
    "sym": (False, None),
    "modules_to_not_convert": (None, [], ["lm_head"]),
}
_FREE = ("group_size", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
_DEFAULTS = {"version": "gemm", "zero_point": True, "bits": 4}


def group_size(official: Mapping[str, Any]) -> int | None:
    """The inputs per group in an official `config.json`, -1 if all inputs are one group; None without AWQ.

    Raises:
        ConversionError: it is an AWQ checkpoint of another kind.
    """
    if not AWQ.is_told(official):
        return None
    entries = {name: lower(value) for name, value in official[FIELD].items()}
    lines = wrong_entries({**_DEFAULTS, **entries}, _WANTED, _FREE)
    size = entries.get("group_size", 128)
    if type(size) is not int or not (size == -1 or size > 0):
        lines.append(f"group_size is {told(size)}, not a positive integer or -1")
    if lines:
        raise ConversionError(
            f"config.json: {FIELD}: an AWQ checkpoint must have 4 bits and zero points, in the gemm layout, to be "
            f"converted:{listed(lines)}"
        )
    return size


def entries_for(size: int) -> dict[str, Any]:
    """The official entries for 4-bit weights with so many inputs per group, -1 for all."""
    return {
        "backend": "autoawq",
        "bits": 4,
        "do_fuse": False,
        "exllama_config": None,
        "group_size": size,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }


@dataclass(frozen=True)
class Dequantize:
    """`qweight`, `qzeros`, `scales` -> the weight [N, K] that they stand for, with no way back."""

    dtype: torch.dtype

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [plain_weight(*tensors).to(self.dtype)]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        words, zeros, scales = shapes
        lines = [f"{name} {list(shape)}" for name, shape in zip(PARTS, shapes, strict=True)]
        if not all(len(shape) == 2 and min(shape) > 0 for shape in shapes):
            raise ConversionError(f"{', '.join(lines)} are not all matrices")
        inputs, outputs = words[0], words[1] * 8
        groups = scales[0]
        if inputs % groups or tuple(zeros) != (groups, words[1]) or scales[1] != outputs:
            raise ConversionError(f"{', '.join(lines)} do not fit together")
        return [(outputs, inputs)]


def plain_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """The weight [N, K] in float32, exactly: each number is a product of 5 and 11 bits."""
    return dequantize(qweight, qzeros, scales, torch.float32).t().contiguous()


def words_of(numbers: Tensor) -> Tensor:
    """Numbers from 0 to 15 [R, N] -> int32 words [R, N / 8], of which the four lowest bits hold the first of eight."""
    words = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int32)
    for column in range(8):  # the even ones are in the lower half of a word
        words |= numbers[:, column::8].int() << (4 * (column // 2) + 16 * (column % 2))
    return words


def kept_rules(plain: Iterable[Rule], low: Collection[str]) -> list[Rule]:
    """The rules for linear maps that keep their 4 bits.

    Args:
        plain: the rules for plain weights.
        low: the weights, by their official names with placeholders, that have 4 bits.
    """
    rules: list[Rule] = []
    for rule in plain:
        if rule.source in low:
            theirs, ours = (str(name).removesuffix("weight") for name in (rule.source, rule.target))
            rules += [Rule(theirs + part, ours + part, dtypes=(kind,)) for part, kind in PARTS.items()]
        else:
            rules.append(rule)
    return rules


def names_of(weight: str) -> tuple[str, ...]:
    """The names of the three tensors that stand for a weight."""
    return tuple(weight.removesuffix("weight") + part for part in PARTS)


def low_bit_weights(names: Iterable[str]) -> set[str]:
    """The weights that tensors of these names stand for with few bits."""
    endings = (".qweight", ".weight_packed")
    return {f"{name.rpartition('.')[0]}.weight" for name in names if name.endswith(endings)}


class _Awq(LowBitFormat):
    """Linear maps of 4 bits, which families keep whose matrices are ours one by one; `convert` may make them plain."""

    method, may_have_4_bits = "awq", True

    def is_there(self, official, names):
        """See `LowBitFormat.is_there`: the config says it."""
        return self.is_told(official)

    def check(self, official):
        group_size(official)

    def kept_entries(self, official, keeps):
        """See `LowBitFormat.kept_entries`: a family that keeps none says so."""
        return official

    def groups(self, checkpoint, dtype, exact=False):
        tensors = checkpoint.tensors
        stems = dict.fromkeys(name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in PARTS)
        weights = {f"{stem}.weight": names_of(f"{stem}.weight") for stem in stems}
        return groups_of(weights, Dequantize(dtype), tuple(PARTS.values()), dtype, tensors)


AWQ = _Awq()
