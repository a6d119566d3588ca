"""The library's processors that only forbid tokens, without its copies of all scores.

R rows, S tokens so far, V vocabulary.
"""

import torch
from transformers.generation import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)


def only_forbid(processors, length: int) -> bool:
    """Whether processors do nothing after `length` tokens but forbid tokens: logits then serve as log-probabilities."""
    return all(
        type(each) in _FORBIDDING
        or (type(each) is ForcedBOSTokenLogitsProcessor and length != 1)
        or (type(each) is ForcedEOSTokenLogitsProcessor and length != each.max_length - 1)
        for each in processors
    )


def without_forbidden(logits, text, processors):
    """Logits [R, V], of which the forbidden ones become -inf in place, after texts [R, S]."""
    for each in processors:
        forbid = _FORBIDDING.get(type(each))
        logits = logits if forbid is None else forbid(each, logits, text)
    return logits


def _before_min_length(processor, logits, text):
    if text.shape[1] < processor.min_length:
        logits[:, processor.eos_token_id] = -torch.inf
    return logits


def _before_min_new_tokens(processor, logits, text):
    if text.shape[1] - processor.prompt_length_to_skip < processor.min_new_tokens:
        logits[:, processor.eos_token_id] = -torch.inf
    return logits


def _bad_words(processor, logits, text):
    if any(len(word) > 1 for word in processor.sequence_bias):
        return processor(text, logits)
    logits[:, [word[0] for word in processor.sequence_bias]] = -torch.inf
    return logits


_FORBIDDING = {
    MinLengthLogitsProcessor: _before_min_length,
    MinNewTokensLengthLogitsProcessor: _before_min_new_tokens,
    NoBadWordsLogitsProcessor: _bad_words,
    NoRepeatNGramLogitsProcessor: lambda processor, logits, text: processor(text, logits),
}
"""Processors for which logits are as good as log-probabilities, and how they are applied."""
