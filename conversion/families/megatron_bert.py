"""Megatron's BERT (Shoeybi et al., 2019): norms before the sub-layers, none on the embeddings."""

from ..values import TOKEN_TYPES
from .bert import FRESH, LANGUAGE_MODEL, NAMES, POOLED_ROWS, STRUCTURE
from .bert_like import BertLikeFamily
from .encoder_heads import standard_heads
from .roberta import norms_before

FAMILY = BertLikeFamily(
    "megatron-bert",
    "MegatronBertConfig",
    standard_heads(
        "MegatronBertModel MegatronBertForMaskedLM MegatronBertForSequenceClassification "
        "MegatronBertForMultipleChoice MegatronBertForTokenClassification "
        "MegatronBertForQuestionAnswering MegatronBertForCausalLM MegatronBertForPreTraining "
        "MegatronBertForNextSentencePrediction",
        POOLED_ROWS,
    ),
    structure={**STRUCTURE, "norm_placement": "pre", "embedding_norm": False},
    fresh={**FRESH, "vocab_size": 29056, "pooler_act": "tanh"},
    root="bert.",
    **{
        **NAMES,
        "modules": norms_before("attention.ln", "crossattention.ln", "ln"),
        "fields": {**NAMES["fields"], "classifier_dropout": None},
    },
    language_model=LANGUAGE_MODEL,
    computed=[TOKEN_TYPES],
    stack={"encoder.ln": "norm"},
)
