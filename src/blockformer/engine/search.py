"""How a text goes on: greedy search, sampling and beams, as in the library's `_sample` and `_beam_search`.

The tokens and random numbers are the same. The host of a GPU never waits for a token. It launches the next one, and
reads some tokens late whether all rows have ended; what was written after the end is cut off.

The best tokens of beams are found in the logits themselves: their log-softmax, as large as the logits, is not written.
Of the keys and values, a beam that goes on stays where it is. Only a second continuation of the same beam is copied,
into the row of one that has ended, and of it only what the two do not share.

B rows or sources, n beams of a source, k candidates, S tokens so far, R room of the buffers, V vocabulary. Beams are in
the order of their rows in the buffers; the library has them in the order of their scores.
"""

from collections import deque

import torch
from torch.nn import functional as F
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
_NEVER = -1e9  # the library's score of what is not to be chosen
_BLOCK = 128  # logits of which the largest is found first; by hand


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
                call.advance(steps, length)
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
        text = steps.output[:, :length]
        scores = self._scores.to(copy=True, dtype=torch.float32)  # a hook may have kept the logits
        if only_forbid(call.processors, length) and length > call.input_ids.shape[1]:
            scores = without_forbidden(scores, text, call.processors)
        else:
            scores = call.processors(call.shown(text), scores)
        if call.settings.do_sample:
            self._random.append(_get_random(steps.ids.device))
            token = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        else:
            token = scores.argmax(-1)
        token = torch.where(steps.unfinished, token, steps.pad) if call.pads_ended else token
        steps.count += steps.unfinished.any()
        steps.output[:, length] = token
        steps.ids.copy_(token[:, None])
        steps.unfinished &= ~call.criteria(call.shown(steps.output[:, : length + 1]), None)

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


class BeamSearch:
    """The beams of a batch, of which the steps hold the keys and values.

    Attributes:
        scores: float32 [B, n], with the length penalty, of the finished texts, best first.

    Args:
        call: see `decoding`; its rows are B * n.
        steps: they stand after the prompt.
        logits: float32 [B * n, V] of the first new token.
    """

    def __init__(self, call, steps, logits):
        self._call, self._steps, self._logits = call, steps, logits
        settings, beams = call.settings, call.beams
        ends = settings._eos_token_tensor
        self._candidate_count = max(2, 1 + (0 if ends is None else len(ends))) * beams
        self._fill = -1 if ends is None else (call.pad or int(ends[0]))
        self._text = call.input_ids.unflatten(0, (-1, beams))
        self._start, sources, device = self._text.shape[2], len(self._text), logits.device
        # All scores are float32, whatever the default dtype is.
        self._running = torch.full((sources, beams), _NEVER, dtype=torch.float32, device=device)
        self._running[:, 0] = 0  # all beams are equal at first
        self._by_rank = torch.arange(beams, device=device).repeat(sources, 1)  # the row of the best beam, and so on
        self._finished, self._lengths = self._text, torch.zeros_like(self._by_rank)
        self.scores = torch.full_like(self._running, _NEVER)
        self._is_finished = torch.zeros_like(self._running, dtype=torch.bool)
        self._can_improve = torch.ones(sources, 1, dtype=torch.bool, device=device)
        # How many first tokens any two beams of a source have in common.
        self._shared = [[[self._start] * beams for _ in range(beams)] for _ in range(sources)]

    @torch.no_grad()
    def written(self):
        """The best texts [B * r, S] of each source."""
        call, steps = self._call, self._steps
        for length in range(self._start, call.longest):
            if length > self._start:
                call.advance(steps, length)
                self._logits = steps.logits[:, -1].float()
            scores, rows, tokens = self._candidates(length)
            has_ended = self._have_ended(rows, tokens, length)
            self._finish(scores, rows, tokens, has_ended, length)
            running, chosen = (scores + has_ended.float() * _NEVER).topk(call.beams)
            if self._is_over(running, length) or bool(has_ended.all()):
                break
            self._go_on(running, rows.gather(1, chosen), tokens.gather(1, chosen), length)
        count = call.settings.num_return_sequences
        length = self._start + int(self._lengths[:, :count].max())
        return self._finished[:, :count, :length].flatten(0, 1)

    def _candidates(self, length: int):
        """The best continuations [B, k] of each source, best first: scores, rows of their beams, and tokens."""
        call, logits = self._call, self._logits
        if length == self._start or not only_forbid(call.processors, length):
            return self._processed()
        subtracted = logits.logsumexp(-1, keepdim=True)  # by log_softmax
        logits = without_forbidden(logits, self._text.flatten(0, 1), call.processors)
        values, tokens = _largest(logits, min(self._candidate_count, logits.shape[1]))
        scores = (values - subtracted).unflatten(0, (-1, call.beams)) + self._running[:, :, None]
        best, index = scores.flatten(1).topk(self._candidate_count)
        return best, index // values.shape[1], tokens.unflatten(0, (-1, call.beams)).flatten(1).gather(1, index)

    def _processed(self):
        """As `_candidates`, by way of all log-probabilities, with beams in the library's order."""
        call, beams = self._call, self._call.beams
        order = self._by_rank + beams * torch.arange(len(self._by_rank), device=self._logits.device)[:, None]
        text, scores = self._text.flatten(0, 1)[order.flatten()], self._logits.log_softmax(-1)[order.flatten()]
        scores = call.processors(text, scores).unflatten(0, (-1, beams))
        scores = scores + self._running.gather(1, self._by_rank)[:, :, None]
        best, index = scores.flatten(1).topk(self._candidate_count)
        vocabulary = scores.shape[2]
        return best, self._by_rank.gather(1, index // vocabulary), index % vocabulary

    def _have_ended(self, rows, tokens, length: int):
        """Whether each of these candidates [B, k] ends its text, by the library's criteria and by the caller's."""
        call = self._call
        has_ended = self._steps.is_end[tokens] | (length + 1 >= call.longest)
        if not call.own_criteria:
            return has_ended
        texts = self._longer(rows, tokens).flatten(0, 1)
        return has_ended | call.criteria(texts, None).view_as(tokens)

    def _finish(self, scores, rows, tokens, has_ended, length: int) -> None:
        """Keep the best of the texts that have ended, of these candidates [B, k] and of the earlier ones."""
        settings, beams = self._call.settings, self._call.beams
        is_new = has_ended & (torch.arange(self._candidate_count, device=scores.device) < beams)
        if not is_new.any():
            return
        scores = scores / (length + 1 - self._start) ** settings.length_penalty
        is_full = self._is_finished.all(-1, keepdim=True) & (settings.early_stopping is True)
        for is_out in (is_full, ~self._can_improve, ~is_new):
            scores = scores + is_out.float() * _NEVER
        earlier = F.pad(self._finished, (0, length + 1 - self._finished.shape[2]), value=self._fill)
        self.scores, best = torch.cat([self.scores, scores], 1).topk(beams)
        self._finished = _chosen(torch.cat([earlier, self._longer(rows, tokens)], 1), best)
        lengths = torch.full_like(tokens, length + 1 - self._start)
        self._lengths = torch.cat([self._lengths, lengths], 1).gather(1, best)
        self._is_finished = torch.cat([self._is_finished, is_new], 1).gather(1, best)

    def _is_over(self, running, length: int) -> bool:
        """Whether no beam, of scores [B, n] with the new token, can become better than the finished texts."""
        settings = self._call.settings
        longest = length + 1
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            longest = settings.max_length
        best = running[:, :1] / (longest - self._start) ** settings.length_penalty
        worst = torch.where(self._is_finished, self.scores.amin(1, keepdim=True), _NEVER)
        self._can_improve = self._can_improve & (best > worst).any(1, keepdim=True)
        return not self._can_improve.any() or (settings.early_stopping is True and bool(self._is_finished.all()))

    def _go_on(self, running, parents, tokens, length: int) -> None:
        """Continue beams, best first: scores, rows of their parents, and new tokens, all [B, n]."""
        beams, copied, rows = self._call.beams, [], []
        for source, own in enumerate(parents.tolist()):
            shared, free, taken = self._shared[source], [row for row in range(beams) if row not in own], []
            for parent in own:
                row = parent
                if parent in taken:
                    row = free.pop()
                    if shared[parent][row] < length:
                        copied.append((source * beams + parent, source * beams + row, shared[parent][row]))
                    shared[row] = list(shared[parent])
                    for other, number in zip(shared, shared[row], strict=True):
                        other[row] = number
                    shared[row][parent] = shared[parent][row] = shared[row][row] = length
                taken.append(row)
            rows.append(taken)
        self._steps.copy_rows(copied, length)
        self._by_rank = torch.tensor(rows, device=parents.device)
        rank = self._by_rank.argsort(1)
        self._running, tokens = running.gather(1, rank), tokens.gather(1, rank)
        self._text = self._longer(parents.gather(1, rank), tokens)
        self._steps.ids.copy_(tokens.view(-1, 1))

    def _longer(self, rows, tokens):
        """Texts [B, k, S + 1]: of beams int [B, k], with one more token int [B, k] each."""
        return torch.cat([_chosen(self._text, rows), tokens[:, :, None]], 2)


def _chosen(texts, index):
    """Of texts [B, m, S] those at int [B, k]."""
    return texts.gather(1, index[:, :, None].expand(-1, -1, texts.shape[2]))


def _largest(logits, count: int):
    """As `topk(count)` of logits [R, V], by way of the largest of each block: a block that holds one is among these."""
    number = logits.shape[1] // _BLOCK
    if number < 2 * count:
        return logits.topk(count)
    blocks, rest = logits[:, : number * _BLOCK].unflatten(1, (number, _BLOCK)), logits[:, number * _BLOCK :]
    chosen = blocks.amax(-1).topk(count)[1]
    candidates = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    tokens = (chosen[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    others = torch.arange(number * _BLOCK, logits.shape[1], device=logits.device).expand(len(logits), -1)
    values, index = torch.cat([candidates, rest], 1).topk(count)
    return values, torch.cat([tokens, others], 1).gather(1, index)


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
    return _without_ends(processor, logits) if text.shape[1] < processor.min_length else logits


def _before_min_new_tokens(processor, logits, text):
    is_short = text.shape[1] - processor.prompt_length_to_skip < processor.min_new_tokens
    return _without_ends(processor, logits) if is_short else logits


def _without_ends(processor, logits):
    ends = processor.eos_token_id
    own = ends[(ends >= 0) & (ends < logits.shape[1])]  # the library takes ends that no vocabulary has
    logits[:, own] = -torch.inf
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
