"""Encoders as settings."""

from .computed import rotary
from .structures import STRUCTURES

BERT_BASE = {
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
    **BERT_BASE,
    **STRUCTURES["roberta"],
    "norm_eps": 1e-5,
    "type_vocab_size": 1,
    "position_offset": 2,
    "pooler_act": "tanh",
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}

ENCODERS: dict[str, dict] = {
    "bert": {**STRUCTURES["bert"], **BERT_BASE, "pooler_act": "tanh"},
    "roberta": {**_ROBERTA_BASE, "vocab_size": 50265},
    "xlm-roberta": {**_ROBERTA_BASE, "vocab_size": 250002},
    "camembert": {**_ROBERTA_BASE, "vocab_size": 32005, "bos_token_id": 5, "eos_token_id": 6},
    "data2vec-text": {**_ROBERTA_BASE, "vocab_size": 50265},
    "roberta-prelayernorm": {**_ROBERTA_BASE, **STRUCTURES["roberta-prelayernorm"], "vocab_size": 50265},
    "xlm-roberta-xl": {**_ROBERTA_BASE, **STRUCTURES["xlm-roberta-xl"], "vocab_size": 250880},
    "megatron-bert": {**BERT_BASE, **STRUCTURES["megatron-bert"], "vocab_size": 29056, "pooler_act": "tanh"},
    "ernie": {**STRUCTURES["bert"], **BERT_BASE, "pooler_act": "tanh", "task_type_vocab_size": 3},
    "electra": {
        **STRUCTURES["bert"],
        **BERT_BASE,
        "hidden_size": 256,
        "embedding_size": 128,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
    },
    "gte": {
        **BERT_BASE,
        **STRUCTURES["gte"],
        **rotary(160_000.0),
        "vocab_size": 250048,
        "hidden_act": "gelu",
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    },
    "nomic_bert": {
        **BERT_BASE,
        **STRUCTURES["nomic_bert"],
        **rotary(1_000.0),
        "vocab_size": 30528,
        "max_position_embeddings": 2048,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "jina_embeddings_v3": {
        **_ROBERTA_BASE,
        **STRUCTURES["jina_embeddings_v3"],
        **rotary(20_000.0),
        "vocab_size": 250002,
        "hidden_act": "gelu",
        "max_position_embeddings": 8194,
        "position_offset": 0,
    },
    "distilbert": {**BERT_BASE, **STRUCTURES["distilbert"], "num_hidden_layers": 6, "pooler_act": "relu"},
}
"""Preset -> settings."""
