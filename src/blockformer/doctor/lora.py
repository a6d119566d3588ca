"""Adapters that lie among the weights, not merged: W + scale B A for each weight that has one (Hu et al., 2021)."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from blockformer.conversion.rules.groups import Group
from blockformer.conversion.rules.operations import Operation, Shape
from blockformer.files.errors import ConversionError, shown

from .adapters import WithAdapter
from .any_checkpoint import AnyCheckpoint
from .finding import ERROR, Finding, counted
from .options import Options
from .weight_files import ADAPTER

MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.(?P<adapter>[^.]+))?\.weight")


@dataclass(frozen=True)
class MergeLora:
    """W [N, M], A [R, M], B [N, R] -> W + scale B A, computed in float32.

    Args:
        op: what is done to W before, where the file has it in another layout.
        scale: alpha / R, or alpha / sqrt(R) with rsLoRA.
    """

    op: Operation
    scale: float

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        *weights, down, up = tensors
        (weight,) = self.op.forward(weights)
        return [(weight.float() + self.scale * (up.float() @ down.float())).to(weight.dtype)]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        *weights, down, up = shapes
        (shape,) = self.op.forward_shapes(weights)
        if len(down) != 2 or len(up) != 2 or (up[0], down[1]) != tuple(shape) or up[1] != down[0]:
            raise ConversionError(f"shapes {list(down)} and {list(up)} are not an adapter of {list(shape)}")
        return [tuple(shape)]


def merged(
    groups: list[Group], lora: Collection[str], names: Mapping[str, str], checkpoint: AnyCheckpoint, options: Options
) -> tuple[list[Group], list[Finding], list[str]]:
    """The groups with adapters merged into the weights that they change, where their scale is known.

    Args:
        groups: of the weights, which read tensors by the names in the file.
        lora: names of the adapters' matrices.
        names: name as it was renamed -> name in the file.
        checkpoint: whose tensors they are.
        options: may say the scale.
    """
    if not lora or checkpoint.kind == ADAPTER:
        return groups, [], []
    where = "is not merged" if isinstance(checkpoint, WithAdapter) else "is stored with the weights, not merged"
    said = f"an adapter of {counted(len(lora), 'matrix', 'matrices')} {where} ({shown(next(iter(lora)))})"
    scale = options.lora_scale
    if scale is None:
        fix = "its scale, lora_alpha / r, is not in the weights; say it with --lora-scale"
        return groups, [Finding("unmerged", ERROR, said, fix)], []
    pairs: dict[str, dict[str, str]] = {}
    for name in lora:
        if (match := MATRIX.fullmatch(name)) is None:
            fix = f"{shown(name)} is of a kind that is not merged here: use merge_and_unload() of PEFT"
            return groups, [Finding("unmerged", ERROR, said, fix)], []
        pairs.setdefault(match["module"], {})[match["side"]] = names[name]
    by_source = {source: index for index, group in enumerate(groups) for source in group.sources}
    groups = list(groups)
    for module, sides in pairs.items():
        bases = [names.get(f"{module}.base_layer.weight"), names.get(f"{module}.weight")]
        index = next((by_source[base] for base in bases if base in by_source), None)
        if index is None or {*sides} != {"A", "B"} or len(groups[index].targets) != 1:
            fix = f"{shown(module)} has no weight to merge it into: use merge_and_unload() of PEFT"
            return groups, [Finding("unmerged", ERROR, said, fix)], []
        group = groups[index]
        sources = (*group.sources, sides["A"], sides["B"])
        op = MergeLora(group.op, scale)
        op.forward_shapes([tuple(checkpoint.tensors[name].shape) for name in sources])
        groups[index] = Group(sources, group.targets, op)
    finding = Finding("unmerged", ERROR, said, f"merged with the scale {scale}", True)
    return groups, [finding], [f"{len(pairs)} adapters merged with the scale {scale}"]
