"""The heads of the encoders after BERT."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .fields import Head

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


def standard_heads(
    prefix: str, head_of_rows: Mapping[str, Any], causal: str, next_sentence: bool, only: Collection[str] = ()
) -> list[EncoderHead]:
    """The heads that BERT and RoBERTa have.

    Args:
        prefix: what the official classes' names begin with.
        head_of_rows: arguments of the `EncoderHead` for sequence classification.
        causal: name of the official class that is a decoder's language model; "" where no class is a decoder.
        next_sentence: whether there are heads for the next sentence.
        only: the ends of the names of the official classes that there are; () means all.
    """
    encoder, decoder = "BlockformerEncoder", "BlockformerDecoder"
    score, answer = {"classifier": "score"}, {"qa_outputs": "qa_outputs"}
    lm, nsp = frozenset([LM]), frozenset([NSP])
    heads = [
        EncoderHead(f"{prefix}Model", f"{encoder}Model", pooler="usual"),
        EncoderHead(f"{prefix}ForMaskedLM", f"{encoder}ForMaskedLM", parts=lm),
        EncoderHead(f"{prefix}ForSequenceClassification", f"{encoder}ForSequenceClassification", **head_of_rows),
        EncoderHead(f"{prefix}ForMultipleChoice", f"{encoder}ForMultipleChoice", modules=score, pooler="needed"),
        EncoderHead(f"{prefix}ForTokenClassification", f"{encoder}ForTokenClassification", modules=score),
        EncoderHead(f"{prefix}ForQuestionAnswering", f"{encoder}ForQuestionAnswering", modules=answer),
        EncoderHead(f"{prefix}Model", f"{decoder}Model", is_decoder=True),
        EncoderHead(causal, f"{decoder}ForCausalLM", parts=lm, is_decoder=True),
    ]
    if next_sentence:
        for name, parts in {"ForPreTraining": lm | nsp, "ForNextSentencePrediction": nsp}.items():
            heads.append(EncoderHead(prefix + name, encoder + name, parts=parts, pooler="needed"))
    heads = [head for head in heads if causal or not head.is_decoder]
    return [head for head in heads if not only or head.official.removeprefix(prefix) in only]
