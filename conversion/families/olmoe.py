"""OLMoE (Muennighoff et al., 2024) and FlexOlmo (Shi et al., 2025): OLMo with experts in every layer."""

from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, MLP, NORMS, OUTPUT_NORMS, Q_AND_K_NORM
from .with_experts import ROUTER_FIELDS, ExpertsFamily

FIELDS = {
    **ROUTER_FIELDS,
    "num_experts": "num_experts",
    "intermediate_size": ("intermediate_size", "moe_intermediate_size"),
    "attention_bias": ALL_ATTENTION_BIASES,
}
HEADS = ("ForCausalLM", "Model")

OLMOE = ExpertsFamily(
    "olmoe",
    "Olmoe",
    heads=HEADS,
    layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM},
    fields=FIELDS,
    unsupported={"clip_qkv": (None,)},
)
FLEX_OLMO = ExpertsFamily(
    "flex_olmo",
    "FlexOlmo",
    heads=HEADS,
    layer={**ATTENTION, **MLP, **OUTPUT_NORMS, **Q_AND_K_NORM},
    fields=FIELDS,
)
