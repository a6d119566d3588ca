"""Granite 4 (IBM, 2025): Granite's factors; most layers may have a selective state space, and all of them experts."""

from typing import Any

from transformers import PretrainedConfig

from ..rules.operations import Split
from ..rules.table import Rule, module_rules
from ..values import Computed, NotExpressible, ScansByLayer
from .bamba import SCAN, scan_rules, twice_the_width
from .base import Family
from .decoder import DecoderSettings
from .fresh import few_full
from .granite import FRESH, IN_FILES, SETTINGS, sparse_rules
from .shared import ATTENTION, LLAMA, NORMS, fields_without
from .with_experts import ExpertNames

EXPERTS = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")


def network_rules(config: PretrainedConfig) -> list[Rule]:
    """The feed-forward network of a layer: experts and one for every token, or only that."""
    if config.num_experts:
        return sparse_rules(config)
    both, width = ("mlp.gate_proj.weight", "mlp.up_proj.weight"), config.intermediate_size
    return [
        Rule("shared_mlp.input_linear.weight", both, Split(0, (width, width))),
        *module_rules({"shared_mlp.output_linear": "mlp.down_proj"}),
    ]


def read_networks(official) -> dict[str, Any]:
    """Widths of networks and what experts have: without any, the one for every token is a plain network."""
    config = official.config
    if not config.num_local_experts:
        return {"intermediate_size": config.shared_intermediate_size}
    widths = {"intermediate_size": config.intermediate_size, "moe_intermediate_size": config.intermediate_size}
    widths["shared_expert_intermediate_size"] = config.shared_intermediate_size
    return {"num_experts": config.num_local_experts, **widths, **{name: getattr(config, name) for name in EXPERTS}}


def write_networks(config, head) -> dict[str, Any]:
    """The way back."""
    if not config.num_experts:
        return {"num_local_experts": 0, "shared_intermediate_size": config.intermediate_size}
    if not config.shared_expert_intermediate_size:
        raise NotExpressible("shared_expert_intermediate_size", "above 0", 0)
    return {
        "num_local_experts": config.num_experts,
        "intermediate_size": config.moe_intermediate_size,
        "shared_intermediate_size": config.shared_expert_intermediate_size,
        **{name: getattr(config, name) for name in EXPERTS},
    }


def read_positions(official) -> dict[str, Any]:
    """Rotary positions, or none."""
    if official.config.position_embedding_type == "rope":
        return {}
    return {"position_type": "none", "rope_parameters": None}


def write_positions(config, head) -> dict[str, Any]:
    """The way back."""
    return {"position_embedding_type": "rope" if config.position_type == "rotary" else None}


FAMILY = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM GraniteMoeHybridModel",
    structure=LLAMA,
    fresh={
        **FRESH,
        "position_type": "none",
        "rope_parameters": None,
        "layer_types": few_full(8, SCAN),
        "mamba_n_heads": twice_the_width,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    names=ExpertNames(
        layer={**ATTENTION, **NORMS},
        published=None,
        sparse_rules=network_rules,
        spellings=[IN_FILES],
        more_rules=scan_rules,
    ),
    settings=DecoderSettings(
        usual=fields_without("intermediate_size"),
        window=ScansByLayer(),
        reads_whole=False,
        **{
            **SETTINGS,
            "computed": [
                *SETTINGS["computed"],
                Computed(read_networks, write_networks),
                Computed(read_positions, write_positions),
            ],
        },
    ),
)
