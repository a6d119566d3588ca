"""Encoders as settings."""

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
    "distilbert": {**BERT_BASE, **STRUCTURES["distilbert"], "num_hidden_layers": 6, "pooler_act": "relu"},
}
"""Preset -> settings."""
