"""Granite with experts (IBM, 2024): Granite's factors, experts in every layer, in some models one for every token."""

from ..rules.operations import Split
from ..rules.table import Rule
from ..storage.spelling import Ending
from .base import Family
from .decoder import DecoderSettings
from .granite import FRESH, SETTINGS
from .shared import LLAMA
from .with_experts import FINE, ExpertNames

IN_FILES = Ending(
    {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    }
)
"""Names of the experts' tensors in files, and in the classes of older releases too -> in today's."""


def sparse_rules(config):
    """The rules of a sparse layer, which has names of its own."""
    width = config.shared_expert_intermediate_size
    gate_and_up = ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")
    return [
        Rule("block_sparse_moe.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        Rule("block_sparse_moe.experts.down_proj", "mlp.experts.down_proj"),
        Rule("block_sparse_moe.router.weight", "mlp.gate.weight"),
        Rule("shared_mlp.input_linear.weight", gate_and_up, Split(0, (width, width))),
        Rule("shared_mlp.output_linear.weight", "mlp.shared_expert.down_proj.weight"),
    ]


FIELDS = {**SETTINGS["fields"], "intermediate_size": ("intermediate_size", "moe_intermediate_size")}
FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM GraniteMoeModel",
    structure=LLAMA,
    fresh={**FRESH, **FINE},
    names=ExpertNames(published=None, sparse_rules=sparse_rules, spellings=[IN_FILES]),
    settings=DecoderSettings(**{**SETTINGS, "fields": FIELDS}),
)
SHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM GraniteMoeSharedModel",
    structure=LLAMA,
    fresh={**FRESH, **FINE, "shared_expert_intermediate_size": 384},
    names=ExpertNames(published=None, sparse_rules=sparse_rules, spellings=[IN_FILES]),
    settings=DecoderSettings(**{**SETTINGS, "fields": FIELDS}),
)
