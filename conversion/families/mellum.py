"""Mellum 2 (JetBrains, 2026): Qwen3-MoE with windows in some layers, and rotary parameters by layer type.

Checkpoints may hold a layer that predicts one token more.
"""

from ..values import RopeByLayerType
from .base import Family
from .decoder import DecoderSettings
from .fresh import by_type, every, rotary
from .shared import LLAMA
from .with_experts import FINE, ExpertNames

FAMILY = Family(
    "mellum",
    "MellumConfig",
    "MellumForCausalLM MellumModel",
    structure={**LLAMA, "qk_norm": True},
    fresh={**rotary(500_000.0), **every(4, 1024), **by_type(500_000.0, 10_000.0), **FINE},
    names=ExpertNames(outside=["mtp.*"]),
    settings=DecoderSettings(
        fields={"num_experts": "num_experts"},
        rope=RopeByLayerType(by_part=True),
        unsupported=dict.fromkeys(("rope_theta", "rope_scaling"), (None,)),
    ),
)
