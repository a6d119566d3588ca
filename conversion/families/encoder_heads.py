"""What the encoders after BERT have in common before any names are compared: their settings and their heads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .base import Head

LM, NSP = "language model", "next sentence"
# Ours, in all of these families.
SETTINGS: dict[str, Any] = {
    "gated_mlp": False,
    "norm_type": "layer_norm",
    "norm_placement": "post",
    "norm_bias": True,
    "qk_norm": False,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "float32_down_proj": False,
    "attention_scale": None,
    "embedding_norm": True,
    "embedding_scale": None,
    "lm_head_transform": True,
    "lm_head_bias": True,
    "logit_scale": 1.0,
    "final_norm": False,
    "sliding_window": None,
    "activation_dropout": 0.0,
}


@dataclass(frozen=True)
class EncoderHead(Head):
    """A head of these families.

    Attributes:
        parts: what it has of a language model's and a next-sentence head.
        modules: official module -> ours, each with weight and bias, beyond those of `parts`.
        pooler: "needed", "usual" (a checkpoint without one is whole too), or "unused" by the official class.
        own_pooler: the official module of the head that does what our pooler does.
        is_decoder: whether it reads from left to right.
    """

    parts: frozenset[str] = frozenset()
    modules: Mapping[str, str] = field(default_factory=dict)
    pooler: str = "unused"
    own_pooler: str = ""
    is_decoder: bool = False

    @property
    def bare(self) -> bool:
        """Whether it is the stack alone: then no name of a tensor has a prefix, in both layouts."""
        return self.ours.endswith("Model")


@dataclass(frozen=True)
class LanguageModelNames:
    """Official names of a language model head.

    Attributes:
        dense, norm: the modules of the transform.
        weight, bias: its projection onto the vocabulary.
        copy: where the official class keeps the bias a second time, tied to the first; "" for nowhere.
    """

    dense: str
    norm: str
    weight: str
    bias: str
    copy: str = ""


def standard_heads(prefix: str, head_of_rows: Mapping[str, Any], causal: str, next_sentence: bool) -> list[EncoderHead]:
    """The heads that BERT and RoBERTa have.

    Args:
        prefix: what the official classes' names begin with.
        head_of_rows: arguments of the `EncoderHead` for sequence classification.
        causal: name of the official class that is a decoder's language model.
        next_sentence: whether there are heads for the next sentence.
    """
    encoder, decoder = "BlockformerEncoder", "BlockformerDecoder"
    score, answer = {"classifier": "score"}, {"qa_outputs": "qa_outputs"}
    lm, nsp = frozenset([LM]), frozenset([NSP])
    heads = [
        EncoderHead(f"{prefix}Model", f"{encoder}Model", pooler="usual"),
        EncoderHead(f"{prefix}ForMaskedLM", f"{encoder}ForMaskedLM", lm),
        EncoderHead(f"{prefix}ForSequenceClassification", f"{encoder}ForSequenceClassification", **head_of_rows),
        EncoderHead(f"{prefix}ForMultipleChoice", f"{encoder}ForMultipleChoice", modules=score, pooler="needed"),
        EncoderHead(f"{prefix}ForTokenClassification", f"{encoder}ForTokenClassification", modules=score),
        EncoderHead(f"{prefix}ForQuestionAnswering", f"{encoder}ForQuestionAnswering", modules=answer),
        EncoderHead(f"{prefix}Model", f"{decoder}Model", is_decoder=True),
        EncoderHead(causal, f"{decoder}ForCausalLM", lm, is_decoder=True),
    ]
    if next_sentence:
        names = {lm | nsp: "ForPreTraining", nsp: "ForNextSentencePrediction"}
        heads += [EncoderHead(prefix + name, encoder + name, parts, pooler="needed") for parts, name in names.items()]
    return heads


def fields(names: Iterable[str] = (), **renamed: str) -> dict[str, str]:
    """Official field -> ours: those that all of these families have, more of the same name, and renamed ones."""
    shared = (
        "vocab_size max_position_embeddings initializer_range tie_word_embeddings "
        "pad_token_id bos_token_id eos_token_id"
    ).split()
    return {**{name: name for name in [*shared, *names]}, **renamed}
