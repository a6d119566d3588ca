"""The sizes of published checkpoints: what their `config.json` says beyond the preset of their family."""

_QWEN3 = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


def _sizes(width: int, inner: int, layers: int, heads: int) -> dict:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


SIZES: dict[str, tuple[str, dict]] = {
    "qwen3-0.6b": ("qwen3", {**_QWEN3, **_sizes(1024, 3072, 28, 16), "tie_word_embeddings": True}),
    "qwen3-1.7b": ("qwen3", {**_QWEN3, **_sizes(2048, 6144, 28, 16), "tie_word_embeddings": True}),
    "qwen3-4b": ("qwen3", {**_QWEN3, **_sizes(2560, 9728, 36, 32), "tie_word_embeddings": True}),
    "qwen3-8b": ("qwen3", {**_QWEN3, **_sizes(4096, 12288, 36, 32)}),
    "llama-3.2-1b": (
        "llama",
        {
            **_sizes(2048, 8192, 16, 32),
            "vocab_size": 128256,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
    "gemma-3-1b": (
        "gemma3_text",
        {
            **_sizes(1152, 6912, 26, 4),
            "vocab_size": 262144,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "attention_scale": 256**-0.5,
            "max_position_embeddings": 32768,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
        },
    ),
    "gpt2-medium": ("gpt2", _LARGE),
    "gpt2-large": ("gpt2", _sizes(1280, 5120, 36, 20)),
    "gpt2-xl": ("gpt2", _sizes(1600, 6400, 48, 25)),
    "bert-base": ("bert", _BASE),
    "bert-large": ("bert", _LARGE),
    "roberta-base": ("roberta", _BASE),
    "roberta-large": ("roberta", _LARGE),
    "modernbert-base": ("modernbert", {}),
    "modernbert-large": ("modernbert", _sizes(1024, 2624, 28, 16)),
    "t5-small": ("t5", _sizes(512, 2048, 6, 8)),
    "t5-base": ("t5", _BASE),
    "bart-base": ("bart", _sizes(768, 3072, 6, 12)),
    "bart-large": ("bart", _LARGE | {"num_hidden_layers": 12}),
}
"""Preset -> the preset that it is a size of, and the sizes."""
