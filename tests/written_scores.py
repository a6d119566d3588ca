"""The scores by which a model's `generate` writes tokens, where the first one is known beforehand."""

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class _Scores(LogitsProcessor):
    """Keeps the scores of each new token, and has the first one be `tokens`."""

    def __init__(self, tokens):
        self.tokens, self.seen = tokens, []

    def __call__(self, input_ids, scores):
        self.seen.append(scores.clone())
        forced = torch.full_like(scores, -torch.inf).scatter(1, self.tokens[:, None], 0.0)
        return forced if len(self.seen) == 1 else scores


def scores_of_two(model, ids):
    """Scores [B, V] of a decoder after all but the last of the tokens [B, T], and after all of them."""
    scores = _Scores(ids[:, -1])
    given = {"attention_mask": torch.ones_like(ids[:, :-1]), "eos_token_id": None, "do_sample": False}
    model.generate(ids[:, :-1], max_new_tokens=2, logits_processor=LogitsProcessorList([scores]), **given)
    return scores.seen
