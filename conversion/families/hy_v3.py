"""Hunyuan 3 (Tencent, 2026): Qwen3's attention, and DeepSeek's experts without groups.

Checkpoints hold a layer after the last one, which predicts one token more.
"""

from ..storage.spelling import Ending
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import LLAMA
from .with_experts import FINE, FLOAT32_ROUTER, SHARED_EXPERTS, ExpertNames, shared_experts

IN_FILES = Ending(
    {
        "mlp.router.gate.weight": "mlp.gate.weight",
        "mlp.expert_bias": "mlp.e_score_correction_bias",
        **{
            f"mlp.shared_mlp.{part}_proj.weight": f"mlp.shared_experts.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
    }
)
"""Names of a sparse layer's tensors in files -> in the class."""


def width_of_the_dense_layers(official):
    """With no shared expert, the official class makes one as wide as a dense layer."""
    return [] if official.get("num_shared_experts", 1) else ["num_shared_experts"]


FAMILY = Family(
    "hy_v3",
    "HYV3Config",
    "HYV3ForCausalLM HYV3Model",
    structure={
        **LLAMA,
        "qk_norm": True,
        **FLOAT32_ROUTER,
    },
    fresh={
        **rotary(11_158_840.0),
        **FINE,
        "shared_expert_intermediate_size": 384,
        "norm_eps": 1e-5,
        "routed_scaling_factor": 2.826,
    },
    names=ExpertNames(
        sparse=SHARED_EXPERTS,
        bias_of_choice="e_score_correction_bias",
        spellings=[IN_FILES],
        ignored=["layers.{beyond}.*"],
    ),
    settings=DecoderSettings(
        fields={"router_scaling_factor": "routed_scaling_factor"},
        without_effect=("router_aux_loss_coef", "output_router_logits"),
        computed=[shared_experts("num_shared_experts")],
        contradictions=width_of_the_dense_layers,
    ),
)
