"""The small model that tests publish, and what scripts use that load it where this package is not."""

SIZES = {
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
