"""Youtu-LLM (Tencent, 2025): Llama with DeepSeek's latent attention."""

from .decoder import LLAMA, DecoderFamily
from .deepseek import LATENT_FIELDS, LATENTS
from .fresh import rotary

FAMILY = DecoderFamily(
    "youtu",
    "YoutuConfig",
    "YoutuForCausalLM YoutuModel",
    structure={**LLAMA, "latent_norm_eps": 1e-6},
    fresh={**rotary(1_600_000.0, 0.5), "kv_lora_rank": 128, "q_lora_rank": 192, "tie_word_embeddings": True},
    fields=LATENT_FIELDS,
    unsupported={"rope_interleave": (True,), "mlp_bias": (None, False)},
    **LATENTS,
)
