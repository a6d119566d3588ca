"""The heads of decoders, and the dropout before them."""

from typing import Any

from ..values import Value
from .head import RELEASED, Head

OURS = "BlockformerDecoder"
USUAL_QA = {"model.": "transformer."}
"""Prefix of a stack -> its prefix in the class for question answering that most decoders share."""
TOKEN_DROPOUT = 0.1
"""Before the official head of tokens, where the config does not say."""
DROPOUT_ENTRIES = ("classifier_dropout", "hidden_dropout")
ROWS, TOKENS, ANSWERS = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"


def decoder_heads(
    classes: str,
    root: str = "model.",
    *,
    qa_root: str = "",
    token_head: str = "score",
    head_bias: bool = False,
    bare_root: str = "",
) -> list[Head]:
    """The heads of a decoder that this release of transformers has.

    Args:
        classes: names of the official classes, the language model first.
        root: prefix of the stack's tensors.
        qa_root: the same in the class for question answering; "" for the usual one.
        token_head: name of the head of tokens.
        head_bias: whether the head of the language model may have a bias.
        bare_root: prefix of the stack's tensors in the class without a head.
    """
    score, answer = {"score.weight": "score.weight"}, {"qa_outputs": "qa_outputs"}
    head = {"lm_head.weight": "lm_head.weight"} | ({"lm_head.bias": "lm_head.bias"} if head_bias else {})
    kinds: dict[str, tuple[Any, ...]] = {
        ROWS: (ROWS, root, {}, score),
        TOKENS: (TOKENS, root, {token_head: "score"}, {}),
        ANSWERS: (ANSWERS, qa_root or USUAL_QA.get(root, root), answer, {}),
        "ForCausalLM": ("ForCausalLM", root, {}, head),
        "LMHeadModel": ("ForCausalLM", root, {}, head),
        "Model": ("Model", bare_root, {}, {}),
    }
    found = {name: next(kind for end, kind in kinds.items() if name.endswith(end)) for name in classes.split()}
    return [Head(name, OURS + kind, *rest) for name, (kind, *rest) in found.items() if name in RELEASED]


class ClassifierDropout(Value):
    """Our `classifier_dropout`: the official head of rows has none, the head of tokens looks in two places."""

    def read(self, official):
        name = official.head.official
        if name.endswith(ROWS):
            return {"classifier_dropout": 0.0}
        said = [official.entries[each] for each in DROPOUT_ENTRIES if official.entries.get(each) is not None]
        fallback = TOKEN_DROPOUT if name.endswith(TOKENS) else None
        return {"classifier_dropout": said[0] if said else fallback}

    def write(self, config, head):
        dropout = config.classifier_dropout
        if head.official.endswith(TOKENS):
            dropout = config.hidden_dropout if dropout is None else dropout
            dropout = None if dropout == TOKEN_DROPOUT else dropout
        if dropout is None or head.official.endswith(ROWS):
            return {}
        return {"classifier_dropout": dropout}
