"""dots.llm1 (Huo et al., 2025): Qwen3's attention, and DeepSeek's experts: sigmoid scores and a term in the choice."""

from typing import Any

from .fields import Computed, WindowByLayer
from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, MLP, NORMS, Q_AND_K_NORM
from .with_experts import SHARED, ExpertsFamily, shared_experts


class Window(WindowByLayer):
    """A window in some of the layers, without a switch."""

    def write(self, config, head):
        """See `Value.write`."""
        return {name: value for name, value in super().write(config, head).items() if name != "use_sliding_window"}


def _read_layers(official) -> dict[str, Any]:
    dense, layers = official.config.first_k_dense_replace, official.config.num_hidden_layers
    return {"mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(layers)]}


def _write_layers(config, head) -> dict[str, Any]:
    return {"first_k_dense_replace": (config.mlp_layer_types or []).count("dense")}


FAMILY = ExpertsFamily(
    "dots1",
    "Dots1",
    heads=("ForCausalLM", "Model"),
    layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM},
    sparse={ours.replace("expert.", "experts."): ours for ours in SHARED},
    fields={
        **{name: name for name in ("num_experts_per_tok", "norm_topk_prob")},
        "n_routed_experts": "num_experts",
        "moe_intermediate_size": "moe_intermediate_size",
        "routed_scaling_factor": "routed_scaling_factor",
        "attention_bias": ALL_ATTENTION_BIASES,
    },
    unsupported={"n_group": (None, 1), "topk_group": (None, 1)},
    without_effect=("router_aux_loss_coef", "output_router_logits"),
    computed=(shared_experts("n_shared_experts"), Computed(_read_layers, _write_layers)),
    window=Window(),
)
