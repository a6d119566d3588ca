"""Losses. Each takes `num_items_in_batch`, so that gradient accumulation equals one large batch.

N tokens with a label, C hidden size, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORED = -100
# Logits that may be held at once: 128 MiB in float32.
MAX_LOGITS = 1 << 25
# Elements of a product that is made to be added to another dtype.
_MAX_PRODUCT = 1 << 22


def token_cross_entropy(logits, labels, num_items_in_batch=None, label_smoothing=0.0):
    """Cross-entropy over the tokens whose label is not -100, in float32.

    Args:
        logits: [..., V].
        labels: int [...], each 0 to V - 1 or -100.
        num_items_in_batch: what to divide the sum by: the count of labels over all the batches that one optimizer step
            accumulates, as `Trainer` gives it. None divides by this call's own count.
        label_smoothing: share of the probability that is spread evenly over all V classes.

    Returns:
        A scalar. Without a single label it is 0, with zero gradients.

    Raises:
        ValueError: a label that is no class.
    """
    logits, labels = logits.float().flatten(0, -2), labels.flatten().to(logits.device)
    check_labels(labels, logits.shape[-1])
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    return total / _divisor(labels, num_items_in_batch, total.device)


def _divisor(labels, num_items_in_batch, device):
    if num_items_in_batch is None:
        return (labels != IGNORED).sum().clamp(min=1)
    if torch.is_tensor(num_items_in_batch):
        return num_items_in_batch.to(device).clamp(min=1)
    return max(num_items_in_batch, 1)


def are_many(num_tokens: int, head) -> bool:
    """Whether the logits of so many tokens are too many to be held at once."""
    return num_tokens * head.out_features > MAX_LOGITS


def chunked_cross_entropy(head, states, labels, num_items_in_batch=None, label_smoothing=0.0, logits_bias=None):
    """`token_cross_entropy(head(states) + logits_bias, labels, ...)`, never with more than `MAX_LOGITS` logits at once.

    The gradients of a plain linear head are taken with the loss, while a chunk's logits are there. Any other head (with
    adapters, hooks, quantized, sharded), and any head under `torch.compile`, runs once more for each chunk in the
    backward pass.

    Args:
        head: a module from states [n, C] to logits [n, V].
        states: [N, C].
        labels: int [N], each 0 to V - 1 or -100, on the device of the states.
        num_items_in_batch, label_smoothing: see `token_cross_entropy`.
        logits_bias: [V], a buffer beside a head without a bias, or None.
    """
    check_labels(labels, head.out_features)
    rows = max(1, MAX_LOGITS // head.out_features)
    divisor = _divisor(labels, num_items_in_batch, states.device)
    is_plain = _is_plain_linear(head) and not torch.is_autocast_enabled(states.device.type)
    if torch.is_grad_enabled() and is_plain and not torch.compiler.is_compiling():
        bias = head.bias if logits_bias is None else logits_bias
        return _LinearCrossEntropy.apply(states, head.weight, bias, labels, label_smoothing, rows) / divisor
    total = torch.zeros((), device=states.device)
    for chunk in zip(states.split(rows), labels.split(rows), strict=True):
        total = total + checkpoint(_sum_of_chunk, head, *chunk, label_smoothing, logits_bias, use_reentrant=False)
    return total / divisor


def _sum_of_chunk(head, states, labels, label_smoothing, logits_bias):
    logits = head(states)
    logits = (logits if logits_bias is None else logits + logits_bias).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)


def _is_plain_linear(head) -> bool:
    """Whether calling the head would be `F.linear` with its weights and nothing else: no wrapper, no hook."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    is_linear = type(head) is nn.Linear and type(head.weight) is nn.Parameter
    return is_linear and "forward" not in vars(head) and not any(hooks)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of a linear head's logits, `rows` tokens at a time, with its gradients.

    A chunk's loss is `logsumexp(z) - z[label]`, its gradient `softmax(z) - onehot(label)`, both of float32 logits z. A
    token without a label adds nothing to either. The gradients of weight and bias are summed in float32.
    """

    @staticmethod
    def forward(ctx, states, weight, bias, labels, label_smoothing, rows):
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_states = torch.zeros_like(states) if needs_states else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        total = torch.zeros((), device=states.device)
        for start in range(0, len(states), rows):
            chunk, own = states[start : start + rows], labels[start : start + rows, None]
            has_label, own = own != IGNORED, own.clamp(min=0)
            logits = F.linear(chunk, weight, bias)  # [n, V]
            scores = logits.float()
            expected = scores.gather(-1, own)
            if label_smoothing:
                expected = (1 - label_smoothing) * expected + label_smoothing * scores.mean(-1, keepdim=True)
            largest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(largest).exp_()
            sums = weights.sum(-1, keepdim=True)
            total += torch.where(has_label, largest + sums.log() - expected, 0).sum()
            errors = weights.div_(sums)
            if label_smoothing:
                errors -= label_smoothing / errors.shape[-1]
            errors.scatter_add_(-1, own, errors.new_full(own.shape, label_smoothing - 1))
            errors.masked_fill_(~has_label, 0)
            errors = errors if logits is scores else logits.copy_(errors)
            if grad_states is not None:
                grad_states[start : start + rows] = errors @ weight
            if grad_weight is not None:
                _add_product(grad_weight, errors.t(), chunk)
            if grad_bias is not None:
                grad_bias += errors.sum(0, dtype=torch.float32)
        ctx.grads = [grad_states, grad_weight, grad_bias]
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if ctx.grads is None:
            raise RuntimeError("this loss kept no logits: for a second backward pass, call with return_logits=True.")
        grads, ctx.grads = ctx.grads, None
        return *(None if own is None else own.mul_(grad).to(ctx.dtype) for own in grads), None, None, None


def _add_product(total, left, right):
    """`total += left @ right` in the float32 of the total, whatever the dtype of the two. [V, C] += [V, n] @ [n, C]."""
    if left.dtype is total.dtype:
        total.addmm_(left, right)
        return
    rows = max(1, _MAX_PRODUCT // right.shape[-1])  # so that the product in the other dtype stays small
    for part, own in zip(total.split(rows), left.split(rows), strict=True):
        part += own @ right


def shifted(labels, attention_mask=None):
    """Each token's label for the one after it, the last one's -100; padding is neither predicted nor predicts.

    Args:
        labels: int [B, T], the inputs themselves.
        attention_mask: [B, T] of 0 and 1, or None.
    """
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

    Args:
        logits: [B, num_labels].
        labels: int [B] (one class a row), float [B] or [B, num_labels] (regression: mean squared error), or float
            [B, num_labels] of 0 and 1 (several labels a row: binary cross-entropy).
        num_items_in_batch: see `token_cross_entropy`; the last two forms have num_labels items a row.
    """
    labels = labels.to(logits.device)
    problem = config.problem_type or ("regression" if logits.shape[-1] == 1 else None)
    if problem == "single_label_classification" or (problem is None and not labels.is_floating_point()):
        return token_cross_entropy(logits, labels.view(-1), num_items_in_batch)
    element_loss = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    total = element_loss(logits.float(), labels.view_as(logits).float(), reduction="sum")
    items = labels.numel() if num_items_in_batch is None else num_items_in_batch
    return total / _divisor(labels, items, total.device)


def share_of_items(labels, num_items_in_batch):
    """The share of an optimizer step's labels that this call has; 1 where the step is this call alone.

    A loss that is averaged over something `num_items_in_batch` does not count is weighted by it.
    """
    if num_items_in_batch is None:
        return 1.0
    return (labels != IGNORED).sum() / _divisor(labels, num_items_in_batch, labels.device)


def span_loss(start_logits, end_logits, start_positions, end_positions):
    """Mean of the cross-entropies of a span's first and last token; None without both positions.

    Args:
        start_logits, end_logits: [B, T].
        start_positions, end_positions: int [B]; a position outside the text is left out of the loss.
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
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or labels.numel() == 0:
        return
    wrong = labels[((labels < 0) & (labels != IGNORED)) | (labels >= num_classes)]
    if wrong.numel():
        raise ValueError(f"labels holds {int(wrong[0])}: each must be a class from 0 to {num_classes - 1}, or -100.")
