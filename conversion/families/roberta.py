"""RoBERTa (Liu et al., 2019) and its kin: BERT whose positions begin after the padding id.

XLM-RoBERTa (Conneau et al., 2020), CamemBERT (Martin et al., 2020) and data2vec's text model (Baevski et al., 2022) are
RoBERTa under other names. XLM-RoBERTa-XL (Goyal et al., 2021) and the models of Wettig et al. (2022) have their norms
before the sub-layers.

The sequence classification head has its own dense layer, which becomes our pooler. The language model head always uses
`gelu`, whatever `hidden_act` says.
"""

from collections.abc import Mapping
from typing import Any

from blockformer.files.errors import ConversionError, shown

from ..values import TOKEN_TYPES, Computed, EncoderPositions
from .base import Family
from .bert import FRESH as BERT_FRESH
from .bert import LAYER, NAMES, STRUCTURE
from .bert_like import EMBEDDING_NORM, EncoderNames, EncoderSettings
from .encoder_heads import ROBERTA_ROWS, LanguageModelNames, encoder_heads

FRESH = {
    **BERT_FRESH,
    "norm_eps": 1e-5,
    "type_vocab_size": 1,
    "position_offset": 2,
    "padding_position": "by_token",
    "pooler_act": "tanh",
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LANGUAGE_MODEL = LanguageModelNames(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    weight="lm_head.decoder.weight",
    bias="lm_head.bias",
    copy="lm_head.decoder.bias",
)


def _check_head(official):
    act = official.config.hidden_act
    if official.head.writes_text and act != "gelu":
        raise ConversionError(
            f"hidden_act must be 'gelu' with a language model head, which always has it, not {shown(act)}"
        )
    return {}


GELU_HEAD = Computed(_check_head)
"""The language model head has `gelu` in any case."""


def roberta(
    name: str,
    classes: str,
    fresh: Mapping[str, Any],
    structure: Mapping[str, Any] = STRUCTURE,
    **names: Any,
) -> Family:
    """RoBERTa under one of its names.

    Args:
        name: the official `model_type`.
        classes: names of the official model classes.
        fresh: what a fresh model has beyond `FRESH`.
        structure: our fields that are the same in all of its models.
        names: the arguments of `EncoderNames` that are not as in BERT.
    """
    return Family(
        name,
        encoder_heads(classes, ROBERTA_ROWS),
        structure=structure,
        fresh={**FRESH, **fresh},
        names=EncoderNames(**{**NAMES, "root": "roberta.", "language_model": LANGUAGE_MODEL, **names}),
        settings=EncoderSettings(
            positions=EncoderPositions(relative=True, shifted=True),
            computed=[TOKEN_TYPES, GELU_HEAD],
        ),
    )


def norms_before(self_attn: str, cross_attn: str, mlp: str) -> dict[str, str]:
    """BERT's modules of a layer, with the norms before the sub-layers: their official names are the arguments."""
    plain = {theirs: ours for theirs, ours in LAYER.items() if not ours.endswith("_norm")}
    return {**plain, self_attn: "self_attn_pre_norm", cross_attn: "cross_attn_pre_norm", mlp: "mlp_pre_norm"}


FAMILY = roberta(
    "roberta",
    "RobertaModel RobertaForMaskedLM RobertaForSequenceClassification RobertaForMultipleChoice "
    "RobertaForTokenClassification RobertaForQuestionAnswering RobertaForCausalLM",
    {"vocab_size": 50265},
)
XLM = roberta(
    "xlm-roberta",
    "XLMRobertaModel XLMRobertaForMaskedLM XLMRobertaForSequenceClassification "
    "XLMRobertaForMultipleChoice XLMRobertaForTokenClassification XLMRobertaForQuestionAnswering "
    "XLMRobertaForCausalLM",
    {"vocab_size": 250002},
)
CAMEMBERT = roberta(
    "camembert",
    "CamembertModel CamembertForMaskedLM CamembertForSequenceClassification "
    "CamembertForMultipleChoice CamembertForTokenClassification CamembertForQuestionAnswering "
    "CamembertForCausalLM",
    {"vocab_size": 32005, "bos_token_id": 5, "eos_token_id": 6},
)
DATA2VEC = roberta(
    "data2vec-text",
    "Data2VecTextModel Data2VecTextForMaskedLM Data2VecTextForSequenceClassification "
    "Data2VecTextForMultipleChoice Data2VecTextForTokenClassification "
    "Data2VecTextForQuestionAnswering Data2VecTextForCausalLM",
    {"vocab_size": 50265},
    root="data2vec_text.",
)
XL = roberta(
    "xlm-roberta-xl",
    "XLMRobertaXLModel XLMRobertaXLForMaskedLM XLMRobertaXLForSequenceClassification "
    "XLMRobertaXLForMultipleChoice XLMRobertaXLForTokenClassification "
    "XLMRobertaXLForQuestionAnswering XLMRobertaXLForCausalLM",
    {"vocab_size": 250880},
    structure={**STRUCTURE, "norm_placement": "pre", "embedding_norm": False},
    modules=norms_before("attention.self_attn_layer_norm", "crossattention.self_attn_layer_norm", "LayerNorm"),
    stack={"encoder.LayerNorm": "norm"},
)
PRE_NORM = roberta(
    "roberta-prelayernorm",
    "RobertaPreLayerNormModel RobertaPreLayerNormForMaskedLM "
    "RobertaPreLayerNormForSequenceClassification RobertaPreLayerNormForMultipleChoice "
    "RobertaPreLayerNormForTokenClassification RobertaPreLayerNormForQuestionAnswering "
    "RobertaPreLayerNormForCausalLM",
    {"vocab_size": 50265},
    structure={**STRUCTURE, "norm_placement": "pre"},
    root="roberta_prelayernorm.",
    modules=norms_before("attention.LayerNorm", "crossattention.LayerNorm", "intermediate.LayerNorm"),
    stack={**EMBEDDING_NORM, "LayerNorm": "norm"},
)
