"""Greedy search and sampling, as in the library's `_sample`: the same tokens, and the same random numbers.

The host of a GPU never waits for a token. It launches the next one, and reads some tokens late whether all rows have
ended; what was written after the end is cut off.

B rows, S tokens so far, R room of the buffers, V vocabulary.
"""

from collections import deque

import torch
from transformers.generation import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)

MOST_LATE = 8
"""Tokens that are launched after the last one of a text, at most; by hand."""
_BETWEEN = MOST_LATE // 2  # tokens from one question whether the text has ended to the next; an answer is read one late


class Sampling:
    """The rows of a batch, of which the steps hold the tokens, keys and values.

    Args:
        call: see `decoding`.
        steps: they stand after the prompt.
        scores: float32 [B, V] of the first new token.
    """

    def __init__(self, call, steps, scores):
        self._call, self._steps, self._scores = call, steps, scores
        self._unread: deque[_Late] = deque()
        self._random: deque[torch.Tensor] = deque(maxlen=2 * MOST_LATE + 1)  # states before each of the last tokens

    @torch.no_grad()
    def written(self):
        """All tokens [B, S]."""
        call, steps = self._call, self._steps
        start = call.input_ids.shape[1]
        for length in range(start, call.longest):
            if length > start:
                call.advance(steps, length, call.is_greedy)
            if length == start or not call.is_greedy:
                self._choose(length)
            if self._is_over(length - start):
                break
        while self._unread:
            self._had_ended(self._unread.popleft())
        count = int(steps.count)
        if call.streamer is not None:
            call.streamer.end()
        written = length + 1 - start
        if call.settings.do_sample and count < written:  # as if nothing had been drawn after the end
            _set_random(steps.ids.device, self._random[count - written])
        return steps.output[:, : start + count].clone()

    def _choose(self, length: int) -> None:
        """The token at this index, by the library's processors and criteria."""
        call, steps = self._call, self._steps
        if length > call.input_ids.shape[1]:
            assert steps.logits is not None
            self._scores = steps.logits[:, -1]
        if only_forbid(call.processors, length) and length > call.input_ids.shape[1]:
            scores = without_forbidden(self._scores.float(), steps.output[:, :length], call.processors)
        else:
            scores = call.processors(steps.output[:, :length], self._scores.to(copy=True, dtype=torch.float32))
        if call.settings.do_sample:
            self._random.append(_get_random(steps.ids.device))
            token = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        else:
            token = scores.argmax(-1)
        token = torch.where(steps.unfinished, token, steps.pad) if call.ends else token
        steps.count += steps.unfinished.any()
        steps.output[:, length] = token
        steps.ids.copy_(token[:, None])
        steps.unfinished &= ~call.criteria(steps.output[:, : length + 1], None)

    def _is_over(self, number: int) -> bool:
        """Whether the text is known to have ended, after this many tokens and one more."""
        call, steps = self._call, self._steps
        is_read = call.streamer is not None or bool(call.own_criteria)
        if is_read or (call.ends and (not call.is_late or number % _BETWEEN == 0)):
            tokens = None if call.streamer is None else steps.ids[:, 0]
            self._unread.append(_Late(steps.unfinished.any(), tokens))
        is_over = False
        while len(self._unread) > (0 if call.own_criteria or not call.is_late else 1) and not is_over:
            is_over = self._had_ended(self._unread.popleft())
        if is_over:
            self._unread.clear()  # what came after the end
        return is_over

    def _had_ended(self, late: "_Late") -> bool:
        """Wait for what was to be read: a streamer gets its tokens. Whether all rows had ended then."""
        late.wait()
        if late.tokens is not None:
            self._call.streamer.put(late.tokens)
        return not bool(late.goes_on)


class _Late:
    """What the host reads later: whether a row goes on, and tokens int [B] or None."""

    def __init__(self, goes_on, tokens):
        self.goes_on = goes_on.to("cpu", non_blocking=True)
        self.tokens = None if tokens is None else tokens.to("cpu", non_blocking=True, copy=True)
        self._event = torch.cuda.Event() if goes_on.device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def _get_random(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random(device, state) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


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


def choose(logits, state_ids, output, slot, unfinished, is_end, pad, count):
    """Greedy choice from logits [B, 1, V], written into `output` [B, R]; a row that has ended gets padding."""
    token = logits[:, -1].float().argmax(-1)
    token = torch.where(unfinished, token, pad)
    count.add_(unfinished.any())
    unfinished.logical_and_(~is_end[token])
    state_ids.copy_(token[:, None])
    output.index_copy_(1, slot + 1, token[:, None])


def log_sums(logits):
    """What `log_softmax` subtracts from logits [B, V], float32 [B, 1]."""
    return logits.float().logsumexp(-1, keepdim=True)
