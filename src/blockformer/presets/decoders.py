"""Decoders as settings: what a fresh model has beside its family's structure."""

from .computed import by_type, every, four_widths, root_of_width, rotary
from .encoders import BERT_BASE, MODERN_BERT_BASE
from .structures import BIASES, STRUCTURES

_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "embedding_scale": root_of_width, "tie_word_embeddings": True}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GPT_J = {**rotary(10_000.0, 0.5), "hidden_act": "gelu_new", "norm_eps": 1e-5}
_DENSE: dict[str, dict] = {
    "qwen3": rotary(1_000_000.0),
    "qwen2": rotary(1_000_000.0),
    "llama": rotary(10_000.0),
    "mistral": {**rotary(10_000.0), "sliding_window": 4096},
    "phi3": rotary(10_000.0),
    "phi": {**rotary(10_000.0, 0.5), "hidden_act": "gelu_new", "norm_eps": 1e-5},
    "olmo": {**rotary(10_000.0), "clip_qkv": 8.0},
    "olmo2": rotary(500_000.0),
    "olmo3": {**rotary(500_000.0), **every(4, 4096), **by_type(500_000.0, 500_000.0)},
    "gemma": {**rotary(10_000.0), **_GEMMA},
    "gemma2": {**rotary(10_000.0), **_GEMMA, **_CAPS, **every(2, 4096)},
    "gemma3_text": {**_GEMMA, **every(6, 512), **by_type(1_000_000.0, 10_000.0)},
    "vaultgemma": {**rotary(10_000.0), **_GEMMA, **_CAPS, **every(2, 512)},
    "granite": {
        **rotary(10_000.0),
        "embedding_scale": 12.0,
        "residual_multiplier": 0.22,
        "attention_scale": 0.015625,
        "logit_scale": 0.125,
    },
    "smollm3": {**rotary(2_000_000.0), **every(4), "tie_word_embeddings": True},
    "arcee": {**rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
    "helium": {**rotary(100_000.0), "norm_eps": 1e-8},
    "seed_oss": {**rotary(10_000_000.0), "attention_bias": True},
    "ministral": {**rotary(10_000.0), **every(4, 4096)},
    "cwm": {**rotary(1_000_000.0), **every(4, 8192), "norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    "exaone4": {
        **rotary(1_000_000.0),
        **every(4, 4096),
        "rope_layers": every(4)["rope_layers"],
        "norm_eps": 1e-5,
    },
    "glm": {**rotary(10_000.0, 0.5), "attention_bias": True, "norm_eps": 1.5625e-07, "eos_token_id": 2},
    "glm4": {**rotary(10_000.0, 0.5), "norm_eps": 1e-5, "eos_token_id": 2},
    "cohere": {**rotary(500_000.0), "norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    "cohere2": {
        **rotary(50_000.0),
        **every(4, 4096),
        "rope_layers": every(4)["rope_layers"],
        "norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    "starcoder2": {
        **rotary(100_000.0),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_eps": 1e-5,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "nemotron": {
        **rotary(10_000.0, 0.5),
        **dict.fromkeys(BIASES, False),
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
    },
    "jais2": {**rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
    "stablelm": {**rotary(10_000.0, 0.25), "norm_eps": 1e-5},
    "gpt_neox": {**rotary(10_000.0, 0.25), "hidden_act": "gelu", "residual": "parallel", "norm_eps": 1e-5},
    "persimmon": {**rotary(25_000.0, 0.5), "hidden_act": "relu2", "qk_norm": True, "norm_eps": 1e-5},
    "gptj": _GPT_J,
    "codegen": _GPT_J,
    "falcon": {
        **rotary(10_000.0),
        **dict.fromkeys(BIASES, False),
        "hidden_act": "gelu",
        "residual": "parallel",
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "bloom": {"intermediate_size": four_widths, "norm_eps": 1e-5, "tie_word_embeddings": True},
    "mpt": {"intermediate_size": four_widths, "norm_eps": 1e-5, "tie_word_embeddings": True},
    "gpt_bigcode": {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_eps": 1e-5,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "opt": {"hidden_act": "relu", "tie_word_embeddings": True},
}

_FINE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
_SPARSE: dict[str, dict] = {
    "qwen3_moe": {**rotary(1_000_000.0), **_FINE},
    "qwen2_moe": {
        **rotary(1_000_000.0),
        **_FINE,
        "shared_expert_intermediate_size": 1536,
        "norm_topk_prob": False,
    },
    "mixtral": {**rotary(1_000_000.0), "num_experts": 8},
    "olmoe": {**rotary(10_000.0), **_FINE, "norm_topk_prob": False},
    "flex_olmo": {**rotary(500_000.0), "num_experts": 4, "norm_topk_prob": False},
    "granitemoe": {**_DENSE["granite"], **_FINE},
    "granitemoeshared": {**_DENSE["granite"], **_FINE, "shared_expert_intermediate_size": 384},
    "dots1": {
        **rotary(10_000_000.0),
        **_FINE,
        "shared_expert_intermediate_size": 768,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe": {
        **rotary(1_000_000.0, 0.5),
        **_FINE,
        "shared_expert_intermediate_size": 384,
        "attention_bias": True,
        "norm_eps": 1e-5,
    },
    "ernie4_5_moe": {
        **rotary(500_000.0),
        **_FINE,
        "shared_expert_intermediate_size": 768,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **every(2, 128),
        "attention_bias": True,
        "attention_output_bias": True,
        "expert_gate_limit": 7.0,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}

_GPT2: dict[str, dict] = {
    "gpt2": {
        "vocab_size": 50257,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
}
# With the sizes that the article names (`docs/articles.md`).
_ARTICLES: dict[str, dict] = {
    "article-gpt": {
        **STRUCTURES["article-gpt"],
        **_GPT2["gpt2"],
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
}

DECODERS: dict[str, dict] = {
    **{name: {**STRUCTURES[name], **settings} for name, settings in (_DENSE | _SPARSE | _GPT2).items()},
    "modernbert-decoder": {**STRUCTURES["modernbert-decoder"], **MODERN_BERT_BASE},
    "bert-decoder": {**STRUCTURES["bert"], **BERT_BASE},
    **_ARTICLES,
}
"""Preset -> settings."""
