"""Weights as compressed-tensors writes them (llm-compressor, for vLLM): FP8, and whole numbers of 8 or 4 bits.

N outputs, K inputs, G groups of inputs that share a scale. Numbers of 4 bits, and some of 8, are packed along the
inputs into words of 32 bits; their zero points, if they have any, along the outputs.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, MisfitError, shown

from ..rules.groups import LACKING, Group, group_of, lacking, told
from ..rules.operations import Shape
from .awq import entries_for
from .fp8 import BLOCK, FP8, WEIGHT, as_block, fp8_groups
from .integers import IntegerFormat, Integers, Numbers, in_order, unpacked
from .low_bits import FIELD, NOT_READ, also_rounded, refuse, wrong_entries

READ = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
"""The formats that are read; "mixed-precision" are some of them."""
_WANTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "quantization_status": ("compressed", "frozen", None),
    "moe_sparsity_config": (None,),
    "transform_config": (None, {}),
}
_FREE = (
    "format",
    "config_groups",
    "ignore",
    "sparsity_config",
    "kv_cache_scheme",
    "global_compression_ratio",
    "version",
)
_FLOATS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "symmetric": (True, None),
    "strategy": ("tensor", "channel", "block"),
}
_INTEGERS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4, 8),
    "type": ("int",),
    "strategy": ("tensor", "channel", "group"),
}
PACKED, SCALE, ZEROS = "weight_packed", "weight_scale", "weight_zero_point"
SHAPE, GROUPS = "weight_shape", "weight_g_idx"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = {
    "weight": (torch.int8,),
    PACKED: (torch.int32,),
    SCALE: FLOATS,
    ZEROS: (torch.int32, torch.int8),
    SHAPE: (torch.int64, torch.int32),
    GROUPS: (torch.int32, torch.int64),
}
HEADS = ("lm_head", "re:.*lm_head", "re:.*lm_head.*")
"""How `ignore` names the head of a language model, which families with 4-bit layers keep plain."""


@dataclass(frozen=True)
class CompressedIntegers(Integers):
    """See `Integers`.

    Attributes:
        kinds: which tensors there are, by the ends of their names.
        inputs: K, which words do not show.
    """

    kinds: tuple[str, ...]
    inputs: int

    def numbers(self, tensors):
        found: dict[str, Tensor] = dict(zip(self.kinds, tensors, strict=True))
        rows, columns, count = self.sizes([tuple(each.shape) for each in tensors])
        scales = found[SCALE].reshape(1, 1).expand(rows, 1) if found[SCALE].numel() == 1 else found[SCALE]
        half, zeros = 0, found.get(ZEROS)
        if PACKED in found:
            bits = self._bits(found[PACKED].shape[1])
            half, weight = 2 ** (bits - 1), unpacked(found[PACKED], bits, columns)
            if zeros is not None and zeros.dtype is torch.int32:
                zeros = unpacked(zeros.t(), bits, rows).t() - half
        else:
            weight = found["weight"]
        zeros = torch.zeros(rows, count, dtype=torch.int32) if zeros is None else zeros.int().reshape(-1, count)
        groups = in_order(columns, count)
        if GROUPS in found and not (found[GROUPS] < 0).any():
            groups = found[GROUPS].long()
            if groups.max() >= count:
                raise ConversionError(f"{GROUPS} names group {int(groups.max())}, and there are {count}")
        return Numbers(weight, (zeros + half).expand(rows, count), scales, groups)

    def sizes(self, shapes):
        found: dict[str, Shape] = dict(zip(self.kinds, map(tuple, shapes), strict=True))
        weight, scales = found.get(PACKED, found.get("weight", ())), found[SCALE]
        said = ", ".join(f"{kind} {list(shape)}" for kind, shape in found.items())
        columns = self.inputs
        is_one = scales in ((), (1,), (1, 1))
        count = 1 if is_one else scales[-1]
        fits = len(weight) == 2 and min(*weight, columns, count) > 0 and columns % count == 0
        fits = fits and (is_one or scales == (weight[0], count))
        fits = fits and (self._bits(weight[1]) > 0 if PACKED in found else weight[1] == columns)
        fits = fits and found.get(GROUPS, (columns,)) == (columns,)
        if fits and ZEROS in found:
            bits = self._bits(weight[1]) if PACKED in found else 8
            fits = found[ZEROS] in (scales, (-(-weight[0] * bits // 32), count))
        if not fits:
            raise ConversionError(f"{said} do not fit together" + f", for {columns} inputs" * (PACKED in found))
        return weight[0], columns, count

    def _bits(self, words: int) -> int:
        """Of a number, by how many words hold a row; 0 if none fit."""
        return next((bits for bits in (4, 8) if words == -(-self.inputs * bits // 32)), 0)


class _Compressed(IntegerFormat):
    """See `IntegerFormat`; FP8 becomes bfloat16."""

    method, ending, stored, not_read = "compressed-tensors", "_scale", (WEIGHT, torch.int8), NOT_READ

    def is_told(self, official):
        return super().is_told(official) and official[FIELD].get("format") in READ

    def check(self, official):
        entries = official[FIELD]
        wrong, sparse = wrong_entries(entries, _WANTED, _FREE), entries.get("sparsity_config")
        if sparse and not (isinstance(sparse, Mapping) and sparse.get("format") == "dense"):
            wrong.append(f"sparsity_config is {shown(sparse)}, not one of the format 'dense'")
        for weights in of_weights(entries):
            wrong += wrong_entries(weights, _FLOATS if weights.get("type") == "float" else _INTEGERS, [*weights])
        sizes = blocks(entries)
        if len(sizes) > 1 or any(as_block(each) is None for each in sizes):
            wrong.append(f"block_structure is {shown(sizes)}, not two positive integers")
        if not isinstance(entries.get("ignore"), list | None):
            wrong.append(f"ignore is {shown(entries['ignore'])}, not a list")
        refuse(wrong)

    def groups(self, checkpoint, dtype, exact=False):
        tensors, problems = checkpoint.tensors, defaultdict[str, list[str]](list)
        block = next(map(as_block, blocks(checkpoint.config[FIELD])), None) or BLOCK
        wholes, floats = [], []
        for name in tensors:
            stem = name.rpartition(".")[0]
            if name.endswith(f".{PACKED}") or (name.endswith(".weight") and tensors[name].dtype is torch.int8):
                made = self._group(stem, name.removeprefix(f"{stem}."), checkpoint, exact, problems)
                wholes += [] if made is None else [made]
            elif name.endswith(".weight") and f"{stem}.{SCALE}" in tensors:
                floats.append(name)
        if problems:
            raise MisfitError(told(problems))
        return [*fp8_groups(floats, self.ending, block, tensors), *wholes]

    def _group(self, stem: str, kind: str, checkpoint: Checkpoint, exact: bool, problems) -> Group | None:
        """What makes a weight of whole numbers; None after noting what is wrong with it."""
        tensors = checkpoint.tensors
        needed = (kind, SCALE, *([SHAPE] if kind == PACKED else []))
        kinds = (*needed, *(each for each in (ZEROS, GROUPS) if f"{stem}.{each}" in tensors))
        names = [f"{stem}.{each}" for each in kinds]
        if absent := [name for name in names if name not in tensors]:
            problems[LACKING].append(lacking([name for name in names if name in tensors], absent))
            return None
        size = [*tensors[names[0]].shape]
        if kind == PACKED:
            place = f"{stem}.{SHAPE}"
            known = checkpoint.read(place).tolist() if tuple(tensors[place].shape) == (2,) else []
            if known[:1] != size[:1]:
                problems["wrong shapes"].append(f"{shown(place)} says {known}, and {shown(names[0])} is {size}")
                return None
            size = known
        wanted = [_DTYPES[each] for each in kinds]
        dtypes = [tensors[name].dtype for name in names]
        dtypes = [own if own in known else known[0] for own, known in zip(dtypes, wanted, strict=True)]
        op = CompressedIntegers(exact, kinds, int([0, *size][-1]))
        return group_of(op, names, (f"{stem}.weight",), tensors, problems, dtypes, dtypes[1])

    def kept_entries(self, official, keeps):
        """See `LowBitFormat.kept_entries`: they are kept where all linear layers but the head have 4 bits, alike."""
        entries = official[FIELD]
        weights, scheme = of_weights(entries)[:1], schemes(entries)[:1]
        if not keeps or len(schemes(entries)) != 1 or not weights or entries["format"] != "pack-quantized":
            return None
        is_alike = scheme[0].get("targets") == ["Linear"] and all(each in HEADS for each in entries.get("ignore") or [])
        is_in_order = weights[0].get("actorder") in (None, False, "weight", "static")
        size = {"group": weights[0].get("group_size"), "channel": -1}.get(weights[0]["strategy"])
        if weights[0]["num_bits"] != 4 or not is_alike or not is_in_order or type(size) is not int:
            return None
        return {**official, FIELD: entries_for(size)}

    def notes(self, official, kept=False):
        entries = official[FIELD]
        what = self.kept_note
        if not kept:
            kinds = _kinds(entries)
            what = f"the {' and '.join(kinds)} weights have become plain; the way back writes plain ones too"
            what = FP8.note if kinds == ["FP8"] else what
        has_inputs = any(scheme.get("input_activations") for scheme in schemes(entries))
        return [what, *also_rounded(has_inputs, bool(entries.get("kv_cache_scheme")))]

    def notes_on_paper(self, official):
        kinds = [kind.replace("-bit", " bits") for kind in _kinds(official[FIELD])]
        what = f"the weights are stored in {' and '.join(kinds)}; conversion makes plain ones of them"
        return [FP8.note_on_paper if kinds == ["FP8"] else what]


def schemes(entries: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What `quantization_config` says of each group of layers that it names."""
    groups = entries.get("config_groups")
    return [each for each in groups.values() if isinstance(each, Mapping)] if isinstance(groups, Mapping) else []


def of_weights(entries: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What it says of the weights of each."""
    return [each for scheme in schemes(entries) if isinstance(each := scheme.get("weights"), Mapping)]


def blocks(entries: Mapping[str, Any]) -> list[Any]:
    """The sizes of blocks that it names."""
    found = [each.get("block_structure") for each in of_weights(entries)]
    return [each for place, each in enumerate(found) if each is not None and each not in found[:place]]


def _kinds(entries: Mapping[str, Any]) -> list[str]:
    """What the kinds of its weights are called."""
    kinds = ["FP8" if each.get("type") == "float" else f"{each.get('num_bits')}-bit" for each in of_weights(entries)]
    return sorted(set(kinds))


COMPRESSED = _Compressed()
