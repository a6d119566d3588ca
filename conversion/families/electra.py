"""ELECTRA (Clark et al., 2020): BERT with narrower embeddings, trained to tell replaced tokens from original ones.

The generator is a masked language model, whose head always has `gelu`; the discriminator has a head for each token.
"""

from dataclasses import replace

from ..values import TOKEN_TYPES
from .base import Family
from .bert import FRESH, NAMES, POSITIONS, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import ROBERTA_ROWS, EncoderHead, LanguageModelNames, standard_heads
from .roberta import GELU_HEAD

DETECTOR = {"discriminator_predictions.dense": "dense", "discriminator_predictions.dense_prediction": "score"}


def _heads() -> list[EncoderHead]:
    heads = standard_heads(
        "ElectraModel ElectraForMaskedLM ElectraForSequenceClassification "
        "ElectraForTokenClassification ElectraForQuestionAnswering ElectraForCausalLM",
        ROBERTA_ROWS,
    )
    plain = [replace(head, pooler="unused") for head in heads]
    choice = EncoderHead(
        "ElectraForMultipleChoice",
        "BlockformerEncoderForMultipleChoice",
        modules={"classifier": "score"},
        own_pooler="sequence_summary.summary",
    )
    detector = "BlockformerEncoderForReplacedTokenDetection"
    return [*plain, choice, EncoderHead("ElectraForPreTraining", detector, modules=DETECTOR)]


FAMILY = Family(
    "electra",
    "ElectraConfig",
    _heads(),
    structure=STRUCTURE,
    fresh={
        **FRESH,
        "hidden_size": 256,
        "embedding_size": 128,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
    },
    names=EncoderNames(
        root="electra.",
        **NAMES,
        stack={"embeddings.LayerNorm": "embedding_norm", "embeddings_project": "embed_projection"},
        language_model=LanguageModelNames(
            dense="generator_predictions.dense",
            norm="generator_predictions.LayerNorm",
            weight="generator_lm_head.weight",
            bias="generator_lm_head.bias",
        ),
    ),
    settings=EncoderSettings(
        fields={"embedding_size": "embedding_size"},
        positions=POSITIONS,
        computed=[TOKEN_TYPES, GELU_HEAD],
        pooler_act="gelu",
        unsupported={
            "summary_type": ("first",),
            "summary_use_proj": (True,),
            "summary_activation": ("gelu",),
        },
    ),
)
