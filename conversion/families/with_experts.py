"""What decoders with experts share: how their checkpoints hold the tensors of a sparse layer.

Published checkpoints hold three matrices for each expert. Ours hold, as the official classes do in memory, those of all
experts in one tensor: `gate_up_proj` [E, 2 I, C] and `down_proj` [E, C, I]. Some tools write those too, so both are
read; the way back writes what a checkpoint came with or else what is published.

E experts, C hidden size, I inner width of an expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..errors import ConversionError
from ..rules.operations import LeadingAxis, Operation, Shape
from ..rules.table import Rule, RuleTable
from ..storage.variant import CheckpointVariant
from ..values import Computed, NotExpressible
from .decoder import LAYER, NO_PREFIX, PREFIX, DecoderFamily

STACKED = "stacked experts"
"""A trait: the experts' tensors are stacked as in the official class of today."""
ROUTER_FIELDS = {
    name: name for name in ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "norm_topk_prob")
}
FINE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
"""Of a fresh model with many narrow experts."""
SHARED = {
    "shared_expert.gate_proj": "shared_expert.gate_proj",
    "shared_expert.up_proj": "shared_expert.up_proj",
    "shared_expert.down_proj": "shared_expert.down_proj",
}
"""Modules of an expert for every token, official and ours."""
SELECTION_BIAS = "e_score_correction_bias"
PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Stack:
    """`parts` matrices [rows, columns] of each expert, one expert after the other -> [E, parts * rows, columns]."""

    experts: int
    parts: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(tensors)).reshape(self.forward_shapes([tuple(t.shape) for t in tensors])[0])]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (tensor,) = tensors
        return list(tensor.reshape(self.experts * self.parts, -1, tensor.shape[-1]).unbind())

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        if len(set(shapes)) != 1 or len(shapes[0]) != 2:
            raise ConversionError(f"the experts' shapes {[list(shape) for shape in dict.fromkeys(shapes)]} differ")
        rows, columns = shapes[0]
        return [(self.experts, self.parts * rows, columns)]

    def inverse_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        (shape,) = shapes
        if len(shape) != 3 or shape[0] != self.experts or shape[1] % self.parts:
            raise ConversionError(f"shape {list(shape)} does not hold {self.parts} matrices of {self.experts} experts")
        return [(shape[1] // self.parts, shape[2])] * (self.experts * self.parts)


class ExpertsFamily(DecoderFamily):
    """A decoder whose feed-forward networks are experts, in some layers or in all.

    Args:
        names: the first arguments of `DecoderFamily`.
        block: prefix of the tensors of a sparse layer in published checkpoints; stacked ones have "mlp.".
        parts: what published checkpoints call an expert's gate, up and down projection.
        sparse: the other official modules of a sparse layer -> ours, without prefix.
        statics: the published name [1, E] of the router's selection bias, without prefix; None is the official class's
            and ours, [E].
        bias_of_choice: the same [E], in the block itself.
        passed_over: see `LayersBeyond`.
        settings: the arguments of `DecoderFamily`.
    """

    one_by_one = True
    """Whether published checkpoints hold each expert by itself, or all of a layer in one tensor, too."""

    def __init__(
        self,
        *names: str,
        block: str = "mlp.",
        parts: tuple[str, str, str] = PARTS,
        sparse: Mapping[str, str] | None = None,
        statics: str | None = None,
        bias_of_choice: str = f"gate.{SELECTION_BIAS}",
        passed_over: tuple[str, ...] = (),
        **settings,
    ):
        super().__init__(*names, **settings)
        self.block, self.parts, self.sparse = block, parts, {"gate": "gate", **(sparse or {})}
        self.statics, self.bias_of_choice, self.passed_over = statics, bias_of_choice, passed_over
        self.has_low_bits = False

    def variant_of(self, official, names=None, read=None):
        """See `Family.variant_of`."""
        variant = super().variant_of(official, names, read)
        if self.one_by_one and any(name.endswith(".experts.down_proj") for name in names or ()):
            return replace(variant, traits=variant.traits | {STACKED})
        return variant

    def variant_for(self, config, earlier: CheckpointVariant | None = None):
        """See `Family.variant_for`."""
        variant = super().variant_for(config, earlier)
        if earlier is None or earlier.head != variant.head:
            return variant
        return replace(variant, traits=earlier.traits & {PREFIX, NO_PREFIX, STACKED})

    def rules_for(self, variant, config):
        """See `Family.rules_for`."""
        head, table = self.head(variant), super().rules_for(variant, config)
        rules = [rule.under(head.root, head.our_root) for rule in self._sparse_rules(variant, config)]
        return RuleTable([*table.rules, *rules], ignored=table.ignored)

    def _sparse_rules(self, variant: CheckpointVariant, config: PretrainedConfig) -> list[Rule]:
        ours, theirs = f"{LAYER}mlp.", self.layers + ("mlp." if STACKED in variant.traits else self.block)
        kinds = ("weight", "bias")
        rules = [Rule(f"{theirs}{a}.{kind}", f"{ours}{b}.{kind}") for a, b in self.sparse.items() for kind in kinds]
        if self.statics is None:
            rules.append(Rule(theirs + self.bias_of_choice, f"{ours}gate.{SELECTION_BIAS}"))
        else:
            name = f"gate.{self.statics}" if STACKED in variant.traits else self.statics
            rules.append(Rule(theirs + name, f"{ours}gate.{SELECTION_BIAS}", LeadingAxis()))
        for name, parts in self._stacks().items():
            if STACKED in variant.traits:
                rules.append(Rule(f"{theirs}{name}", f"{ours}{name}"))
                continue
            names = [f"{theirs}experts.{i}.{part}.weight" for i in range(config.num_experts) for part in parts]
            op: Operation = Stack(config.num_experts, len(parts))
            rules.append(Rule(tuple(names), f"{ours}{name}", op))
        return rules

    def _stacks(self) -> dict[str, tuple[str, ...]]:
        return {"experts.gate_up_proj": self.parts[:2], "experts.down_proj": self.parts[2:]}

    def adjust(self, shapes, variant, config):
        """See `Family.adjust`."""
        if STACKED in variant.traits:
            return shapes
        stored_shapes: dict[str, Shape] = {}
        for name, shape in shapes.items():
            layer, _, rest = name.partition(".mlp.")
            if self.statics is not None and rest == f"gate.{self.statics}":
                stored_shapes[f"{layer}.{self.block}{self.statics}"] = shape
            elif parts := self._stacks().get(rest):
                names = (f"{layer}.{self.block}experts.{i}.{part}.weight" for i in range(shape[0]) for part in parts)
                stored_shapes |= dict.fromkeys(names, (shape[1] // len(parts), shape[2]))
            else:
                stored_shapes[f"{layer}.{self.block}{rest}" if self._is_sparse(rest) else name] = shape
        return stored_shapes

    def _is_sparse(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.sparse or name == self.bias_of_choice


def shared_experts(field: str) -> Computed:
    """Our `shared_expert_intermediate_size` as a number of experts, in a field of this name."""

    def read(official) -> dict[str, Any]:
        width = official.config.moe_intermediate_size
        return {"shared_expert_intermediate_size": (getattr(official.config, field) or 0) * width}

    def write(config: PretrainedConfig, head: Any) -> dict[str, Any]:
        size, width = config.shared_expert_intermediate_size, config.moe_intermediate_size or 1
        if size % width:
            raise NotExpressible("shared_expert_intermediate_size", f"a multiple of {width}", size)
        return {field: size // width}

    return Computed(read, write)


def _read_first_dense(official) -> dict[str, Any]:
    dense, layers = official.config.first_k_dense_replace, official.config.num_hidden_layers
    return {"mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(layers)]}


def _write_first_dense(config: PretrainedConfig, head: Any) -> dict[str, Any]:
    return {"first_k_dense_replace": (config.mlp_layer_types or []).count("dense")}


FIRST_DENSE = Computed(_read_first_dense, _write_first_dense)
"""Sparse layers as DeepSeek's configs say them: all after the first few."""
DEEPSEEK_FIELDS = {
    **{name: name for name in ("num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size")},
    "n_routed_experts": "num_experts",
    "routed_scaling_factor": "routed_scaling_factor",
}
DEEPSEEK_GROUPS = {"n_group": (None, 1), "topk_group": (None, 1)}
"""Official settings of a choice among groups of experts -> values that mean one group."""
SHARED_EXPERTS = {
    "shared_experts.gate_proj": "shared_expert.gate_proj",
    "shared_experts.up_proj": "shared_expert.up_proj",
    "shared_experts.down_proj": "shared_expert.down_proj",
}
"""Modules of experts for every token that are one network, official and ours."""


def _read_layers(official) -> dict[str, Any]:
    config = official.config
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    kinds = ["dense" if i in dense or (i + 1) % step else "sparse" for i in range(config.num_hidden_layers)]
    return {"mlp_layer_types": kinds}


def _write_layers(config: PretrainedConfig, head: Any) -> dict[str, Any]:
    dense = [i for i, kind in enumerate(config.mlp_layer_types or ()) if kind == "dense"]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


SPARSE_STEP = Computed(_read_layers, _write_layers)
"""Sparse layers as Qwen's configs say them: each so many, but not those of a list."""
