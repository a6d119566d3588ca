"""All layers of a stack over tokens that see no earlier ones (an encoder's, a prompt's) as a function for the compiler.

Rows are unpadded, so that one graph serves every batch: it knows tokens, and only attention knows sequences.

B batch, T padded length, N tokens of all rows, n sequences, L tokens of the longest, H heads, K key/value heads, D head
size, C hidden size.
"""

import functools

import torch
from torch import nn
from torch.export import Dim
from transformers.cache_utils import Cache, DynamicCache

from ..layer import Batch
from ..positions import rotations_of
from ..stack import Stack
from .compiled import CompiledFunction, Modules
from .measure import is_enabled, is_own_trace
from .sequences import TracedSequences

# Where the stack makes all position terms itself; a relative bias of all layers is one of its tensors.
_POSITION_TYPES = (
    "learned",
    "sinusoidal",
    "sinusoidal_halves",
    "sinusoidal_inclusive",
    "rotary",
    "relative_bias",
    "learned_relative_bias",
    "none",
)


class _Recorder(Cache):
    """Keeps the keys and values [1, K, N, D] of all layers."""

    def __init__(self):
        super().__init__(layers=[])
        self.keys, self.values = [], []

    def update(self, key_states, value_states, *args, **kwargs):
        """Keep them; returns them."""
        self.keys.append(key_states)
        self.values.append(value_states)
        return key_states, value_states


class _Layers(nn.Module):
    """Embedded tokens [1, N, C] to what the stack makes of them, [1, N, C], and a decoder's keys and values."""

    def __init__(self, stack):
        super().__init__()
        self.model = stack

    def forward(self, hidden_states, lengths, position_bias, rotations):
        """Run the layers and the final norm.

        Args:
            lengths: int64 [n], of the sequences that stand one after the other in the row.
            position_bias: [1, H, L, L] or None.
            rotations: what `rotate` turns by, each [1, 1, N, D or less], two for each layer type, or none.
        """
        stack = self.model
        pairs = zip(rotations[::2], rotations[1::2], strict=True)
        by_type = dict(zip(_layer_types(stack), pairs, strict=False))
        sequences = TracedSequences(lengths, position_bias)
        masks = dict.fromkeys(stack.config.layer_types)
        batch = Batch(masks, by_type, torch.arange(hidden_states.shape[1]), unpadding=sequences)
        cache = _Recorder() if stack.is_causal else None
        for layer in stack.layers:
            for _ in range(stack.passes):
                hidden_states = layer.forward(hidden_states, None, position_bias, batch=batch, past_key_values=cache)
        hidden_states = hidden_states if stack.norm is None else stack.norm(hidden_states)
        return hidden_states if cache is None else (hidden_states, cache.keys, cache.values)


def _layer_types(stack) -> list:
    return sorted(set(stack.config.layer_types))


class CompiledLayers:
    """The compiled layers of a stack.

    Args:
        stack: in evaluation mode and without gradients.
    """

    def __init__(self, stack):
        self._stack = stack
        self._parts = Modules(stack)

    def __reduce__(self):
        return CompiledLayers, (None,), self._stack  # a copy finds its function on the disk

    def __setstate__(self, stack):
        self.__init__(stack)  # type: ignore[misc]

    @functools.cached_property
    def _function(self):
        return CompiledFunction.of(_Layers(self._stack), *self._example())

    def states(self, hidden_states, encoder_hidden_states, position_bias, batch, others: dict):
        """The states after all layers, or None if this call is nothing for a compiled function.

        Args:
            others: what else the layers are given, by name.
        """
        if not self._can_run(hidden_states, encoder_hidden_states, batch, others) or not self._parts.are_untouched():
            return None
        shape = hidden_states.shape
        if batch.unpadding is None:
            lengths = [shape[1]] * shape[0]
            turns = [turn.expand(shape[0], -1, -1, -1) for turn in self._turns(batch)]
            turns = [turn.transpose(0, 1).reshape(1, 1, -1, turn.shape[3]) for turn in turns]
        else:
            lengths, turns = batch.unpadding.lengths, self._turns(batch)
        if any(turn.shape[:3] != (1, 1, shape[0] * shape[1]) for turn in turns):
            return None
        if self._function is None:
            return None
        # A sequence of no tokens more: there are never fewer than the two that a dimension that varies must have.
        output = self._function(
            hidden_states.reshape(1, -1, shape[2]),
            torch.tensor([*lengths, 0]),
            position_bias,
            [turn.contiguous() for turn in turns],
        )
        if output is None or not self._stack.is_causal:
            return None if output is None else output.view(shape)
        states, *keys_values = output
        cache = others.get("past_key_values")
        if cache is not None:
            for layer_idx, pair in enumerate(zip(*keys_values, strict=True)):
                # [1, K, N, D] -> [B, K, T, D]
                cache.update(*(each[0].unflatten(1, shape[:2]).transpose(0, 1) for each in pair), layer_idx)
        return states.view(shape)

    def _turns(self, batch) -> list:
        return [turn for name in _layer_types(self._stack) for turn in batch.rotations.get(name, ())]

    def _can_run(self, hidden_states, encoder_hidden_states, batch, others: dict) -> bool:
        stack, weight = self._stack, self._stack.embed_tokens.weight
        if stack.training or stack._is_recording(others) or not is_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        if (hidden_states.device.type, hidden_states.dtype) != ("cpu", weight.dtype) or hidden_states.requires_grad:
            return False
        if hidden_states.shape[2] != stack.config.hidden_size or hidden_states.shape[0] * hidden_states.shape[1] < 2:
            return False
        if encoder_hidden_states is not None or batch.encoder_mask is not None or batch.head_mask is not None:
            return False
        if any(mask is not None for mask in batch.masks.values()) or stack.config._attn_implementation != "sdpa":
            return False
        cache = others.get("past_key_values")
        if cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length() or batch.unpadding):
            return False
        told = ("position_ids", "past_key_values", "use_cache")
        return all(value is None or value is False or name in told for name, value in others.items())

    def _example(self):
        """Example arguments, and which of their sizes vary."""
        config, weight = self._stack.config, self._stack.embed_tokens.weight
        tokens, lengths = 37, torch.tensor([11, 9, 17])
        states = torch.zeros(1, tokens, config.hidden_size, dtype=weight.dtype)
        bias = None
        if self._stack.relative_bias is not None:
            bias = self._stack.relative_bias(torch.arange(17), 17)
        rotations = rotations_of(self._stack.rotary_emb, config, states, torch.arange(tokens)[None])
        turns = [turn.clone() for name in _layer_types(self._stack) for turn in rotations.get(name, ())]
        varying = (
            {1: Dim.DYNAMIC},
            {0: Dim.DYNAMIC},
            None if bias is None else {2: Dim.DYNAMIC, 3: Dim.DYNAMIC},
            [{2: Dim.DYNAMIC}] * len(turns),
        )
        return (states, lengths, bias, turns), varying


def can_compile(stack) -> bool:
    """Whether the stack's layers know nothing that the compiled function is not told of."""
    config = stack.config
    is_known = config.position_type in _POSITION_TYPES and not getattr(config, "relative_bias_per_layer", False)
    if not is_known or "sliding_attention" in config.layer_types:
        return False
    if not stack.is_causal:
        return config.attn_logit_softcapping is None
    # Measured for float32 alone; with experts, many tokens have products of their own.
    is_plain = stack.dtype is torch.float32 and stack.relative_bias is None
    is_plain = is_plain and config.attn_logit_softcapping is None and not stack.has_cross_attention
    return is_plain and not getattr(config, "num_experts", 0)


def plug_in() -> None:
    """Have this package's stacks take their compiled layers, once `prepare_for_inference` has made some."""
    run_layers = Stack._run_layers

    @functools.wraps(run_layers)
    def run_compiled_layers(self, hidden_states, encoder_hidden_states, position_bias, batch, **kwargs):
        compiled = None if is_own_trace() else self.__dict__.get("_compiled_layers")
        given = (hidden_states, encoder_hidden_states, position_bias, batch)
        states = None if compiled is None else compiled.states(*given, kwargs)
        return run_layers(self, *given, **kwargs) if states is None else states

    Stack._run_layers = run_compiled_layers  # type: ignore[method-assign]
