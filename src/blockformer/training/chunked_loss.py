"""The loss of a large vocabulary in chunks, so that the logits of all tokens are never held at once.

N tokens with a label, C hidden size, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..model.language_model_head import finished
from ..model.losses import IGNORED, averaged, check_labels, token_cross_entropy
from ..watched import has_global_hook, is_bare, is_plain_linear, is_transformed
from .late_outputs import DeferredLogits

# Logits that may be held at once, 128 MiB in float32; on a CUDA device as many as a part of its free memory holds, up
# to 1 GiB: its matmuls are faster when they are large. By hand.
MAX_LOGITS, _MOST_ON_CUDA, _BYTES_A_LOGIT = 1 << 25, 1 << 28, 64
# Elements of a matmul's result that is made to be added to another dtype; by hand: 16 MiB.
_MAX_PRODUCT = 1 << 22


def loss_in_chunks(head, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing):
    """States [..., C] and labels int [...] or None -> logits [..., V] or None, and loss; None for the plain way.

    A loss in chunks never holds more than `MAX_LOGITS` logits at once. It is for a plain linear layer that nobody
    watches or changes: hooks, adapters and `torch.func` get the logits of all tokens at once, as they expect.

    Args:
        head: a `LanguageModelHead`.
        return_logits: True takes the loss from the logits of all tokens, False takes it in chunks and gives no logits.
            None takes it in chunks in training where the logits are many, and gives a `DeferredLogits`.
        num_items_in_batch, label_smoothing: see `losses.token_cross_entropy`.
    """
    if labels is None or return_logits or not _can_be_in_chunks(head.lm_head):
        return None
    is_deferred = return_logits is None
    if is_deferred and (not head.training or torch.compiler.is_compiling() or not is_plain_linear(head.lm_head)):
        return None
    if is_deferred and labels.numel() * head.lm_head.out_features <= MAX_LOGITS:
        return None
    states = head.before_head(hidden_states)  # of all tokens, since its modules may be watched
    bias = None if head.logits_bias is None else head.logits_bias.to(states.device)
    cap = head.config.final_logit_softcapping
    logits = DeferredLogits(states, head.lm_head, bias, cap) if is_deferred else None
    every_label = labels = labels.to(states.device)
    if states.device.type == "cpu" and not torch.compiler.is_compiling():
        labelled = labels != IGNORED  # elsewhere their number would be a synchronisation
        states, labels = states[labelled], labels[labelled]
    states, labels = states.flatten(0, -2), labels.flatten()  # [N, C], [N]
    loss = chunked_cross_entropy(head.lm_head, states, labels, num_items_in_batch, label_smoothing, bias, cap)
    if logits is not None and loss.requires_grad:
        given = (every_label, num_items_in_batch, label_smoothing)
        loss = _ThroughLogits.apply(loss, logits, lambda read: token_cross_entropy(read, *given), *logits.inputs)
    return logits, loss


def _can_be_in_chunks(head) -> bool:
    """Whether a head's logits may be computed some tokens at a time: by a plain linear layer, or without gradients.

    In a backward pass, an adapter may not be the one of the forward pass any more.
    """
    if torch.compiler.is_compiling():
        return is_plain_linear(head)
    if is_transformed() or has_global_hook():
        return False
    return is_plain_linear(head) or (not torch.is_grad_enabled() and isinstance(head, nn.Linear) and is_bare(head))


def chunked_cross_entropy(
    head, states, labels, num_items_in_batch=None, label_smoothing=0.0, logits_bias=None, cap=None
):
    """`token_cross_entropy(head(states) + logits_bias, labels, ...)`, never with more than `MAX_LOGITS` logits at once.

    The gradients are taken with the loss, while a chunk's logits are there, under autocast too. With a soft cap, and
    under `torch.compile`, each chunk's matmul is computed once more in the backward pass.

    Args:
        head: a plain linear layer from states [n, C] to logits [n, V]; without gradients also a prepared one.
        states: [N, C].
        labels: int [N], each 0 to V - 1 or -100, on the device of the states.
        num_items_in_batch, label_smoothing: see `token_cross_entropy`.
        logits_bias: [V], a buffer next to a head without a bias, or None.
        cap: soft cap of the logits, or None.
    """
    check_labels(labels, head.out_features)
    rows = max(1, _most_logits(states.device) // head.out_features)
    kind = states.device.type
    if torch.is_grad_enabled() and cap is None and not torch.compiler.is_compiling():
        bias = head.bias if logits_bias is None else logits_bias
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        with torch.autocast(kind, enabled=False):
            total = _LinearCrossEntropy.apply(states, head.weight, bias, labels, label_smoothing, rows, dtype)
            return averaged(total, labels, num_items_in_batch)
    total = torch.zeros((), dtype=_wide(states.dtype), device=states.device)
    for chunk in zip(states.split(rows), labels.split(rows), strict=True):
        total = total + checkpoint(_sum_of_chunk, head, *chunk, label_smoothing, logits_bias, cap, use_reentrant=False)
    return averaged(total, labels, num_items_in_batch)


class _ThroughLogits(torch.autograd.Function):
    """A loss in chunks, whose gradient goes through its `DeferredLogits` where somebody asks for theirs."""

    @staticmethod
    def forward(ctx, loss, logits, loss_of, *inputs):
        ctx.logits, ctx.loss_of = logits, loss_of
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        found = ctx.logits.gradients_through(ctx.loss_of, grad)
        return (grad, None, None, None, None, None) if found is None else (None, None, None, *found)


def _wide(dtype):
    """The dtype of a loss from logits of this dtype: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _most_logits(device) -> int:
    """How many logits may be held at once on this device."""
    if device.type != "cuda":
        return MAX_LOGITS
    free, _ = torch.cuda.mem_get_info(device)  # asks the driver, and does not wait for the device
    return max(MAX_LOGITS, min(_MOST_ON_CUDA, free // _BYTES_A_LOGIT))


def _sum_of_chunk(head, states, labels, label_smoothing, logits_bias, cap):
    logits = finished(head(states), logits_bias, cap)
    logits = logits.to(_wide(logits.dtype))
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of a linear head's logits, `rows` tokens at a time, with its gradients.

    A chunk's loss is `logsumexp(z) - z[label]`, its gradient `softmax(z) - onehot(label)`, both of logits z in float32
    at least, in which the gradients of weight and bias are summed, too. A token without a label adds nothing to either.
    Matmuls run in `dtype`, which is autocast's.
    """

    @staticmethod
    def forward(ctx, states, weight, bias, labels, label_smoothing, rows, dtype):
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.dtypes = [None if each is None else each.dtype for each in (states, weight, bias)]
        states, weight, bias = (None if each is None else each.to(dtype) for each in (states, weight, bias))
        grad_states = torch.zeros_like(states) if needs_states else None
        wide = _wide(dtype)
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        total = torch.zeros((), dtype=wide, device=states.device)
        for start in range(0, len(states), rows):
            chunk, own = states[start : start + rows], labels[start : start + rows, None]
            has_label, own = own != IGNORED, own.clamp(min=0)
            logits = F.linear(chunk, weight, bias)  # [n, V]
            scores = logits.to(wide)
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
                grad_bias += errors.sum(0, dtype=wide)
        ctx.grads = [grad_states, grad_weight, grad_bias]
        return total

    @staticmethod
    def backward(ctx, grad):
        # Gradients are on here with `create_graph`, of which `once_differentiable` looks only at `grad`.
        if ctx.grads is None or torch.is_grad_enabled():
            again = "for a second backward pass or second derivatives, call with return_logits=True"
            raise RuntimeError(f"this loss did not keep its logits: {again}.")
        grads, ctx.grads = ctx.grads, None
        own = (
            None if each is None else each.mul_(grad).to(dtype) for each, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return *own, None, None, None, None


def _add_product(total, left, right):
    """`total += left @ right` in the dtype of the total, whatever the dtype of the two. [V, C] += [V, n] @ [n, C]."""
    if left.dtype is total.dtype:
        total.addmm_(left, right)
        return
    rows = max(1, _MAX_PRODUCT // right.shape[-1])  # so that the matmul in the other dtype stays small
    for part, own in zip(total.split(rows), left.split(rows), strict=True):
        part += own @ right
