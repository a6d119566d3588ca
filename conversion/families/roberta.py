"""RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020): BERT whose positions begin after the padding id.

The sequence classification head has its own dense layer, which becomes our pooler. The language model head always uses
`gelu`, whatever `hidden_act` says.
"""

from ..errors import ConversionError, shown
from .bert import NAMES
from .bert_like import TOKEN_TYPES, BertLikeFamily
from .encoder_heads import LanguageModelNames, standard_heads
from .fields import Computed


def _check_head(official):
    act = official.config.hidden_act
    if official.head.writes_text and act != "gelu":
        raise ConversionError(
            f"hidden_act must be 'gelu' with a language model head, which always has it, not {shown(act)}"
        )
    return {}


def roberta(name: str, prefix: str) -> BertLikeFamily:
    """RoBERTa under one of its names.

    Args:
        name: the official `model_type`.
        prefix: what the official classes' names begin with.
    """
    rows = {"modules": {"classifier.out_proj": "score"}, "own_pooler": "classifier.dense"}
    return BertLikeFamily(
        name,
        f"{prefix}Config",
        standard_heads(prefix, rows, f"{prefix}ForCausalLM", next_sentence=False),
        structure="roberta",
        root="roberta.",
        **NAMES,
        language_model=LanguageModelNames(
            dense="lm_head.dense",
            norm="lm_head.layer_norm",
            weight="lm_head.decoder.weight",
            bias="lm_head.bias",
            copy="lm_head.decoder.bias",
        ),
        computed=[TOKEN_TYPES, Computed(_check_head)],
        shifted=True,
    )


FAMILY = roberta("roberta", "Roberta")
XLM = roberta("xlm-roberta", "XLMRoberta")
