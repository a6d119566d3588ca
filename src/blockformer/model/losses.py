"""Losses. Each takes `num_items_in_batch`, so that gradient accumulation equals one large batch.

A loss covers all labels except -100, whatever a mask says: the same tokens that `Trainer` counts and divides by.

B batch, T length, V vocabulary.
"""

import torch
from torch.nn import functional as F

from .compat import is_readable

IGNORED = -100


def token_cross_entropy(logits, labels, num_items_in_batch=None, label_smoothing=0.0):
    """Cross-entropy over the tokens whose label is not -100, in float32 at least.

    Logits [..., V] and labels int [...] -> a scalar; see `averaged` for a call without a single label.

    Args:
        num_items_in_batch: what to divide the sum by: the count of labels over all the batches that one optimizer step
            accumulates, as `Trainer` gives it. None divides by this call's own count.
        label_smoothing: share of the probability that is spread evenly over all V classes.

    Raises:
        ValueError: a label that is neither a class nor -100, or another number of labels or another dtype.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.flatten().to(logits.device)
    if labels.shape != logits.shape[:1] or labels.dtype not in (torch.int64, torch.uint8):
        raise ValueError(f"pass {len(logits)} int64 labels, one per prediction, not {len(labels)} of {labels.dtype}.")
    check_labels(labels, logits.shape[-1])
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    return averaged(total, labels, num_items_in_batch)


def averaged(total, labels, num_items_in_batch=None):
    """A sum of losses, divided by `num_items_in_batch` or, if that is None, by the count of its labels.

    Without a single label it is 0, with zero gradients, if it has a gradient at all. Otherwise it is NaN, as in
    transformers: `Trainer` leaves NaN out of the mean that it reports of an evaluation, where 0 would count.
    """
    count = count_of(labels, num_items_in_batch, total.device)
    return total / (count + (count == 0) if total.requires_grad else count)


def count_of(labels, num_items_in_batch, device):
    """`num_items_in_batch` or, if that is None, this call's own count of labels."""
    if num_items_in_batch is None:
        return (labels != IGNORED).sum().to(device)
    return num_items_in_batch.to(device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch


def share_of_items(labels, num_items_in_batch, device):
    """The share of an optimizer step's labels that this call has; 1 where the step is only this call.

    A mean over something that `num_items_in_batch` does not count is weighted by it.
    """
    own, count = (count_of(labels, items, device) for items in (None, num_items_in_batch))
    return torch.where(own == count, 1.0, own / (count + (count == 0)))


def shifted(labels):
    """The inputs int [B, T] as labels, each for the token before."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def are_on_padding(labels, attention_mask) -> bool:
    """Whether any label int [B, T] stands where a mask [B, S] of 0 and 1 says padding; also if neither may be read."""
    if labels is None or not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        return False
    mask = attention_mask[:, -labels.shape[-1] :]
    if mask.shape != labels.shape:
        return False
    return not (is_readable(mask) and is_readable(labels)) or bool(((labels != IGNORED) & (mask == 0)).any())


def refuse_smoothing(label_smoothing: float, why: str) -> None:
    """Refuse `label_smoothing` for a loss that has none."""
    if label_smoothing:
        raise ValueError(f"label_smoothing={label_smoothing} needs labels of one class, and {why}: leave it out.")


def sequence_loss(logits, labels, config, num_items_in_batch=None, label_smoothing=0.0):
    """The loss of a sequence classifier, by `config.problem_type`, which the first labels set where it is None.

    Labels are int [B] (one class a row, which `label_smoothing` is for), float [B] or [B, num_labels] (regression: mean
    squared error), or float [B, num_labels] of 0 and 1 (several labels a row: binary cross-entropy).
    """
    if config.problem_type is None:  # saved with the model: by it a pipeline turns logits into scores
        usual = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        config.problem_type = "regression" if logits.shape[-1] == 1 else usual
    if config.problem_type == "single_label_classification":
        return token_cross_entropy(logits, labels.view(-1), num_items_in_batch, label_smoothing)
    refuse_smoothing(label_smoothing, "these are numbers")
    element_loss = F.mse_loss if config.problem_type == "regression" else F.binary_cross_entropy_with_logits
    if labels.numel() != logits.numel():
        raise ValueError(f"pass labels of {list(logits.shape)}, or one int64 class a row, not {list(labels.shape)}.")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    mean = element_loss(logits, labels.to(logits).view_as(logits))  # -100 is a value here, too
    return mean * share_of_items(labels, num_items_in_batch, mean.device)


def span_loss(start_logits, end_logits, start_positions, end_positions):
    """Mean of the cross-entropies of a span's first and last token.

    Logits [B, T], positions int [B]; a position outside the text is left out of the loss.
    """
    losses = []
    for logits, positions in ((start_logits, start_positions), (end_logits, end_positions)):
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
