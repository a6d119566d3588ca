"""Granite with experts (IBM, 2024): Granite's factors, experts in every layer, in some models one for every token."""

from ..rules.operations import Split
from ..rules.table import Rule
from .decoder import LAYER, LLAMA
from .granite import FIELDS, FRESH, SETTINGS
from .with_experts import FINE, ROUTER_FIELDS, ExpertsFamily

BLOCK = "block_sparse_moe."
STACKED = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
"""Published tensors of all experts -> ours."""


class GraniteExpertsFamily(ExpertsFamily):
    """Granite, whose checkpoints have all experts of a layer in one tensor, under names of its own."""

    one_by_one = False

    def _sparse_rules(self, variant, config):
        ours, theirs = f"{LAYER}mlp.", LAYER + BLOCK
        rules = [Rule(theirs + name, ours + mine) for name, mine in STACKED.items()]
        rules.append(Rule(f"{theirs}router.layer.weight", f"{ours}gate.weight"))
        shared, width = f"{LAYER}shared_mlp.", config.shared_expert_intermediate_size
        parts = tuple(f"{ours}shared_expert.{name}_proj.weight" for name in ("gate", "up"))
        rules.append(Rule(f"{shared}input_linear.weight", parts, Split(0, (width, width))))
        return [*rules, Rule(f"{shared}output_linear.weight", f"{ours}shared_expert.down_proj.weight")]

    def adjust(self, shapes, variant, config):
        """See `Family.adjust`."""
        stored_shapes = {}
        for name, shape in shapes.items():  # releases have other names in memory than in files
            for theirs, mine in (*STACKED.items(), ("router.layer.weight", "router.weight")):
                name = name.replace(BLOCK + mine, BLOCK + theirs)
            stored_shapes[name] = shape
        return stored_shapes


NAMES = {
    **{name: name for name in ROUTER_FIELDS if name != "norm_topk_prob"},
    "num_local_experts": "num_experts",
    "intermediate_size": ("intermediate_size", "moe_intermediate_size"),
    **FIELDS,
}
FAMILY = GraniteExpertsFamily(
    "granitemoe",
    "GraniteMoeConfig",
    "GraniteMoeForCausalLM GraniteMoeModel",
    structure=LLAMA,
    fresh={**FRESH, **FINE},
    fields=NAMES,
    **SETTINGS,
)
SHARED = GraniteExpertsFamily(
    "granitemoeshared",
    "GraniteMoeSharedConfig",
    "GraniteMoeSharedForCausalLM GraniteMoeSharedModel",
    structure=LLAMA,
    fresh={**FRESH, **FINE, "shared_expert_intermediate_size": 384},
    fields={**NAMES, "shared_intermediate_size": "shared_expert_intermediate_size"},
    **SETTINGS,
)
