"""What is the same in every model of a family, whatever its size and training."""

_LLAMA_LIKE = {"norm_type": "rms_norm", "norm_placement": "pre", "position_type": "rotary", "gated_mlp": True}
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
_GPT_LIKE = {"norm_type": "layer_norm", "norm_placement": "pre", "gated_mlp": False, **BIASES}
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
    **BIASES,
    "embedding_norm": True,
    "lm_head_transform": True,
    "lm_head_bias": True,
}
_PRE_NORM_BERT = {**_BERT_LIKE, "norm_placement": "pre"}
_ROTARY_BERT = {**_BERT_LIKE, "position_type": "rotary"}
_MODERN_BERT = {
    **_LLAMA_LIKE,
    "norm_type": "layer_norm",
    "embedding_norm": True,
    "first_attention_norm": False,
    "lm_head_transform": True,
    "classifier_transform": True,
}
_ORIGINAL = {
    "norm_type": "layer_norm",
    "norm_placement": "post",
    "norm_eps": 1e-5,
    "position_type": "sinusoidal",
    "gated_mlp": False,
    **BIASES,
}
_ARTICLE = {**_GPT_LIKE, "norm_eps": 1e-5, "final_norm": True}
_ARTICLE_PAIR = {**_ARTICLE, "position_type": "sinusoidal", "hidden_act": "relu"}
_BART_LIKE = {**_ORIGINAL, "position_type": "learned", "position_offset": 2, "embedding_norm": True}
_T5_LIKE = {
    "norm_type": "rms_norm",
    "norm_placement": "pre",
    "position_type": "relative_bias",
    "attention_scale": 1.0,
    "float32_down_proj": True,
    "final_dropout": True,
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
        **dict.fromkeys(BIASES, False),
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
    "glm4_moe": {**_LLAMA_LIKE, "router_score": "sigmoid", "router_selection_bias": True},
    "ernie4_5_moe": {**_LLAMA_LIKE, "router_selection_bias": True},
    "gpt2": {**_GPT_LIKE, "position_type": "learned"},
    "bert": _BERT_LIKE,
    "roberta": _BERT_LIKE,
    "xlm-roberta-xl": {**_PRE_NORM_BERT, "embedding_norm": False},
    "megatron-bert": {**_PRE_NORM_BERT, "embedding_norm": False},
    "roberta-prelayernorm": _PRE_NORM_BERT,
    "albert": _BERT_LIKE,
    "modernbert": _MODERN_BERT,
    "modernbert-decoder": _MODERN_BERT,
    "eurobert": _LLAMA_LIKE,
    "deberta-v2": {**_BERT_LIKE, "position_type": "disentangled"},
    "mpnet": {**_BERT_LIKE, "position_type": "learned_relative_bias", "type_vocab_size": 0},
    "gte": {**_ROTARY_BERT, "gated_mlp": True, "mlp_bias": "down"},
    "nomic_bert": {**_ROTARY_BERT, **dict.fromkeys(BIASES, False), "gated_mlp": True},
    "jina_embeddings_v3": _ROTARY_BERT,
    "distilbert": {**_BERT_LIKE, "norm_eps": 1e-12, "type_vocab_size": 0},
    "original": _ORIGINAL,
    "marian": {**_ORIGINAL, "position_type": "sinusoidal_halves"},
    "bart": _BART_LIKE,
    "plbart": {**_BART_LIKE, "decoder_starts_with_last_label": True},
    "blenderbot": {**_BART_LIKE, "norm_placement": "pre", "embedding_norm": False, "position_offset": 0},
    "pegasus": {**_ORIGINAL, "norm_placement": "pre", "position_type": "sinusoidal_halves"},
    "m2m_100": {**_ORIGINAL, "norm_placement": "pre", "position_type": "sinusoidal_inclusive"},
    "mbart": {**_BART_LIKE, "norm_placement": "pre", "decoder_starts_with_last_label": True},
    "t5": _T5_LIKE,
    "t5gemma": {
        **_GEMMA_LIKE,
        "norm_placement": "pre_output",
        "share_embeddings": False,
        "final_dropout": True,
    },
    "umt5": {**_T5_LIKE, "relative_bias_per_layer": True},
    "article-gpt": {**_ARTICLE, "position_type": "learned", "hidden_act": "gelu_new"},
    "article-encoder-decoder": {**_ARTICLE_PAIR, "share_embeddings": False},
    "article-transformer": _ARTICLE_PAIR,
    "article-transformer-printed": {
        **_ARTICLE_PAIR,
        "norm_placement": "input_pre",
        "decoder_norm_placement": "input",
    },
}
"""Family -> fields. Conversion reads it too."""
