"""The text model of Aria (Li et al., 2024): Llama with experts, the shared ones as one network.

Its files name the experts' matrices otherwise than the official class, which has them transposed.
"""

from ..rules.operations import Transpose
from ..rules.table import Rule, module_rules
from ..storage.spelling import Ending
from ..values import Computed, NotExpressible
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import LLAMA
from .with_experts import SHARED_EXPERTS, ExpertNames

IN_FILES = Ending(
    {"mlp.experts.fc1.weight": "mlp.experts.gate_up_proj", "mlp.experts.fc2.weight": "mlp.experts.down_proj"}
)
"""Names of the experts' matrices in published files -> in the class."""


def sparse_rules(config):
    """The rules of a sparse layer."""
    modules = {"mlp.router": "mlp.gate", **{f"mlp.{theirs}": f"mlp.{ours}" for theirs, ours in SHARED_EXPERTS.items()}}
    stacked = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    return [*module_rules(modules), *(Rule(name, name, Transpose(1, 2)) for name in stacked)]


def _read_experts(official):
    """Experts for every token are a number of experts of the usual width, in one network."""
    width = official.config.intermediate_size
    return {"shared_expert_intermediate_size": width * official.config.moe_num_shared_experts}


def _write_experts(config, head):
    size, width = config.shared_expert_intermediate_size, config.intermediate_size
    if size % width:
        raise NotExpressible("shared_expert_intermediate_size", f"a multiple of {width}", size)
    return {"moe_num_shared_experts": size // width}


FAMILY = Family(
    "aria_text",
    "AriaTextForCausalLM AriaTextModel",
    config_class="AriaTextConfig",
    structure=LLAMA,
    fresh={
        **rotary(5_000_000.0),
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": lambda settings: 2 * settings["intermediate_size"],
    },
    names=ExpertNames(published=None, router="router", sparse_rules=sparse_rules, spellings=[IN_FILES]),
    settings=DecoderSettings(
        fields={
            "intermediate_size": ("intermediate_size", "moe_intermediate_size"),
            "moe_num_experts": "num_experts",
            "moe_topk": "num_experts_per_tok",
        },
        computed=[Computed(_read_experts, _write_experts)],
        unsupported={"hidden_act": ("silu",)},
    ),
)
