"""The Transformer of the article (Vaswani et al., 2017), and with its norms first; no official layout is its own."""

from .fresh import root_of_width
from .preset import Preset
from .shared import BIASES

STRUCTURE = {
    "norm_type": "layer_norm",
    "norm_placement": "post",
    "norm_eps": 1e-5,
    "position_type": "sinusoidal",
    "gated_mlp": False,
    **BIASES,
}
FRESH = {
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
_BASE = {**STRUCTURE, **FRESH, "embedding_scale": root_of_width}
_BIG = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "hidden_dropout": 0.3}
PRESETS = {
    "transformer-base": Preset("encoder_decoder", _BASE),
    "transformer-big": Preset("encoder_decoder", {**_BASE, **_BIG}),
    "transformer-pre-ln": Preset("encoder_decoder", {**_BASE, "norm_placement": "pre"}),
}
