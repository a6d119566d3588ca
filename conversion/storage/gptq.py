"""Weights of GPTQ checkpoints (Frantar et al., 2022): whole numbers of 4 or 8 bits, packed into words of 32 bits.

N outputs, K inputs, G groups of inputs, b bits: `qweight` int32 [K b / 32, N], `qzeros` int32 [G, N b / 32], `scales`
[G, N] and `g_idx` int32 [K], the group of each input. The first layout stores zero points less one.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from blockformer.files.errors import ConversionError, MisfitError

from ..rules.groups import LACKING, group_of, lacking, told
from .awq import entries_for
from .compressed import FLOATS
from .integers import IntegerFormat, Integers, Numbers, unpacked
from .low_bits import FIELD, lower, refuse, wrong_entries

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_WANTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("gptq",),
    "bits": (4, 8),
    "checkpoint_format": ("gptq", "gptq_v2", None),
    "format": ("gptq", "gptq_v2", None),
    "is_marlin_format": (False, None),
    "pack_dtype": ("int32", None),
    "rotation": (None,),
    "adapter": (None,),
}


@dataclass(frozen=True)
class GptqIntegers(Integers):
    """See `Integers`.

    Attributes:
        is_first: whether stored zero points lack one, as in the first layout.
    """

    is_first: bool

    def numbers(self, tensors):
        words, zero_words, scales, groups = tensors
        outputs, inputs, count = self.sizes([tuple(each.shape) for each in tensors])
        bits = 32 * len(words) // inputs
        numbers = unpacked(words.t().contiguous(), bits, inputs)
        ones = sum(1 << shift for shift in range(0, 32, bits))  # taken from words, so that a zero borrows from the next
        zeros = unpacked(zero_words + ones if self.is_first else zero_words, bits, outputs)
        if groups.min() < 0 or groups.max() >= count:
            raise ConversionError(f"g_idx names groups from {int(groups.min())} to {int(groups.max())} of {count}")
        return Numbers(numbers, zeros.t(), scales.t(), groups.long())

    def sizes(self, shapes):
        words, zeros, scales, groups = map(tuple, shapes)
        fits = len(words) == len(zeros) == len(scales) == 2 and len(groups) == 1 and min(*words, *scales, *groups) > 0
        bits = 32 * words[0] // groups[0] if fits else 0
        fits = fits and bits in (4, 8) and words[0] * 32 == groups[0] * bits and groups[0] % scales[0] == 0
        if not fits or scales[1] != words[1] or zeros != (scales[0], words[1] * bits // 32):
            said = ", ".join(f"{part} {[*shape]}" for part, shape in zip(PARTS, shapes, strict=True))
            raise ConversionError(f"{said} do not fit together")
        return words[1], groups[0], scales[0]


class _Gptq(IntegerFormat):
    """See `IntegerFormat`."""

    method = "gptq"

    def check(self, official):
        entries = {name: lower(value) for name, value in official[FIELD].items()}
        refuse(wrong_entries(entries, _WANTED, [*entries]))

    def groups(self, checkpoint, dtype, exact=False):
        tensors, problems, groups = checkpoint.tensors, defaultdict[str, list[str]](list), []
        entries = checkpoint.config[FIELD]
        layouts = {lower(entries.get(name)) for name in ("checkpoint_format", "format")}
        op = GptqIntegers(exact, "gptq_v2" not in layouts)
        for stem in (name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")):
            names = [stem + part for part in PARTS]
            if absent := [name for name in names if name not in tensors]:
                problems[LACKING].append(lacking([name for name in names if name in tensors], absent))
                continue
            scales = tensors[f"{stem}scales"].dtype
            wanted = (torch.int32, torch.int32, scales if scales in FLOATS else torch.float16, torch.int32)
            made = group_of(op, names, (f"{stem}weight",), tensors, problems, wanted, wanted[2])
            groups += [] if made is None else [made]
        if problems:
            raise MisfitError(told(problems))
        return groups

    def spare(self, checkpoint):
        """See `LowBitFormat.spare`: AutoGPTQ writes a bias of zeros where a layer has none."""
        names = (name.removesuffix("qweight") + "bias" for name in checkpoint.tensors if name.endswith(".qweight"))
        return {name for name in names if name in checkpoint.tensors and not checkpoint.read(name).any()}

    def kept_entries(self, official, keeps):
        """See `LowBitFormat.kept_entries`: they are kept where all layers are alike, and groups neighbouring inputs."""
        entries: Mapping[str, Any] = official[FIELD]
        is_alike = entries["bits"] == 4 and not any(entries.get(name) for name in ("desc_act", "dynamic", "lm_head"))
        size = entries.get("group_size", 128)
        return {**official, FIELD: entries_for(size)} if keeps and is_alike and type(size) is int else None

    def notes(self, official, kept=False):
        if kept:
            return [self.kept_note]
        return [f"the {official[FIELD]['bits']}-bit weights have become plain; the way back writes plain ones too"]

    def notes_on_paper(self, official):
        return [f"the weights are stored in {official[FIELD]['bits']} bits; conversion makes plain ones of them"]


GPTQ = _Gptq()
