"""Losses. Each takes `num_items_in_batch`, so that gradient accumulation equals one large batch."""

import torch
from torch.nn import functional as F

IGNORED = -100


def token_cross_entropy(logits, labels, num_items_in_batch=None):
    """Cross-entropy over the tokens whose label is not -100, in float32.

    Args:
        logits: [..., V].
        labels: int [...], each 0 to V - 1 or -100.
        num_items_in_batch: what to divide the sum by: the count of labels over all the batches that one optimizer step
            accumulates, as `Trainer` gives it. None divides by this call's own count.

    Returns:
        A scalar. Without a single label it is 0, with zero gradients.

    Raises:
        ValueError: a label that is no class.
    """
    logits, labels = logits.float().flatten(0, -2), labels.flatten().to(logits.device)
    check_labels(labels, logits.shape[-1])
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORED).sum().clamp(min=1)
    elif torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device).clamp(min=1)
    else:
        num_items_in_batch = max(num_items_in_batch, 1)
    return total / num_items_in_batch


def next_token_cross_entropy(logits, labels, num_items_in_batch=None, shift_labels=None, attention_mask=None):
    """Each token's cross-entropy for the one after it.

    Args:
        logits: [B, T, V].
        labels: int [B, T], the inputs themselves; the shift is done here.
        shift_labels: int [B, T], already shifted, instead of `labels` (sequence-parallel training).
        attention_mask: [B, T] of 0 and 1: padding is neither predicted nor predicts.
    """
    if shift_labels is None:
        shift_labels = F.pad(without_padding(labels, attention_mask), (0, 1), value=IGNORED)[..., 1:]
    return token_cross_entropy(logits, without_padding(shift_labels, attention_mask), num_items_in_batch)


def without_padding(labels, attention_mask):
    """Labels int [B, T] with -100 where a mask [B, T] of 0 and 1 says padding: nothing is learnt from padding.

    Other masks say nothing of single tokens; the labels are then given back as they are.
    """
    if labels is None or not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != labels.shape:
        return labels
    return labels.masked_fill(attention_mask.to(labels.device) == 0, IGNORED)


def sequence_loss(logits, labels, config, num_items_in_batch=None):
    """The loss of a sequence classifier, by `config.problem_type` or, where that is None, by the labels' form.

    Args:
        logits: [B, num_labels].
        labels: int [B] (one class a row), float [B] or [B, num_labels] (regression: mean squared error), or float
            [B, num_labels] of 0 and 1 (several labels a row: binary cross-entropy).
    """
    labels = labels.to(logits.device)
    problem = config.problem_type or _problem_of(labels, logits.shape[-1])
    if problem == "regression":
        return F.mse_loss(logits.float(), labels.view_as(logits).float())
    if problem == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
    return token_cross_entropy(logits, labels.view(-1), num_items_in_batch)


def span_loss(start_logits, end_logits, start_positions, end_positions):
    """Mean of the cross-entropies of a span's first and last token.

    Args:
        start_logits, end_logits: [B, T].
        start_positions, end_positions: int [B]; a position outside the text is left out of the loss.
    """
    length = start_logits.shape[-1]

    def one_end(logits, positions):
        positions = positions.view(-1).to(logits.device)
        inside = (positions >= 0) & (positions < length)
        return token_cross_entropy(logits, positions.masked_fill(~inside, IGNORED))

    return (one_end(start_logits, start_positions) + one_end(end_logits, end_positions)) / 2


def _problem_of(labels, num_labels: int) -> str:
    if num_labels == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def check_labels(labels, num_classes: int) -> None:
    """Refuse a label that is neither a class nor -100. Read on the CPU only, never while a graph is traced."""
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or labels.numel() == 0:
        return
    wrong = labels[((labels < 0) & (labels != IGNORED)) | (labels >= num_classes)]
    if wrong.numel():
        raise ValueError(f"labels holds {int(wrong[0])}: each must be a class from 0 to {num_classes - 1}, or -100.")
