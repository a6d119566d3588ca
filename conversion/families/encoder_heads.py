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


Arguments = Mapping[str, Any]
SCORE: Arguments = {"modules": {"classifier": "score"}}
POOLED_ROWS: Arguments = {**SCORE, "pooler": "needed"}
"""The head for sequence classification on BERT's pooler."""
ROBERTA_ROWS: Arguments = {"modules": {"classifier.out_proj": "score"}, "own_pooler": "classifier.dense"}
"""The same whose own dense layer is our pooler."""


def encoder_heads(classes: str, rows: Arguments = POOLED_ROWS, **others: Arguments) -> list[EncoderHead]:
    """The heads of an encoder, as BERT and RoBERTa have them.

    Args:
        classes: names of the official classes. Where one is a decoder's language model, only the stack may be a
            decoder, too.
        rows: arguments of the `EncoderHead` for sequence classification.
        others: the same of other heads that are not as in BERT, by the ends of their classes' names.
    """
    lm, nsp = frozenset([LM]), frozenset([NSP])
    kinds: dict[str, Arguments] = {
        "ForMaskedLM": {"parts": lm},
        "ForSequenceClassification": rows,
        "ForMultipleChoice": POOLED_ROWS,
        "ForTokenClassification": SCORE,
        "ForQuestionAnswering": {"modules": {"qa_outputs": "qa_outputs"}},
        "ForPreTraining": {"parts": lm | nsp, "pooler": "needed"},
        "ForNextSentencePrediction": {"parts": nsp, "pooler": "needed"},
        "Model": {"pooler": "usual"},
        **others,
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
