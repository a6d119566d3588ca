"""ELECTRA (Clark et al., 2020): BERT with narrower embeddings, trained to tell replaced tokens from original ones.

The generator is a masked language model, whose head always has `gelu`; the discriminator has a head for each token.
"""

from ..values import TOKEN_TYPES
from .base import Family
from .bert import FRESH, NAMES, POSITIONS, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import ROBERTA_ROWS, SCORE, EncoderHead, LanguageModelNames, encoder_heads
from .roberta import GELU_HEAD

DETECTOR = {"discriminator_predictions.dense": "dense", "discriminator_predictions.dense_prediction": "score"}


HEADS = encoder_heads(
    "ElectraModel ElectraForMaskedLM ElectraForSequenceClassification ElectraForTokenClassification "
    "ElectraForQuestionAnswering ElectraForCausalLM ElectraForMultipleChoice",
    ROBERTA_ROWS,
    ForMultipleChoice={**SCORE, "own_pooler": "sequence_summary.summary"},
    Model={},
)
FAMILY = Family(
    "electra",
    [*HEADS, EncoderHead("ElectraForPreTraining", "BlockformerEncoderForReplacedTokenDetection", modules=DETECTOR)],
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
