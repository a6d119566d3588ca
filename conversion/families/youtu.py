"""Youtu-LLM (Tencent, 2025): Llama with DeepSeek's latent attention."""

from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .deepseek import LATENT_FIELDS, LATENT_NAMES, LATENT_SETTINGS
from .fresh import rotary
from .shared import LLAMA

FAMILY = Family(
    "youtu",
    "YoutuConfig",
    "YoutuForCausalLM YoutuModel",
    structure={**LLAMA, "latent_norm_eps": 1e-6},
    fresh={**rotary(1_600_000.0, 0.5), "kv_lora_rank": 128, "q_lora_rank": 192, "tie_word_embeddings": True},
    names=DecoderNames(**LATENT_NAMES),
    settings=DecoderSettings(
        fields=LATENT_FIELDS, unsupported={"rope_interleave": (True,), "mlp_bias": (None, False)}, **LATENT_SETTINGS
    ),
)
