"""RoBERTa (Liu et al., 2019) and its kin: BERT whose positions begin after the padding id.

XLM-RoBERTa (Conneau et al., 2020), CamemBERT (Martin et al., 2020) and data2vec's text model (Baevski et al., 2022) are
RoBERTa under other names. XLM-RoBERTa-XL (Goyal et al., 2021) and the models of Wettig et al. (2022) have their norms
before the sub-layers.

The sequence classification head has its own dense layer, which becomes our pooler. The language model head always uses
`gelu`, whatever `hidden_act` says.
"""

from typing import Any

from ..errors import ConversionError, shown
from .bert import LAYER, NAMES
from .bert_like import EMBEDDING_NORM, BertLikeFamily
from .encoder_heads import ROBERTA_ROWS, LanguageModelNames, standard_heads
from .encoder_settings import TOKEN_TYPES
from .fields import Computed

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


def roberta(name: str, prefix: str, structure: str = "roberta", root: str = "roberta.", **names: Any) -> BertLikeFamily:
    """RoBERTa under one of its names.

    Args:
        name: the official `model_type`.
        prefix: what the official classes' names begin with.
        structure: name of its settings in `STRUCTURES`.
        root: prefix of the encoder's tensors in models with a head.
        names: what is not as in BERT: arguments of `BertLikeFamily`.
    """
    return BertLikeFamily(
        name,
        f"{prefix}Config",
        standard_heads(prefix, ROBERTA_ROWS, f"{prefix}ForCausalLM", next_sentence=False),
        structure=structure,
        root=root,
        **{**NAMES, **names},
        language_model=LANGUAGE_MODEL,
        computed=[TOKEN_TYPES, GELU_HEAD],
        shifted=True,
    )


def norms_before(attention: str, mlp: str) -> dict[str, str]:
    """BERT's modules of a layer, with the norms before the sub-layers.

    Args:
        attention: the official name of the norm before an attention, within that attention.
        mlp: the official name of the norm before the feed-forward network.
    """
    plain = {theirs: ours for theirs, ours in LAYER.items() if not ours.endswith("_norm")}
    attentions = {"attention": "self_attn", "crossattention": "cross_attn"}
    norms = {f"{theirs}.{attention}": f"{ours}_pre_norm" for theirs, ours in attentions.items()}
    return {**plain, **norms, mlp: "mlp_pre_norm"}


FAMILY = roberta("roberta", "Roberta")
XLM = roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = roberta("camembert", "Camembert")
DATA2VEC = roberta("data2vec-text", "Data2VecText", root="data2vec_text.")
XL = roberta(
    "xlm-roberta-xl",
    "XLMRobertaXL",
    "xlm-roberta-xl",
    modules=norms_before("self_attn_layer_norm", "LayerNorm"),
    stack={"encoder.LayerNorm": "norm"},
)
PRE_NORM = roberta(
    "roberta-prelayernorm",
    "RobertaPreLayerNorm",
    "roberta-prelayernorm",
    "roberta_prelayernorm.",
    modules=norms_before("LayerNorm", "intermediate.LayerNorm"),
    stack={**EMBEDDING_NORM, "LayerNorm": "norm"},
)
