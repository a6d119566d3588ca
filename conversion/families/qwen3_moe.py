"""Qwen3-MoE (Yang et al., 2025): Qwen3 with experts."""

from ..values import WindowEverywhere
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .shared import ATTENTION, LLAMA, MLP, NORMS, Q_AND_K_NORM
from .with_experts import FINE, SPARSE_STEP, ExpertNames


class SwitchedWindow(WindowEverywhere):
    """A window in every layer or in none, with a switch of its own."""

    def write(self, config, head):
        """See `Value.write`."""
        return {"use_sliding_window": config.sliding_window is not None, **super().write(config, head)}


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM Qwen3MoeModel Qwen3MoeForSequenceClassification "
    "Qwen3MoeForTokenClassification Qwen3MoeForQuestionAnswering",
    structure={**LLAMA, "qk_norm": True},
    fresh={**rotary(1_000_000.0), **FINE},
    names=ExpertNames(layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM}),
    settings=DecoderSettings(
        fields={"num_experts": "num_experts"},
        computed=(SPARSE_STEP,),
        window=SwitchedWindow(),
    ),
)
