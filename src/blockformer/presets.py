"""Families as settings of the one core: `preset("qwen3", hidden_size=512)` gives a config.

Presets know the config, not the other way round, so they stay out of exported repos.
"""

import difflib

from .configuration_blockformer import BlockformerConfig
from .configuration_decoder import BlockformerDecoderConfig
from .configuration_encoder import BlockformerEncoderConfig
from .configuration_encoder_decoder import BlockformerEncoderDecoderConfig

_LLAMA_STYLE = {
    "norm_type": "rms_norm",
    "norm_placement": "pre",
    "position_type": "rotary",
    "gated_mlp": True,
    "hidden_act": "silu",
}
_BERT_STYLE = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "norm_type": "layer_norm",
    "norm_placement": "post",
    "norm_eps": 1e-12,
    "position_type": "learned",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "gated_mlp": False,
    "hidden_act": "gelu",
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "embedding_norm": True,
    "lm_head_transform": True,
    "lm_head_bias": True,
    "tie_word_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
}
_ROBERTA_STYLE = {
    **_BERT_STYLE,
    "norm_eps": 1e-5,
    "type_vocab_size": 1,
    "position_offset": 2,
    "pooler_act": "tanh",
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_ORIGINAL_STYLE = {
    "vocab_size": 37000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "norm_type": "layer_norm",
    "norm_placement": "post",
    "norm_eps": 1e-5,
    "position_type": "sinusoidal",
    "max_position_embeddings": 512,
    "gated_mlp": False,
    "hidden_act": "relu",
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "initializer_range": None,
    "hidden_dropout": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_BART_STYLE = {
    **_ORIGINAL_STYLE,
    "vocab_size": 50265,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "position_type": "learned",
    "position_offset": 2,
    "max_position_embeddings": 1024,
    "hidden_act": "gelu",
    "embedding_norm": True,
    "lm_head_bias": "fixed",
    "initializer_range": 0.02,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5_STYLE = {
    "vocab_size": 32128,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
    "norm_type": "rms_norm",
    "norm_placement": "pre",
    "position_type": "relative_bias",
    "attention_scale": 1.0,
    "float32_down_proj": True,
    "initializer_range": None,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_T5_GATED = {**_T5_STYLE, "gated_mlp": True, "hidden_act": "gelu_new"}
_MT5_STYLE = {
    **_T5_GATED,
    "vocab_size": 250112,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
}


def _root_of_width(settings: dict) -> float:
    """The factor of the embeddings (Vaswani et al., 2017, section 3.4)."""
    return settings["hidden_size"] ** 0.5


def _by_width(settings: dict) -> float:
    """The factor of the states before a head that is tied to the embeddings, in T5."""
    return settings["hidden_size"] ** -0.5


PRESETS: dict[str, tuple[type[BlockformerConfig], dict]] = {
    "qwen3": (
        BlockformerDecoderConfig,
        {**_LLAMA_STYLE, "qk_norm": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    ),
    "qwen2": (
        BlockformerDecoderConfig,
        {
            **_LLAMA_STYLE,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "llama": (
        BlockformerDecoderConfig,
        {**_LLAMA_STYLE, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    ),
    "mistral": (
        BlockformerDecoderConfig,
        {
            **_LLAMA_STYLE,
            "sliding_window": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "gpt2": (
        BlockformerDecoderConfig,
        {
            "vocab_size": 50257,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "norm_type": "layer_norm",
            "norm_placement": "pre",
            "norm_eps": 1e-5,
            "position_type": "learned",
            "max_position_embeddings": 1024,
            "gated_mlp": False,
            "hidden_act": "gelu_new",
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
    ),
    "bert": (BlockformerEncoderConfig, {**_BERT_STYLE, "pooler_act": "tanh"}),
    "bert-decoder": (BlockformerDecoderConfig, _BERT_STYLE),
    "roberta": (BlockformerEncoderConfig, {**_ROBERTA_STYLE, "vocab_size": 50265}),
    "xlm-roberta": (BlockformerEncoderConfig, {**_ROBERTA_STYLE, "vocab_size": 250002}),
    "distilbert": (
        BlockformerEncoderConfig,
        {**_BERT_STYLE, "num_hidden_layers": 6, "type_vocab_size": 0, "pooler_act": "relu"},
    ),
    "transformer-base": (
        BlockformerEncoderDecoderConfig,
        {**_ORIGINAL_STYLE, "embedding_scale": _root_of_width},
    ),
    "transformer-big": (
        BlockformerEncoderDecoderConfig,
        {
            **_ORIGINAL_STYLE,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "hidden_dropout": 0.3,
            "embedding_scale": _root_of_width,
        },
    ),
    "transformer-pre-ln": (
        BlockformerEncoderDecoderConfig,
        {**_ORIGINAL_STYLE, "norm_placement": "pre", "embedding_scale": _root_of_width},
    ),
    "marian": (
        BlockformerEncoderDecoderConfig,
        {
            **_ORIGINAL_STYLE,
            "vocab_size": 58101,
            "position_type": "sinusoidal_halves",
            "hidden_act": "silu",
            "embedding_scale": _root_of_width,
            "lm_head_bias": "fixed",
            "initializer_range": 0.02,
            "pad_token_id": 58100,
            "eos_token_id": 0,
            "decoder_start_token_id": 58100,
        },
    ),
    "bart": (BlockformerEncoderDecoderConfig, _BART_STYLE),
    "mbart": (
        BlockformerEncoderDecoderConfig,
        {
            **_BART_STYLE,
            "vocab_size": 250027,
            "norm_placement": "pre",
            "embedding_scale": _root_of_width,
            "decoder_start_token_id": None,
            "decoder_starts_with_last_label": True,
        },
    ),
    "t5": (
        BlockformerEncoderDecoderConfig,
        {
            **_T5_STYLE,
            "gated_mlp": False,
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "logit_scale": _by_width,
        },
    ),
    "t5-v1.1": (BlockformerEncoderDecoderConfig, _T5_GATED),
    "mt5": (BlockformerEncoderDecoderConfig, _MT5_STYLE),
    "umt5": (
        BlockformerEncoderDecoderConfig,
        {**_MT5_STYLE, "relative_bias_per_layer": True, "logit_scale": _by_width},
    ),
}


def preset(name: str, **overrides) -> BlockformerConfig:
    """The config of a family, with your own sizes.

    Args:
        name: a key of `PRESETS`.
        overrides: any field of the config.

    Raises:
        ValueError: no such preset (the near one is named), or a field that the config refuses.

    Example:
        >>> preset("qwen3", hidden_size=512, num_key_value_heads=2).qk_norm
        True
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"there is no preset '{name}'; there are {', '.join(sorted(PRESETS))}.{hint}")
    config_class, defaults = PRESETS[name]
    settings = {**defaults, **overrides}
    return config_class(**{key: value(settings) if callable(value) else value for key, value in settings.items()})
