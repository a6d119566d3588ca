"""GPT-Neo (Black et al., 2021): GPT-2 with separate matrices, scores as they are, and windows in every other layer."""

from ..values import Computed, InnerSize
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import every
from .gpt2 import FRESH as GPT2_FRESH
from .gpt2 import NORMS, OUTER
from .shared import GPT

KINDS = {"global": "full_attention", "local": "sliding_attention"}
"""Official type of a layer -> ours."""


def read_layers(official):
    """The official list has a type for each layer, and one window for all that are local."""
    config = official.config
    kinds = [KINDS[each] for each in config.attention_layers]
    return {"layer_types": kinds, "sliding_window": config.window_size if KINDS["local"] in kinds else None}


def write_layers(config, head):
    """The way back, as one block of all layers."""
    names = {ours: theirs for theirs, ours in KINDS.items()}
    window = {} if config.sliding_window is None else {"window_size": config.sliding_window}
    return {"attention_types": [[[names[kind] for kind in config.layer_types], 1]], **window}


FAMILY = Family(
    "gpt_neo",
    "GPTNeoForCausalLM GPTNeoModel GPTNeoForSequenceClassification "
    "GPTNeoForTokenClassification GPTNeoForQuestionAnswering",
    structure={**GPT, "position_type": "learned", "attention_bias": False, "attention_scale": 1.0},
    fresh={
        **GPT2_FRESH,
        **every(2, 256),
        "max_position_embeddings": 2048,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    names=DecoderNames(
        root="transformer.",
        token_head="classifier",
        layer={
            **{f"attn.attention.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")},
            "attn.attention.out_proj": "self_attn.o_proj",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
            **NORMS,
        },
        outer=OUTER,
        layers="h.{layer}.",
        ignored=["h.{layer}.attn.attention.bias", "h.{layer}.attn.attention.masked_bias"],
    ),
    settings=DecoderSettings(
        rope=None,
        head_dim=None,
        computed=[InnerSize("intermediate_size"), Computed(read_layers, write_layers)],
        reads_whole=False,
    ),
    pad_token_learns=True,
)
