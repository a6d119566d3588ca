"""Encoder-decoders as settings."""

from .computed import by_width, four_widths, root_of_width
from .structures import STRUCTURES

_ORIGINAL_BASE = {
    "vocab_size": 37000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "hidden_act": "relu",
    "tie_word_embeddings": True,
    "initializer_range": None,
    "hidden_dropout": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_BART_LARGE = {
    **_ORIGINAL_BASE,
    "vocab_size": 50265,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 1024,
    "hidden_act": "gelu",
    "lm_head_bias": "fixed",
    "initializer_range": 0.02,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5_SMALL = {
    "vocab_size": 32128,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
    "gated_mlp": True,
    "hidden_act": "gelu_new",
    "initializer_range": None,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_MT5_SMALL = {
    **_T5_SMALL,
    "vocab_size": 250112,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
}
_ARTICLE = {
    **_ORIGINAL_BASE,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.1,
}

ENCODER_DECODERS: dict[str, dict] = {
    "transformer-base": {**STRUCTURES["original"], **_ORIGINAL_BASE, "embedding_scale": root_of_width},
    "transformer-big": {
        **STRUCTURES["original"],
        **_ORIGINAL_BASE,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "hidden_dropout": 0.3,
        "embedding_scale": root_of_width,
    },
    "transformer-pre-ln": {
        **STRUCTURES["original"],
        **_ORIGINAL_BASE,
        "norm_placement": "pre",
        "embedding_scale": root_of_width,
    },
    "marian": {
        **STRUCTURES["marian"],
        **_ORIGINAL_BASE,
        "vocab_size": 58101,
        "hidden_act": "silu",
        "embedding_scale": root_of_width,
        "lm_head_bias": "fixed",
        "initializer_range": 0.02,
        "pad_token_id": 58100,
        "eos_token_id": 0,
        "decoder_start_token_id": 58100,
    },
    "bart": {**STRUCTURES["bart"], **_BART_LARGE},
    "mbart": {
        **STRUCTURES["mbart"],
        **_BART_LARGE,
        "vocab_size": 250027,
        "embedding_scale": root_of_width,
        "decoder_start_token_id": None,
    },
    "t5": {
        **STRUCTURES["t5"],
        **_T5_SMALL,
        "gated_mlp": False,
        "hidden_act": "relu",
        "tie_word_embeddings": True,
        "logit_scale": by_width,
    },
    "t5-v1.1": {**STRUCTURES["t5"], **_T5_SMALL},
    "mt5": {**STRUCTURES["t5"], **_MT5_SMALL},
    "umt5": {**STRUCTURES["umt5"], **_MT5_SMALL, "logit_scale": by_width},
    "article-encoder-decoder": {
        **STRUCTURES["article-encoder-decoder"],
        **_ARTICLE,
        **dict.fromkeys(("attention_bias", "attention_output_bias"), False),
        "lm_head_bias": True,
        "activation_dropout": 0.1,
        "embedding_scale": root_of_width,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    **{
        name: {
            **STRUCTURES[name],
            **_ARTICLE,
            "intermediate_size": four_widths,
            **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias", "norm_bias"), False),
        }
        for name in ("article-transformer", "article-transformer-printed")
    },
}
"""Preset -> settings."""
