"""Losses. Each takes `num_items_in_batch`, so that gradient accumulation equals one large batch.

B batch, T length, V vocabulary.
"""

import torch
from torch.nn import functional as F

from .compat import is_readable

IGNORED = -100


def token_cross_entropy(logits, labels, num_items_in_batch=None, label_smoothing=0.0):
    """Cross-entropy over the tokens whose label is not -100, in float32.

    Logits [..., V] and labels int [...] -> a scalar; without a single label it is 0, with zero gradients.

    Args:
        num_items_in_batch: what to divide the sum by: the count of labels over all the batches that one optimizer step
            accumulates, as `Trainer` gives it. None divides by this call's own count.
        label_smoothing: share of the probability that is spread evenly over all V classes.

    Raises:
        ValueError: a label that is neither a class nor -100.
    """
    logits, labels = logits.float().flatten(0, -2), labels.flatten().to(logits.device)
    check_labels(labels, logits.shape[-1])
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    return total / divisor_of(labels, num_items_in_batch, total.device)


def divisor_of(labels, num_items_in_batch, device):
    """The divisor of a sum of losses: `num_items_in_batch` or this call's own count of labels, at least 1."""
    if num_items_in_batch is None:
        return (labels != IGNORED).sum().clamp(min=1)
    if torch.is_tensor(num_items_in_batch):
        return num_items_in_batch.to(device).clamp(min=1)
    return max(num_items_in_batch, 1)


def shifted(labels, attention_mask=None):
    """The inputs [B, T] as labels, each for the token before; padding is neither predicted nor predicts."""
    labels = F.pad(without_padding(labels, attention_mask), (0, 1), value=IGNORED)[..., 1:]
    return without_padding(labels, attention_mask)


def without_padding(labels, attention_mask):
    """Labels int [B, T] with -100 where a mask [B, T] of 0 and 1 says padding: nothing is learnt from padding.

    Other masks say nothing of single tokens; the labels are then given back as they are.
    """
    if labels is None or not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != labels.shape:
        return labels
    return labels.masked_fill(attention_mask.to(labels.device) == 0, IGNORED)


def sequence_loss(logits, labels, config, num_items_in_batch=None):
    """The loss of a sequence classifier, by `config.problem_type` or, where that is None, by the labels' form.

    Labels are int [B] (one class a row), float [B] or [B, num_labels] (regression: mean squared error), or float
    [B, num_labels] of 0 and 1 (several labels a row: binary cross-entropy); the last two have num_labels items a row.
    """
    labels = labels.to(logits.device)
    problem = config.problem_type or ("regression" if logits.shape[-1] == 1 else None)
    if problem == "single_label_classification" or (problem is None and not labels.is_floating_point()):
        return token_cross_entropy(logits, labels.view(-1), num_items_in_batch)
    element_loss = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    total = element_loss(logits.float(), labels.view_as(logits).float(), reduction="sum")
    items = labels.numel() if num_items_in_batch is None else num_items_in_batch
    return total / divisor_of(labels, items, total.device)


def span_loss(start_logits, end_logits, start_positions, end_positions):
    """Mean of the cross-entropies of a span's first and last token; None without both positions.

    Logits [B, T], positions int [B]; a position outside the text is left out of the loss.
    """
    if start_positions is None or end_positions is None:
        return None
    losses = []
    for logits, positions in ((start_logits, start_positions), (end_logits, end_positions)):
        positions = positions.view(-1).to(logits.device)
        outside = (positions < 0) | (positions >= logits.shape[-1])
        losses.append(token_cross_entropy(logits, positions.masked_fill(outside, IGNORED)))
    return sum(losses) / 2


def check_labels(labels, num_classes: int) -> None:
    """Refuse a label that is neither a class nor -100. Read on the CPU only, never while a graph is traced."""
    if not is_readable(labels) or labels.numel() == 0:
        return
    wrong = labels[((labels < 0) & (labels != IGNORED)) | (labels >= num_classes)]
    if wrong.numel():
        raise ValueError(f"labels holds {int(wrong[0])}: each must be a class from 0 to {num_classes - 1}, or -100.")
