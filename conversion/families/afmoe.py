"""Trinity (Arcee AI, 2025): a sigmoid gate on attention's output, four norms in a layer, sigmoid scores for experts.

Only layers with a window rotate. Embeddings may be scaled by the root of the width.
"""

from ..values import Computed, RootOfWidth, only_sliding_layers_rotate
from .base import Family
from .decoder import DecoderSettings
from .fresh import every, root_of_width, rotary
from .shared import ATTENTION, LLAMA, MLP, Q_AND_K_NORM
from .with_experts import FINE, SHARED_EXPERTS, SIGMOID_ROUTER, ExpertNames, first_dense, shared_experts

FAMILY = Family(
    "afmoe",
    "AfmoeForCausalLM AfmoeModel",
    structure={
        **LLAMA,
        "norm_placement": "pre_output",
        "qk_norm": True,
        "attention_gate": True,
        **SIGMOID_ROUTER,
    },
    fresh={
        **rotary(10_000.0),
        **every(4, 2048),
        **every(4),
        **FINE,
        "shared_expert_intermediate_size": 384,
        "norm_eps": 1e-5,
        "embedding_scale": root_of_width,
        "routed_scaling_factor": 2.826,
    },
    names=ExpertNames(
        layer={
            **ATTENTION,
            **MLP,
            **Q_AND_K_NORM,
            "self_attn.gate_proj": "self_attn.gate_proj",
            "input_layernorm": "self_attn_pre_norm",
            "post_attention_layernorm": "self_attn_output_norm",
            "pre_mlp_layernorm": "mlp_pre_norm",
            "post_mlp_layernorm": "mlp_output_norm",
        },
        router="router.gate",
        sparse=SHARED_EXPERTS,
        bias_of_choice="expert_bias",
    ),
    settings=DecoderSettings(
        fields={"route_scale": "routed_scaling_factor"},
        without_effect=["output_router_logits"],
        computed=(
            shared_experts("num_shared_experts"),
            first_dense("num_dense_layers"),
            RootOfWidth("mup_enabled"),
            Computed(only_sliding_layers_rotate),
        ),
    ),
)
