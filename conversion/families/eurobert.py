"""EuroBERT (Boizard et al., 2025): Llama's blocks that see the whole text."""

from ..values import Computed, HeadDim, Rope
from .base import Family
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import SCORE, LanguageModelNames, encoder_heads
from .fresh import rotary
from .shared import ATTENTION, LLAMA, MLP, NORMS

POOLING = {"bos": "first", "mean": "mean", "late": "mean_of_pooled"}


def _read_pooling(official):
    return {"pooling": POOLING[official.config.classifier_pooling]}


def _write_pooling(config, head):
    return {"classifier_pooling": next(theirs for theirs, ours in POOLING.items() if ours == config.pooling)}


FAMILY = Family(
    "eurobert",
    encoder_heads(
        "EuroBertModel EuroBertForMaskedLM EuroBertForSequenceClassification EuroBertForTokenClassification",
        {**SCORE, "own_pooler": "dense"},
        Model={},
    ),
    structure=LLAMA,
    fresh={
        **rotary(250_000.0),
        "vocab_size": 128256,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "pooling": "mean_of_pooled",
    },
    names=EncoderNames(
        root="model.",
        embeddings={"embed_tokens": "embed_tokens"},
        layer="layers.{layer}.",
        modules={**ATTENTION, **MLP, **NORMS},
        stack={"norm": "norm"},
        language_model=LanguageModelNames(dense="", norm="", weight="lm_head.weight", bias="lm_head.bias"),
    ),
    settings=EncoderSettings(
        fields={"mlp_bias": ("mlp_bias", "lm_head_bias")},
        positions=Rope(),
        computed=[HeadDim(), Computed(_read_pooling, _write_pooling)],
        pooler_act="gelu",
    ),
)
