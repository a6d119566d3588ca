"""ALBERT (Lan et al., 2020): BERT with narrow embeddings, whose layers share their weights.

Its second task of pre-training, the order of two sentences, has the form of BERT's next sentence. In training the
official classes drop out nothing after the feed-forward network, and some of what that head reads; ours as BERT's.
"""

from blockformer.files.errors import ConversionError

from ..values import TOKEN_TYPES, Computed, NotExpressible
from .base import Family
from .bert import EMBEDDINGS, FRESH, STRUCTURE
from .bert_like import EMBEDDING_NORM, EncoderNames, EncoderSettings
from .encoder_heads import NSP, LanguageModelNames


def _read_widths(official):
    config = official.config
    if config.embedding_size == config.hidden_size:
        raise ConversionError(
            "config.json: embedding_size must differ from hidden_size, or the model has no projection"
        )
    if NSP in official.head.parts and config.num_labels != 2:
        raise ConversionError(f"config.json: num_labels must be 2 with {official.head.official}")
    return {"embedding_size": config.embedding_size}


def _write_widths(config, head):
    if config.embedding_size == config.hidden_size:
        raise NotExpressible("embedding_size", "other than hidden_size", config.embedding_size)
    return {"embedding_size": config.embedding_size}


_MODULES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.dense": "self_attn.o_proj",
    "attention.LayerNorm": "self_attn_post_norm",
    "ffn": "mlp.up_proj",
    "ffn_output": "mlp.down_proj",
    "full_layer_layer_norm": "mlp_post_norm",
}

FAMILY = Family(
    "albert",
    "AlbertModel AlbertForMaskedLM AlbertForSequenceClassification AlbertForMultipleChoice "
    "AlbertForTokenClassification AlbertForQuestionAnswering AlbertForPreTraining",
    structure=STRUCTURE,
    fresh={
        **FRESH,
        "vocab_size": 30000,
        "embedding_size": 128,
        "num_hidden_groups": 1,
        "hidden_act": "gelu_new",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.1,
        "pooler_act": "tanh",
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    names=EncoderNames(
        root="albert.",
        embeddings=EMBEDDINGS,
        layer="encoder.albert_layer_groups.{layer}.albert_layers.0.",
        modules=_MODULES,
        stack={**EMBEDDING_NORM, "encoder.embedding_hidden_mapping_in": "embed_projection"},
        pooler="pooler",
        next_sentence="sop_classifier.classifier",
        language_model=LanguageModelNames(
            dense="predictions.dense",
            norm="predictions.LayerNorm",
            weight="predictions.decoder.weight",
            bias="predictions.bias",
            copy="predictions.decoder.bias",
        ),
    ),
    settings=EncoderSettings(
        fields={"num_hidden_groups": "num_hidden_groups", "classifier_dropout_prob": "classifier_dropout"},
        computed=[TOKEN_TYPES, Computed(_read_widths, _write_widths)],
        not_none=("num_hidden_groups",),
        unsupported={"inner_group_num": (1,)},
    ),
)
