"""The heads of the encoders after BERT."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .head import Head

LM, NSP = "language model", "next sentence"


@dataclass(frozen=True)
class EncoderHead(Head):
    """A head of these families.

    Attributes:
        parts: what it has of a language model's and a next-sentence head; `modules` are beyond those.
        pooler: "needed", "usual" (a checkpoint without one is whole too), or "unused" by the official class.
        own_pooler: the official module of the head that does what our pooler does.
        is_decoder: whether it reads from left to right.
    """

    parts: frozenset[str] = frozenset()
    pooler: str = "unused"
    own_pooler: str = ""
    is_decoder: bool = False


@dataclass(frozen=True)
class LanguageModelNames:
    """Official names of a language model head.

    Attributes:
        dense, norm: the modules of the transform; "" for none.
        weight, bias: its projection onto the vocabulary.
        copy: where the official class keeps the bias a second time, tied to the first; "" for nowhere.
    """

    dense: str
    norm: str
    weight: str
    bias: str
    copy: str = ""


ROBERTA_ROWS = {"modules": {"classifier.out_proj": "score"}, "own_pooler": "classifier.dense"}
"""The head for sequence classification whose own dense layer is our pooler."""


def standard_heads(classes: str, head_of_rows: Mapping[str, Any]) -> list[EncoderHead]:
    """The heads that BERT and RoBERTa have.

    Args:
        classes: names of the official classes. Where one is a decoder's language model, only the stack may be a
            decoder, too.
        head_of_rows: arguments of the `EncoderHead` for sequence classification.
    """
    lm, nsp = frozenset([LM]), frozenset([NSP])
    kinds: dict[str, dict[str, Any]] = {
        "ForMaskedLM": {"parts": lm},
        "ForSequenceClassification": dict(head_of_rows),
        "ForMultipleChoice": {"modules": {"classifier": "score"}, "pooler": "needed"},
        "ForTokenClassification": {"modules": {"classifier": "score"}},
        "ForQuestionAnswering": {"modules": {"qa_outputs": "qa_outputs"}},
        "ForPreTraining": {"parts": lm | nsp, "pooler": "needed"},
        "ForNextSentencePrediction": {"parts": nsp, "pooler": "needed"},
        "Model": {"pooler": "usual"},
    }
    heads: list[EncoderHead] = []
    for name in classes.split():
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            heads.append(EncoderHead(heads[0].official, "BlockformerDecoderModel", is_decoder=True))
            heads.append(EncoderHead(name, "BlockformerDecoderForCausalLM", parts=lm, is_decoder=True))
        else:
            kind = next(kind for kind in kinds if name.endswith(kind))
            heads.append(EncoderHead(name, f"BlockformerEncoder{kind}", **kinds[kind]))
    return heads
