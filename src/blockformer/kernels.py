"""The fast paths, each beside the plain way that defines it. `BLOCKFORMER_FAST=0` turns all of them off.

B batch, T query length, S key length, H heads, K key/value heads, D head size, I inputs and O outputs of a linear
layer.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from transformers import AttentionInterface


def fast_paths_enabled() -> bool:
    """Whether fast paths may be taken: not where a graph is traced, and not with BLOCKFORMER_FAST=0."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return os.environ.get("BLOCKFORMER_FAST", "1") != "0" and not is_traced


def sdpa_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, unpadding=None, **kwargs):
    """The library's attention function "sdpa" or, on a CPU, what is quicker for these inputs and gives the same.

    Args:
        query: [B, H, T, D].
        key, value: [B, K, S, D].
        attention_mask: as the library's; with a unpadding one for each sequence, or None.
        unpadding: where the sequences of a packed row [1, H, N, D] lie; each attends to itself alone.

    Returns:
        The weighted values [B, T, H, D], and None for the probabilities.
    """
    if unpadding is not None:
        masks = itertools.repeat(None) if attention_mask is None else attention_mask
        sequences = zip(unpadding.split(query), unpadding.split(key), unpadding.split(value), masks, strict=False)
        outputs = [
            sdpa_attention(module, *sequence, scaling, dropout, **kwargs)[0]
            for sequence in sequences
            if sequence[0].shape[2]
        ]
        return torch.cat(outputs, dim=1), None
    if can_attend_grouped(query, key, kwargs):
        return attend_grouped(query, key, value, attention_mask, scaling, dropout), None
    if can_attend_in_blocks(query, key, value, attention_mask, module.is_causal, dropout, kwargs):
        return attend_in_blocks(query, key, value, scaling), None
    attend = AttentionInterface()["sdpa"]
    return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def can_attend_grouped(query, key, kwargs: dict) -> bool:
    """Whether `attend_grouped` takes these: one query token on the CPU whose heads share keys, and no paged cache."""
    is_grouped = query.shape[2] == 1 and query.shape[1] > key.shape[1]
    return is_grouped and query.device.type == "cpu" and kwargs.get("cache") is None and fast_paths_enabled()


def attend_grouped(query, key, value, attention_mask, scaling: float, dropout: float):
    """Scaled dot-product attention of one query token, with the heads that share a key as its queries.

    The same as repeating keys and values for each head, without reading them once a head.

    Args:
        query: [B, H, 1, D].
        key, value: [B, K, S, D].
        attention_mask: additive or boolean [1 or B, 1 or H, 1, S], or None.

    Returns:
        [B, 1, H, D].
    """
    batch, heads, _, size = query.shape
    folded = query.reshape(batch, key.shape[1], -1, size)  # [B, K, H / K, D]
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.shape[1] > 1:
            attention_mask = attention_mask.reshape(attention_mask.shape[0], key.shape[1], -1, key.shape[2])
    output = F.scaled_dot_product_attention(folded, key, value, attention_mask, dropout, scale=scaling)
    return output.reshape(batch, 1, heads, size)


def linear(module: nn.Module, states):
    """`module(states)`, by a quicker product where there is one. Shapes: [..., I] -> [..., O]."""
    product = _quick_product(module, states)
    return module(states) if product is None else product(states, module.weight, module.bias)


def quick_products(modules: Sequence, states) -> list | None:
    """`[module(states) for module in modules]` by quicker products; None where a module has none, or there is none.

    Shapes: [..., I] -> [..., O] each.
    """
    products = []
    for module in modules:
        if (product := _quick_product(module, states)) is None:
            return None
        products.append(product)
    if not products:
        return None
    return [product(states, each.weight, each.bias) for product, each in zip(products, modules, strict=True)]


def _quick_product(module: nn.Module, states) -> Callable | None:
    """What multiplies quicker than a call of the module, as a function of the states, its weight and its bias.

    Only a plain `nn.Linear` on the CPU has it. PyTorch's float32 product leaves about half of some processors' speed
    unused, oneDNN's does not. Both sum in float32, in another order. Many rows in float16 are multiplied in float32
    where the processor has no product of float16.
    """
    if type(states) is not torch.Tensor or states.dtype not in (torch.float32, torch.float16):
        return None
    if not fast_paths_enabled() or not _is_plain(module, states):
        return None
    weight = module.weight
    learns = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    if states.dtype is torch.float16:
        is_slow = not learns and states.shape[:-1].numel() >= _MANY_ROWS and is_measured("widened", _measure_widened)
        return _widened if is_slow else None
    if not _onednn_is_quicker():
        return None
    return _OneDnnLinear.apply if learns else _onednn


# So many rows of float16 are worth the weights in float32, of which so many elements are made at a time.
_MANY_ROWS, _WIDENED = 8, 1 << 24


def _widened(states, weight, bias):
    """The product of float16 by way of float32, a part of the outputs at a time."""
    states, size = states.float(), max(1, _WIDENED // weight.shape[1])
    parts = zip(weight.split(size), [None] * len(weight) if bias is None else bias.split(size), strict=False)
    product = product_for(states)
    outputs = [product(states, part.float(), each if each is None else each.float()).half() for part, each in parts]
    return torch.cat(outputs, dim=-1)


# Queries of one block, and the shortest text that is cut into such blocks.
_BLOCK, _LEAST_LENGTH = 128, 256


def can_attend_in_blocks(query, key, value, attention_mask, is_causal: bool, dropout: float, kwargs: dict) -> bool:
    """Whether `attend_in_blocks` takes these: a whole long text in bfloat16 on the CPU, with nothing to learn."""
    is_whole = is_causal and attention_mask is None and query.shape[2] == key.shape[2] >= _LEAST_LENGTH
    if not is_whole or query.dtype is not torch.bfloat16 or query.device.type != "cpu" or dropout:
        return False
    learns = torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value))
    return not learns and kwargs.get("cache") is None and fast_paths_enabled()


def attend_in_blocks(query, key, value, scaling: float):
    """Causal scaled dot-product attention, some queries at a time with the keys that they see, as plain products.

    Half of all scores are never computed, and the products of bfloat16 run at the processor's full speed, as those of
    PyTorch's flash attention do not.

    Args:
        query: [B, H, T, D].
        key, value: [B, K, T, D].

    Returns:
        [B, T, H, D].
    """
    batch, heads, length, size = query.shape
    rows = batch * key.shape[1]  # B * K; the H / K heads of a key are more queries
    keys, values = key.reshape(rows, length, size).transpose(1, 2), value.reshape(rows, length, size)
    future = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=query.device).triu(1)
    output, zero = query.new_empty(batch, length, heads, size), query.new_zeros(())
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        block = stop - start
        folded = query[:, :, start:stop].reshape(rows, -1, size)  # [B * K, H / K * block, D]
        scores = torch.baddbmm(zero, folded, keys[:, :, :stop], beta=0, alpha=scaling)
        scores.view(rows, -1, block, stop)[..., start:].masked_fill_(future[:block, :block], -torch.inf)
        weighted = torch.bmm(scores.softmax(-1), values[:, :stop]).view(batch, heads, block, size)
        output[:, start:stop] = weighted.transpose(1, 2)
    return output


# Elements whose float32 copies stay in a processor's cache.
_PIECE = 1 << 18


def can_norm_in_pieces(states, weight) -> bool:
    """Whether `norm_in_pieces` takes these: many contiguous states on the CPU, with nothing to learn."""
    if type(states) is not torch.Tensor or states.numel() < 4 * _PIECE or not states.is_contiguous():
        return False
    learns = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    return not learns and states.device.type == "cpu" and states.dtype is weight.dtype and fast_paths_enabled()


def norm_in_pieces(norm: Callable, states):
    """`norm(states)`, a norm over the last dimension, some rows at a time: its temporaries stay small. Same bits."""
    rows = states.view(-1, states.shape[-1])
    output = torch.empty_like(rows)
    count = max(1, _PIECE // rows.shape[-1])
    for piece, result in zip(rows.split(count), output.split(count), strict=True):
        result.copy_(norm(piece))
    return output.view(states.shape)


def is_transformed() -> bool:
    """Whether forward-mode differentiation or torch.func is at work; they know the plain operations only."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def is_plain_linear(module) -> bool:
    """Whether calling the module would be `F.linear` with its weights and nothing else: no wrapper, no hook."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and is_bare(module)


def is_bare(module) -> bool:
    """Whether calling the module is calling its class's `forward` and nothing else: no wrapper, no hook."""
    hooked = "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks
    hooked = hooked or module._backward_hooks or module._backward_pre_hooks
    return not hooked and not nn.modules.module._has_any_global_hook()


def _is_plain(module, states) -> bool:
    """Whether calling it would be `F.linear` of dense CPU tensors and nothing else."""
    if not is_plain_linear(module) or is_transformed():
        return False
    weight = module.weight
    is_dense = states.layout == weight.layout == torch.strided and weight.is_contiguous()
    is_on_cpu = weight.dtype is states.dtype and states.device.type == weight.device.type == "cpu"
    return is_dense and is_on_cpu and states.numel() > 0 and not torch.is_autocast_enabled("cpu")


def product_for(states) -> Callable:
    """What multiplies states like these by a matrix: `F.linear` or, where it is quicker, oneDNN's; same arguments."""
    is_float32 = states.dtype is torch.float32 and states.device.type == "cpu"
    return _onednn if is_float32 and fast_paths_enabled() and _onednn_is_quicker() else F.linear


def _onednn(states, weight, bias=None):
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    """y = x W^T + b with all three products of forward and backward by oneDNN."""

    @staticmethod
    def forward(ctx, states, weight, bias):
        ctx.save_for_backward(states, weight)
        ctx.has_bias = bias is not None
        return _onednn(states, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        states, weight = ctx.saved_tensors
        # For a gradient of the gradient the products must be differentiable themselves.
        product = F.linear if torch.is_grad_enabled() else _onednn
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), states.reshape(-1, states.shape[-1])
        grad_states = product(grad, weight.t(), None) if needs_states else None
        grad_weight = product(rows.t(), inputs.t(), None) if needs_weight else None
        return grad_states, grad_weight, rows.sum(0) if ctx.has_bias and needs_bias else None


_lock = threading.RLock()  # one measurement may ask for another
_verdicts: dict[str, bool] = {}


def is_measured(name: str, measure: Callable[[], bool]) -> bool:
    """What `measure` says, asked once in a process."""
    if name not in _verdicts:
        with _lock:
            if name not in _verdicts:
                _verdicts[name] = measure()
    return _verdicts[name]


def _onednn_is_quicker() -> bool:
    return is_measured("onednn", _measure_onednn)


@torch.no_grad()
def _measure_onednn() -> bool:
    """In about a tenth of a second: a product of the two, and that they agree."""
    states, weight = _random_matrices(3072)
    try:
        fast, plain = _onednn(states, weight, None), F.linear(states, weight)
        if not torch.allclose(fast, plain, rtol=1e-4, atol=1e-3):
            return False
        return is_quicker(lambda: _onednn(states, weight, None), lambda: F.linear(states, weight), rounds=12)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


@torch.no_grad()
def _measure_widened() -> bool:
    states, weight = (matrix.half() for matrix in _random_matrices(1024))
    return is_quicker(lambda: _widened(states, weight, None), lambda: F.linear(states, weight), rounds=4)


def _random_matrices(outputs: int):
    generator = torch.Generator().manual_seed(0)  # not the global one, by which the user draws
    with torch.device("cpu"):
        return [torch.randn(rows, 1024, generator=generator) for rows in (64, outputs)]


def is_quicker(work: Callable, other: Callable, rounds: int, share: float = 0.9) -> bool:
    """Whether `work` takes less than that share of the other's time, each at its best.

    They take turns, and the quickest round counts: what else the machine does in between decides nothing.
    """
    best = [float("inf")] * 2
    for _ in range(rounds):
        for index, each in enumerate((work, other)):
            start = time.perf_counter()
            each()
            best[index] = min(best[index], time.perf_counter() - start)
    return best[0] < share * best[1]
