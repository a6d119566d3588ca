"""Granite (IBM, 2024), with experts and with windows, and HyperCLOVA X after it.

Granite is Llama with a factor for embeddings, residuals, scores and logits.
"""

from typing import Any

from blockformer.files.errors import ConversionError, shown

from ..rules.operations import Split
from ..rules.table import Rule, module_rules
from ..storage.spelling import Ending
from ..values import Computed, Factor, Flag, NotExpressible, Rope, invert_power, positive
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import all_but, rotary
from .shared import LLAMA, sinks
from .with_experts import FINE, ExpertNames

FRESH = {
    **rotary(10_000.0),
    "embedding_scale": 12.0,
    "residual_multiplier": 0.22,
    "attention_scale": 0.015625,
    "logit_scale": 0.125,
}
LOGITS = Computed(
    lambda official: {"logit_scale": 1 / positive(official, "logits_scaling")},
    lambda config, head: {"logits_scaling": invert_power(config.logit_scale, -1.0)},
)
SETTINGS: dict[str, Any] = {
    "fields": {"attention_multiplier": "attention_scale"},
    "computed": [
        Factor("embedding_multiplier", "embedding_scale"),
        Factor("residual_multiplier", "residual_multiplier"),
        LOGITS,
    ],
    "not_none": ["attention_scale"],
}
FAMILY = Family(
    "granite",
    "GraniteForCausalLM GraniteModel",
    structure=LLAMA,
    fresh=FRESH,
    settings=DecoderSettings(**SETTINGS),
)


# HyperCLOVA X SEED Think (NAVER Cloud, 2025): Granite, perhaps with a second norm after each sub-layer.
def read_scale(official):
    """The official class fills in what is usual."""
    usual, scale = official.config.head_dim**-0.5, official.config.attention_multiplier
    return {"attention_scale": None if scale == usual else scale}


def output_norms(config):
    """The second norm of each sub-layer."""
    has_them = config.norm_placement == "pre_output"
    return module_rules({"post_norm1": "self_attn_output_norm", "post_norm2": "mlp_output_norm"} if has_them else {})


HYPERCLOVAX = Family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM HyperCLOVAXModel",
    structure=LLAMA,
    fresh={**rotary(100_000_000.0), "norm_placement": "pre_output", "norm_eps": 1e-5, "attention_scale": 0.0078125},
    names=DecoderNames(more_rules=output_norms),
    settings=DecoderSettings(
        computed=[
            Flag("use_post_norm", "norm_placement", ("pre", "pre_output")),
            Factor("embedding_multiplier", "embedding_scale"),
            Factor("residual_multiplier", "residual_multiplier"),
            Factor("logits_scaling", "logit_scale"),
            Computed(read_scale, lambda config, head: {"attention_multiplier": config.attention_scale}),
        ],
    ),
)


# Granite with experts (IBM, 2024): Granite's factors, experts in every layer, in some models one for every token.
IN_FILES = Ending(
    {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    }
)
"""Names of the experts' tensors in files, and in the classes of older releases too -> in today's."""


def sparse_rules(config):
    """The rules of a sparse layer, which has its own names."""
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
GRANITEMOE = Family(
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


# Granite Swash (IBM, 2026), with and without experts: Granite with windows, attention sinks and a theta by layer.
class RopeByLayer(Rope):
    """One set of rotary parameters, and a list with each layer's theta: 0 where it does not rotate."""

    def read(self, official):
        rope, thetas = super().read(official)["rope_parameters"], official.config.layer_rope_theta
        by_type: dict[str, Any] = {}
        for kind, theta in zip(official.config.layer_types, thetas, strict=True):
            if theta and by_type.setdefault(kind, theta) != theta:
                raise ConversionError(
                    f"config.json: layer_rope_theta is {shown(thetas)}; Blockformer has one theta for all layers "
                    f"of a type ({kind}), so run this model with transformers"
                )
        if len(set(by_type.values())) > 1:
            rope = {kind: {**rope, "rope_theta": theta} for kind, theta in sorted(by_type.items())}
        elif by_type:
            rope = {**rope, "rope_theta": next(iter(by_type.values()))}
        return {"rope_parameters": rope, "rope_layers": None if all(thetas) else [bool(theta) for theta in thetas]}

    def write(self, config, head):
        given = config.rope_parameters or {}
        by_type = {kind: given.get(kind, given) for kind in config.layer_types}
        first, *others = by_type.values()
        if any({**each, "rope_theta": first.get("rope_theta")} != first for each in others):
            raise NotExpressible("rope_parameters", "the same for all layer types, except rope_theta", given)
        rotates = config.rope_layers or [True] * config.num_hidden_layers
        thetas = [
            by_type[kind].get("rope_theta", 0) * one for kind, one in zip(config.layer_types, rotates, strict=True)
        ]
        return {"rope_parameters": dict(first), "layer_rope_theta": thetas}


SWA_STRUCTURE = {**LLAMA, "attention_sinks": True}
SWA: dict[str, Any] = {
    **SETTINGS,
    "rope": RopeByLayer(),
}
GRANITE_SWA = Family(
    "granite_swa",
    "GraniteSWAForCausalLM GraniteSWAModel",
    structure=SWA_STRUCTURE,
    fresh={**FRESH, **all_but(4, 128), "tie_word_embeddings": True, "norm_eps": 1e-5},
    names=DecoderNames(more_rules=sinks),
    settings=DecoderSettings(**SWA),
)
GRANITEMOE_SWA = Family(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM GraniteMoeSWAModel",
    structure=SWA_STRUCTURE,
    fresh={**FRESH, **FINE, **all_but(4, 128), "tie_word_embeddings": True},
    names=ExpertNames(published=None, sparse_rules=sparse_rules, more_rules=sinks),
    settings=DecoderSettings(**{**SWA, "fields": FIELDS}),
)
