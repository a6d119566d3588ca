"""Sizes of small models that several tests share; what a test changes or adds stands in its file.

Tests that read what transformers writes have theirs in `conversion/oracles.py`, pairs of models in `pairs.py`.
"""

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ONE_LAYER = {**TINY, "num_hidden_layers": 1}
# Strong layers, so that a product that is slightly wrong changes the text.
STRONG = {**TINY, **TOKENS, "vocab_size": 97, "initializer_range": 0.6, "max_position_embeddings": 64}
# Wide enough to be computed by several threads, and not a multiple of a block.
UNEVEN = {
    **STRONG,
    "hidden_size": 256,
    "intermediate_size": 520,
    "vocab_size": 777,
    "initializer_range": 0.3,
}
# What tests publish, of the vocabulary and with the special tokens of `tiny_tokenizer`.
PUBLISHED = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.4,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
THREE_LAYERS = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# Configs of transformers.
OFFICIAL_DECODER = {
    **TINY,
    "vocab_size": 131,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OFFICIAL_ENCODER = {
    **TINY,
    "max_position_embeddings": 66,
    "initializer_range": 0.4,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
