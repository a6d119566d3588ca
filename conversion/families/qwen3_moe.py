"""Qwen3-MoE (Yang et al., 2025): Qwen3 with experts."""

from .fields import WindowEverywhere
from .llama_like import ALL_ATTENTION_BIASES, ATTENTION, MLP, NORMS, Q_AND_K_NORM
from .with_experts import ROUTER_FIELDS, SPARSE_STEP, ExpertsFamily


class SwitchedWindow(WindowEverywhere):
    """A window in every layer or in none, with a switch of its own."""

    def write(self, config, head):
        """See `Value.write`."""
        return {"use_sliding_window": config.sliding_window is not None, **super().write(config, head)}


FAMILY = ExpertsFamily(
    "qwen3_moe",
    "Qwen3Moe",
    layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM},
    fields={
        **ROUTER_FIELDS,
        "num_experts": "num_experts",
        "moe_intermediate_size": "moe_intermediate_size",
        "attention_bias": ALL_ATTENTION_BIASES,
    },
    computed=(SPARSE_STEP,),
    window=SwitchedWindow(),
    spans="transformer.",
)
