"""Megatron's BERT (Shoeybi et al., 2019): norms before the sub-layers, none on the embeddings."""

from ..values import TOKEN_TYPES
from .base import Family
from .bert import FRESH, LANGUAGE_MODEL, NAMES, POSITIONS, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .roberta import norms_before

FAMILY = Family(
    "megatron-bert",
    "MegatronBertModel MegatronBertForMaskedLM MegatronBertForSequenceClassification "
    "MegatronBertForMultipleChoice MegatronBertForTokenClassification "
    "MegatronBertForQuestionAnswering MegatronBertForCausalLM MegatronBertForPreTraining "
    "MegatronBertForNextSentencePrediction",
    structure={**STRUCTURE, "norm_placement": "pre", "embedding_norm": False},
    fresh={**FRESH, "vocab_size": 29056, "pooler_act": "tanh"},
    names=EncoderNames(
        root="bert.",
        **{**NAMES, "modules": norms_before("attention.ln", "crossattention.ln", "ln")},
        stack={"encoder.ln": "norm"},
        language_model=LANGUAGE_MODEL,
    ),
    settings=EncoderSettings(
        positions=POSITIONS,
        computed=[TOKEN_TYPES],
    ),
)
