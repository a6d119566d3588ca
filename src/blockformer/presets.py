"""Families as settings of the one core: `preset("qwen3", hidden_size=512)` gives a config.

Presets know the config, not the other way round, so they stay out of exported repos.
"""

import difflib

from .configuration_blockformer import BlockformerConfig
from .configuration_decoder import BlockformerDecoderConfig
from .configuration_encoder import BlockformerEncoderConfig
from .configuration_encoder_decoder import BlockformerEncoderDecoderConfig

_LLAMA_LIKE = {"norm_type": "rms_norm", "norm_placement": "pre", "position_type": "rotary", "gated_mlp": True}
_BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
_GPT_LIKE = {"norm_type": "layer_norm", "norm_placement": "pre", "gated_mlp": False, **_BIASES}
_BERT_LIKE = {
    "norm_type": "layer_norm",
    "norm_placement": "post",
    "position_type": "learned",
    "gated_mlp": False,
    **_BIASES,
    "embedding_norm": True,
    "lm_head_transform": True,
    "lm_head_bias": True,
}
_ORIGINAL = {
    "norm_type": "layer_norm",
    "norm_placement": "post",
    "norm_eps": 1e-5,
    "position_type": "sinusoidal",
    "gated_mlp": False,
    **_BIASES,
}
_BART_LIKE = {**_ORIGINAL, "position_type": "learned", "position_offset": 2, "embedding_norm": True}
_T5_LIKE = {
    "norm_type": "rms_norm",
    "norm_placement": "pre",
    "position_type": "relative_bias",
    "attention_scale": 1.0,
    "float32_down_proj": True,
}

STRUCTURES: dict[str, dict] = {
    "qwen3": {**_LLAMA_LIKE, "qk_norm": True},
    "qwen2": {**_LLAMA_LIKE, "attention_bias": True},
    "llama": _LLAMA_LIKE,
    "phi3": _LLAMA_LIKE,
    "olmo2": {**_LLAMA_LIKE, "norm_placement": "output", "qk_norm": "projection"},
    "gpt_neox": {**_GPT_LIKE, "position_type": "rotary"},
    "mistral": _LLAMA_LIKE,
    "qwen3_moe": {**_LLAMA_LIKE, "qk_norm": True},
    "qwen2_moe": {**_LLAMA_LIKE, "attention_bias": True, "shared_expert_gate": True},
    "mixtral": _LLAMA_LIKE,
    "olmoe": {**_LLAMA_LIKE, "qk_norm": "projection"},
    "flex_olmo": {**_LLAMA_LIKE, "norm_placement": "output", "qk_norm": "projection"},
    "dots1": {**_LLAMA_LIKE, "qk_norm": True, "router_score": "sigmoid", "router_selection_bias": True},
    "ernie4_5_moe": {**_LLAMA_LIKE, "router_selection_bias": True},
    "gpt2": {**_GPT_LIKE, "position_type": "learned"},
    "bert": _BERT_LIKE,
    "roberta": _BERT_LIKE,
    "distilbert": {**_BERT_LIKE, "norm_eps": 1e-12, "type_vocab_size": 0},
    "original": _ORIGINAL,
    "marian": {**_ORIGINAL, "position_type": "sinusoidal_halves"},
    "bart": _BART_LIKE,
    "mbart": {**_BART_LIKE, "norm_placement": "pre", "decoder_starts_with_last_label": True},
    "t5": _T5_LIKE,
    "umt5": {**_T5_LIKE, "relative_bias_per_layer": True},
}
"""What is the same in every model of a family, whatever its size and training; conversion reads it too."""

_BERT_BASE = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
}
_ROBERTA_BASE = {
    **_BERT_BASE,
    **STRUCTURES["roberta"],
    "norm_eps": 1e-5,
    "type_vocab_size": 1,
    "position_offset": 2,
    "pooler_act": "tanh",
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
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
_FINE_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}


def _root_of_width(settings: dict) -> float:
    """The factor of the embeddings (Vaswani et al., 2017, section 3.4)."""
    return settings["hidden_size"] ** 0.5


def _by_width(settings: dict) -> float:
    """The factor of the states before a head that is tied to the embeddings, in T5."""
    return settings["hidden_size"] ** -0.5


def _rotary(theta: float, part: float = 1.0) -> dict:
    rope = {"rope_type": "default", "rope_theta": theta}
    return {"hidden_act": "silu", "rope_parameters": rope | ({"partial_rotary_factor": part} if part < 1 else {})}


PRESETS: dict[str, tuple[type[BlockformerConfig], dict]] = {
    "qwen3": (BlockformerDecoderConfig, {**STRUCTURES["qwen3"], **_rotary(1_000_000.0)}),
    "qwen2": (BlockformerDecoderConfig, {**STRUCTURES["qwen2"], **_rotary(1_000_000.0)}),
    "llama": (BlockformerDecoderConfig, {**STRUCTURES["llama"], **_rotary(10_000.0)}),
    "mistral": (BlockformerDecoderConfig, {**STRUCTURES["mistral"], **_rotary(10_000.0), "sliding_window": 4096}),
    "phi3": (BlockformerDecoderConfig, {**STRUCTURES["phi3"], **_rotary(10_000.0)}),
    "olmo2": (BlockformerDecoderConfig, {**STRUCTURES["olmo2"], **_rotary(500_000.0)}),
    "gpt_neox": (
        BlockformerDecoderConfig,
        {**STRUCTURES["gpt_neox"], **_rotary(10_000.0, 0.25), "hidden_act": "gelu", "residual": "parallel"},
    ),
    "qwen3_moe": (BlockformerDecoderConfig, {**STRUCTURES["qwen3_moe"], **_rotary(1_000_000.0), **_FINE_EXPERTS}),
    "qwen2_moe": (
        BlockformerDecoderConfig,
        {
            **STRUCTURES["qwen2_moe"],
            **_rotary(1_000_000.0),
            **_FINE_EXPERTS,
            "shared_expert_intermediate_size": 1536,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": (BlockformerDecoderConfig, {**STRUCTURES["mixtral"], **_rotary(1_000_000.0), "num_experts": 8}),
    "olmoe": (
        BlockformerDecoderConfig,
        {**STRUCTURES["olmoe"], **_rotary(10_000.0), **_FINE_EXPERTS, "norm_topk_prob": False},
    ),
    "flex_olmo": (
        BlockformerDecoderConfig,
        {**STRUCTURES["flex_olmo"], **_rotary(500_000.0), "num_experts": 4, "norm_topk_prob": False},
    ),
    "dots1": (
        BlockformerDecoderConfig,
        {
            **STRUCTURES["dots1"],
            **_rotary(10_000_000.0),
            **_FINE_EXPERTS,
            "shared_expert_intermediate_size": 768,
            "routed_scaling_factor": 2.5,
        },
    ),
    "ernie4_5_moe": (
        BlockformerDecoderConfig,
        {
            **STRUCTURES["ernie4_5_moe"],
            **_rotary(500_000.0),
            **_FINE_EXPERTS,
            "shared_expert_intermediate_size": 768,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": (
        BlockformerDecoderConfig,
        {
            **STRUCTURES["gpt2"],
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
    ),
    "bert": (BlockformerEncoderConfig, {**STRUCTURES["bert"], **_BERT_BASE, "pooler_act": "tanh"}),
    "bert-decoder": (BlockformerDecoderConfig, {**STRUCTURES["bert"], **_BERT_BASE}),
    "roberta": (BlockformerEncoderConfig, {**_ROBERTA_BASE, "vocab_size": 50265}),
    "xlm-roberta": (BlockformerEncoderConfig, {**_ROBERTA_BASE, "vocab_size": 250002}),
    "distilbert": (
        BlockformerEncoderConfig,
        {**_BERT_BASE, **STRUCTURES["distilbert"], "num_hidden_layers": 6, "pooler_act": "relu"},
    ),
    "transformer-base": (
        BlockformerEncoderDecoderConfig,
        {**STRUCTURES["original"], **_ORIGINAL_BASE, "embedding_scale": _root_of_width},
    ),
    "transformer-big": (
        BlockformerEncoderDecoderConfig,
        {
            **STRUCTURES["original"],
            **_ORIGINAL_BASE,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "hidden_dropout": 0.3,
            "embedding_scale": _root_of_width,
        },
    ),
    "transformer-pre-ln": (
        BlockformerEncoderDecoderConfig,
        {**STRUCTURES["original"], **_ORIGINAL_BASE, "norm_placement": "pre", "embedding_scale": _root_of_width},
    ),
    "marian": (
        BlockformerEncoderDecoderConfig,
        {
            **STRUCTURES["marian"],
            **_ORIGINAL_BASE,
            "vocab_size": 58101,
            "hidden_act": "silu",
            "embedding_scale": _root_of_width,
            "lm_head_bias": "fixed",
            "initializer_range": 0.02,
            "pad_token_id": 58100,
            "eos_token_id": 0,
            "decoder_start_token_id": 58100,
        },
    ),
    "bart": (BlockformerEncoderDecoderConfig, {**STRUCTURES["bart"], **_BART_LARGE}),
    "mbart": (
        BlockformerEncoderDecoderConfig,
        {
            **STRUCTURES["mbart"],
            **_BART_LARGE,
            "vocab_size": 250027,
            "embedding_scale": _root_of_width,
            "decoder_start_token_id": None,
        },
    ),
    "t5": (
        BlockformerEncoderDecoderConfig,
        {
            **STRUCTURES["t5"],
            **_T5_SMALL,
            "gated_mlp": False,
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "logit_scale": _by_width,
        },
    ),
    "t5-v1.1": (BlockformerEncoderDecoderConfig, {**STRUCTURES["t5"], **_T5_SMALL}),
    "mt5": (BlockformerEncoderDecoderConfig, {**STRUCTURES["t5"], **_MT5_SMALL}),
    "umt5": (BlockformerEncoderDecoderConfig, {**STRUCTURES["umt5"], **_MT5_SMALL, "logit_scale": _by_width}),
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
