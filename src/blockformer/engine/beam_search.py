"""Beam search by compiled steps, as in the library's `_beam_search`: the same texts and scores.

The best tokens are found in the logits themselves: their log-softmax, as large as the logits, is not written. Of the
keys and values, a beam that goes on stays where it is. Only a second continuation of the same beam is copied, into the
row of one that has ended, and of it only what the two do not share.

B sources, n beams of each, k candidates, S tokens so far, V vocabulary. Beams are in the order of their rows in the
buffers; the library has them in the order of their scores.
"""

import torch
from torch.nn import functional as F

from .sampling import only_forbid, without_forbidden

_NEVER = -1e9  # the library's score of what is not to be chosen
_BLOCK = 128  # logits of which the largest is found first


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
        self._running = torch.full((sources, beams), _NEVER, device=device)
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
            has_ended = steps.is_end[tokens] | (length + 1 >= call.longest)
            self._finish(scores, rows, tokens, has_ended, length)
            running, chosen = (scores + has_ended * _NEVER).topk(call.beams)
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
        subtracted = self._steps.parts.log_sums(logits)
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

    def _finish(self, scores, rows, tokens, has_ended, length: int) -> None:
        """Keep the best of the texts that have ended, of these candidates [B, k] and of the earlier ones."""
        settings, beams = self._call.settings, self._call.beams
        is_new = has_ended & (torch.arange(self._candidate_count, device=scores.device) < beams)
        if not is_new.any():
            return
        scores = scores / (length + 1 - self._start) ** settings.length_penalty
        is_full = self._is_finished.all(-1, keepdim=True) & (settings.early_stopping is True)
        for is_out in (is_full, ~self._can_improve, ~is_new):
            scores = scores + is_out * _NEVER
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
