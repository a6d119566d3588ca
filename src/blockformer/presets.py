"""Families as settings of the one core: `preset("qwen3", hidden_size=512)` gives a config.

Presets know the config, not the other way round, so they stay out of exported repos.
"""

import difflib

from .axes import axes
from .configuration_blockformer import BlockformerConfig
from .configuration_decoder import BlockformerDecoderConfig
from .configuration_encoder import BlockformerEncoderConfig
from .configuration_encoder_decoder import BlockformerEncoderDecoderConfig

_LLAMA_LIKE = {"norm_type": "rms_norm", "norm_placement": "pre", "position_type": "rotary", "gated_mlp": True}
_BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
_GPT_LIKE = {"norm_type": "layer_norm", "norm_placement": "pre", "gated_mlp": False, **_BIASES}
_ROTARY_GPT = {**_GPT_LIKE, "position_type": "rotary"}
_GPT_J_LIKE = {
    **_ROTARY_GPT,
    "residual": "parallel_shared_norm",
    "attention_bias": False,
    "attention_output_bias": False,
    "lm_head_bias": True,
}
_OLMO2_LIKE = {**_LLAMA_LIKE, "norm_placement": "output", "qk_norm": "projection"}
_GEMMA_LIKE = {**_LLAMA_LIKE, "norm_weight": "zero_centered"}
_COHERE_LIKE = {
    **_LLAMA_LIKE,
    "norm_type": "layer_norm",
    "norm_bias": False,
    "residual": "parallel_shared_norm",
}
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
    **dict.fromkeys("phi3 granite smollm3 helium seed_oss ministral cwm glm".split(), _LLAMA_LIKE),
    "arcee": {**_LLAMA_LIKE, "gated_mlp": False},
    "exaone4": {**_LLAMA_LIKE, "norm_placement": "output", "qk_norm": True},
    "olmo": {**_LLAMA_LIKE, "norm_type": "layer_norm", "norm_weight": "none", "norm_bias": False, "norm_eps": 1e-5},
    "olmo2": _OLMO2_LIKE,
    "olmo3": _OLMO2_LIKE,
    **dict.fromkeys(("gemma", "vaultgemma"), _GEMMA_LIKE),
    "gemma2": {**_GEMMA_LIKE, "norm_placement": "pre_output"},
    "gemma3_text": {**_GEMMA_LIKE, "norm_placement": "pre_output", "qk_norm": True},
    "glm4": {**_LLAMA_LIKE, "norm_placement": "pre_output"},
    "cohere": _COHERE_LIKE,
    "cohere2": _COHERE_LIKE,
    "stablelm": {**_LLAMA_LIKE, "norm_type": "layer_norm"},
    "starcoder2": _ROTARY_GPT,
    "nemotron": {**_ROTARY_GPT, "norm_weight": "zero_centered"},
    "jais2": _ROTARY_GPT,
    "gpt_neox": _ROTARY_GPT,
    "persimmon": _ROTARY_GPT,
    "phi": {**_ROTARY_GPT, "residual": "parallel_shared_norm", "lm_head_bias": True},
    "gptj": _GPT_J_LIKE,
    "codegen": _GPT_J_LIKE,
    "falcon": _ROTARY_GPT,
    "bloom": {**_GPT_LIKE, "position_type": "alibi", "embedding_norm": True, "hidden_act": "gelu_pytorch_tanh"},
    "mpt": {
        **_GPT_LIKE,
        **dict.fromkeys(_BIASES, False),
        "norm_bias": False,
        "position_type": "alibi",
        "hidden_act": "gelu",
    },
    "gpt_bigcode": {**_GPT_LIKE, "position_type": "learned"},
    "opt": {**_GPT_LIKE, "position_type": "learned", "position_offset": 2, "norm_eps": 1e-5},
    "mistral": _LLAMA_LIKE,
    "qwen3_moe": {**_LLAMA_LIKE, "qk_norm": True},
    "qwen2_moe": {**_LLAMA_LIKE, "attention_bias": True, "shared_expert_gate": True},
    "mixtral": _LLAMA_LIKE,
    "granitemoe": _LLAMA_LIKE,
    "granitemoeshared": _LLAMA_LIKE,
    "gpt_oss": {**_LLAMA_LIKE, "attention_sinks": True, "expert_bias": True, "hidden_act": "quick_gelu"},
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


def _root_of_width(settings: dict) -> float:
    """The factor of the embeddings (Vaswani et al., 2017, section 3.4)."""
    return settings["hidden_size"] ** 0.5


def _four_widths(settings: dict) -> int:
    """The inner width of the feed-forward network, where a family knows no other."""
    return 4 * settings["hidden_size"]


def _by_width(settings: dict) -> float:
    """The factor of the states before a head that is tied to the embeddings, in T5."""
    return settings["hidden_size"] ** -0.5


def _every(step: int, window: int | None = None):
    """Settings in which each layer but every `step`-th one has a window or, without one, positions."""

    def kinds(settings: dict) -> list:
        is_short = [layer % step != 0 for layer in range(1, settings["num_hidden_layers"] + 1)]
        if window is None:
            return is_short
        names = ("full_attention", "sliding_attention" if settings["sliding_window"] else "full_attention")
        return [names[one] for one in is_short]

    return {"layer_types": kinds, "sliding_window": window} if window else {"rope_layers": kinds}


def _by_type(full: float, sliding: float) -> dict:
    """Rotary parameters of each layer type that there is."""
    thetas = {"full_attention": full, "sliding_attention": sliding}

    def rope(settings: dict) -> dict:
        types = settings["layer_types"]
        kinds = sorted(set(types(settings) if callable(types) else types))
        return {kind: {"rope_type": "default", "rope_theta": thetas[kind]} for kind in kinds}

    return {"rope_parameters": rope}


def _rotary(theta: float, part: float = 1.0) -> dict:
    rope = {"rope_type": "default", "rope_theta": theta}
    return {"hidden_act": "silu", "rope_parameters": rope | ({"partial_rotary_factor": part} if part < 1 else {})}


_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "embedding_scale": _root_of_width, "tie_word_embeddings": True}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GPT_J = {**_rotary(10_000.0, 0.5), "hidden_act": "gelu_new", "norm_eps": 1e-5}
_DECODERS: dict[str, dict] = {
    "phi3": _rotary(10_000.0),
    "phi": {**_rotary(10_000.0, 0.5), "hidden_act": "gelu_new", "norm_eps": 1e-5},
    "olmo": {**_rotary(10_000.0), "clip_qkv": 8.0},
    "olmo2": _rotary(500_000.0),
    "olmo3": {**_rotary(500_000.0), **_every(4, 4096), **_by_type(500_000.0, 500_000.0)},
    "gemma": {**_rotary(10_000.0), **_GEMMA},
    "gemma2": {**_rotary(10_000.0), **_GEMMA, **_CAPS, **_every(2, 4096)},
    "gemma3_text": {**_GEMMA, **_every(6, 512), **_by_type(1_000_000.0, 10_000.0)},
    "vaultgemma": {**_rotary(10_000.0), **_GEMMA, **_CAPS, **_every(2, 512)},
    "granite": {
        **_rotary(10_000.0),
        "embedding_scale": 12.0,
        "residual_multiplier": 0.22,
        "attention_scale": 0.015625,
        "logit_scale": 0.125,
    },
    "smollm3": {**_rotary(2_000_000.0), **_every(4), "tie_word_embeddings": True},
    "arcee": {**_rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
    "helium": {**_rotary(100_000.0), "norm_eps": 1e-8},
    "seed_oss": {**_rotary(10_000_000.0), "attention_bias": True},
    "ministral": {**_rotary(10_000.0), **_every(4, 4096)},
    "cwm": {**_rotary(1_000_000.0), **_every(4, 8192), "norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    "exaone4": {
        **_rotary(1_000_000.0),
        **_every(4, 4096),
        "rope_layers": _every(4)["rope_layers"],
        "norm_eps": 1e-5,
    },
    "glm": {**_rotary(10_000.0, 0.5), "attention_bias": True, "norm_eps": 1.5625e-07, "eos_token_id": 2},
    "glm4": {**_rotary(10_000.0, 0.5), "norm_eps": 1e-5, "eos_token_id": 2},
    "cohere": {**_rotary(500_000.0), "norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    "cohere2": {
        **_rotary(50_000.0),
        **_every(4, 4096),
        "rope_layers": _every(4)["rope_layers"],
        "norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    "starcoder2": {
        **_rotary(100_000.0),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_eps": 1e-5,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "nemotron": {
        **_rotary(10_000.0, 0.5),
        **dict.fromkeys(_BIASES, False),
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
    },
    "jais2": {**_rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
    "stablelm": {**_rotary(10_000.0, 0.25), "norm_eps": 1e-5},
    "gpt_neox": {**_rotary(10_000.0, 0.25), "hidden_act": "gelu", "residual": "parallel", "norm_eps": 1e-5},
    "persimmon": {**_rotary(25_000.0, 0.5), "hidden_act": "relu2", "qk_norm": True, "norm_eps": 1e-5},
    "gptj": _GPT_J,
    "codegen": _GPT_J,
    "falcon": {
        **_rotary(10_000.0),
        **dict.fromkeys(_BIASES, False),
        "hidden_act": "gelu",
        "residual": "parallel",
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "bloom": {"intermediate_size": _four_widths, "norm_eps": 1e-5, "tie_word_embeddings": True},
    "mpt": {"intermediate_size": _four_widths, "norm_eps": 1e-5, "tie_word_embeddings": True},
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
    "qwen3_moe": {**_rotary(1_000_000.0), **_FINE},
    "qwen2_moe": {
        **_rotary(1_000_000.0),
        **_FINE,
        "shared_expert_intermediate_size": 1536,
        "norm_topk_prob": False,
    },
    "mixtral": {**_rotary(1_000_000.0), "num_experts": 8},
    "olmoe": {**_rotary(10_000.0), **_FINE, "norm_topk_prob": False},
    "flex_olmo": {**_rotary(500_000.0), "num_experts": 4, "norm_topk_prob": False},
    "granitemoe": {**_DECODERS["granite"], **_FINE},
    "granitemoeshared": {**_DECODERS["granite"], **_FINE, "shared_expert_intermediate_size": 384},
    "dots1": {
        **_rotary(10_000_000.0),
        **_FINE,
        "shared_expert_intermediate_size": 768,
        "routed_scaling_factor": 2.5,
    },
    "ernie4_5_moe": {
        **_rotary(500_000.0),
        **_FINE,
        "shared_expert_intermediate_size": 768,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **_every(2, 128),
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

PRESETS: dict[str, tuple[type[BlockformerConfig], dict]] = {
    "qwen3": (BlockformerDecoderConfig, {**STRUCTURES["qwen3"], **_rotary(1_000_000.0)}),
    "qwen2": (BlockformerDecoderConfig, {**STRUCTURES["qwen2"], **_rotary(1_000_000.0)}),
    "llama": (BlockformerDecoderConfig, {**STRUCTURES["llama"], **_rotary(10_000.0)}),
    "mistral": (BlockformerDecoderConfig, {**STRUCTURES["mistral"], **_rotary(10_000.0), "sliding_window": 4096}),
    **{name: (BlockformerDecoderConfig, {**STRUCTURES[name], **settings}) for name, settings in _DECODERS.items()},
    **{name: (BlockformerDecoderConfig, {**STRUCTURES[name], **settings}) for name, settings in _SPARSE.items()},
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
    known = {field: each.default for field, each in axes(config_class).items()} | settings
    return config_class(**{key: value(known) if callable(value) else value for key, value in settings.items()})
