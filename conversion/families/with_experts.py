"""What decoders with experts share: how their checkpoints hold the tensors of a sparse layer.

Published checkpoints hold three matrices for each expert. Ours hold all experts in one tensor, as the official classes
do in memory: `gate_up_proj` [E, 2 I, C] and `down_proj` [E, C, I]. Some tools also write those, so both are read. The
way back writes the form that a checkpoint came in, or else the published one.

E experts, C hidden size, I inner width of an expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError

from ..rules.operations import Identity, LeadingAxis
from ..rules.table import Rule, module_rules
from ..storage.experts import OneByOne
from ..storage.spelling import Alternative
from ..values import Computed, NotExpressible
from .decoder import DecoderNames
from .oracle import Oracle, wrong_before
from .shared import EXPERT_FIELDS, FIELDS, LAYER

STACKED = "stacked experts"
"""A trait: the experts' tensors are stacked as in today's official class."""
FINE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
"""Of a fresh model with many narrow experts."""
SIGMOID_ROUTER = {"router_score": "sigmoid", "router_selection_bias": True}
"""The structure of a router after DeepSeek-V3's: its bias takes part in the choice only."""
FLOAT32_ROUTER = {**SIGMOID_ROUTER, "router_float32": True}
"""The same, computed in float32."""
SHARED = {
    "shared_expert.gate_proj": "shared_expert.gate_proj",
    "shared_expert.up_proj": "shared_expert.up_proj",
    "shared_expert.down_proj": "shared_expert.down_proj",
}
"""Modules of an expert for every token, official and ours."""
SELECTION_BIAS = "e_score_correction_bias"
GROUPS_SINCE = (5, 6)
"""The first release of transformers whose classes leave out the experts of other groups, as today's do."""


def _wrong_groups(family: str, config: PretrainedConfig) -> str | None:
    return wrong_before(GROUPS_SINCE, family) if config.num_expert_groups else None


@dataclass(kw_only=True, eq=False)
class ExpertNames(DecoderNames):
    """The names of a decoder whose feed-forward networks are experts, in some layers or in all.

    Attributes:
        published: how published checkpoints hold the tensors of a sparse layer; None: as the class has them.
        router: the official name of the router.
        sparse: the other official modules of a sparse layer -> ours, without prefix.
        bias_of_choice: the official name of the router's selection bias [E], or [1, E] where `published` moves it.
        sparse_rules: a Blockformer config -> the rules of a sparse layer, without its prefix; None for the usual ones.
    """

    published: OneByOne | None = field(default_factory=OneByOne)
    router: str = "gate"
    sparse: Mapping[str, str] = field(default_factory=dict)
    bias_of_choice: str = f"gate.{SELECTION_BIAS}"
    sparse_rules: Callable[[PretrainedConfig], list[Rule]] | None = None

    low_bits = False
    usual_fields = {**FIELDS, **EXPERT_FIELDS}
    oracle = Oracle(not_runnable=_wrong_groups)

    def alternatives(self, head):
        stacked = [] if self.published is None else [Alternative(STACKED, ends=(".experts.down_proj",))]
        return [*super().alternatives(head), stacked]

    def storage(self, variant, config):
        rules = super().storage(variant, config)
        if self.published is None or STACKED in variant.traits or not config.num_experts:
            return rules
        layers = [self.head(variant).root + place for place in self.sparse_places(config)]
        if self.further is not None:
            layers += self.further.places(config, config.num_nextn_predict_layers)
        given = (self._of_sparse_layer, [self.bias_of_choice], config.num_experts)
        return [*rules, *(rule for layer in layers for rule in self.published.rules(layer, *given))]

    def stack_rules(self, config):
        sparse = self._usual_rules() if self.sparse_rules is None else self.sparse_rules(config)
        return [*super().stack_rules(config), *(rule.under(self.layers, LAYER) for rule in sparse)]

    def sparse_places(self, config: PretrainedConfig) -> list[str]:
        """What the official names of sparse layers begin with, without a head's prefix."""
        return [self.layers]

    @property
    def _of_sparse_layer(self) -> dict[str, str]:
        """The router and the other official modules of a sparse layer -> ours."""
        return {self.router: "gate", **self.sparse}

    def _usual_rules(self) -> list[Rule]:
        moved = self.published is not None and self.published.statics is not None
        return [
            *module_rules({f"mlp.{theirs}": f"mlp.{ours}" for theirs, ours in self._of_sparse_layer.items()}),
            Rule(f"mlp.{self.bias_of_choice}", f"mlp.gate.{SELECTION_BIAS}", LeadingAxis() if moved else Identity()),
            Rule("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
            Rule("mlp.experts.down_proj", "mlp.experts.down_proj"),
        ]


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


def expert_groups(summed: int) -> Computed:
    """Groups of experts, of which each token takes the best; a group's score is the sum of so many of its experts."""

    def read(official) -> dict[str, Any]:
        config = official.config
        if config.topk_group == 0 and getattr(config, "topk_method", None) != "greedy":
            raise ConversionError("config.json: topk_group is 0, so no expert is ever chosen; write 1 for one group")
        if (config.n_group or 1) == 1 or getattr(config, "topk_method", None) == "greedy":
            return {}
        return {
            "num_expert_groups": config.n_group,
            "num_expert_groups_per_tok": config.topk_group,
            "experts_per_group_score": summed,
        }

    def write(config: PretrainedConfig, head: Any) -> dict[str, Any]:
        if config.num_expert_groups and config.experts_per_group_score != summed:
            raise NotExpressible("experts_per_group_score", repr(summed), config.experts_per_group_score)
        return {"n_group": config.num_expert_groups or 1, "topk_group": config.num_expert_groups_per_tok or 1}

    return Computed(read, write)


def first_dense(field: str) -> Computed:
    """Sparse layers as all after the first few, whose number is in a field of this name."""

    def read(official) -> dict[str, Any]:
        dense, layers = getattr(official.config, field), official.config.num_hidden_layers
        return {"mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(layers)]}

    def write(config: PretrainedConfig, head: Any) -> dict[str, Any]:
        return {field: (config.mlp_layer_types or []).count("dense")}

    return Computed(read, write)


FIRST_DENSE = first_dense("first_k_dense_replace")
"""As DeepSeek's configs say it."""
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
"""Sparse layers as Qwen's configs say them: each so many, but not the ones in a list."""
