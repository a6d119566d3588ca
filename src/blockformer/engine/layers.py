"""The layers of a stack over tokens that see no earlier ones (an encoder's, a prompt's) as functions for the compiler.

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
from .attention import is_in_use
from .compiled import Modules, functions_of
from .four_bit_rows import OrderedWeights
from .four_bits import MOST_PACKED_ROWS
from .linear import HALVES, is_quicker_widened, is_transformed
from .measure import is_enabled
from .onednn import PackedCopies
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
    """Keeps a layer's keys and values [1, K, N, D]."""

    def __init__(self):
        super().__init__(layers=[])
        self.keys_values: tuple = ()

    def update(self, key_states, value_states, *args, **kwargs):
        """Keep them; returns them."""
        self.keys_values = (key_states, value_states)
        return self.keys_values


class _Layer(nn.Module):
    """One layer over tokens [1, N, C] -> [1, N, C], and a decoder's keys and values."""

    def __init__(self, layer, config, is_causal):
        super().__init__()
        self.config, self.layer, self.is_causal = config, layer, is_causal

    def forward(self, hidden_states, lengths, position_bias, turns):
        """Run the layer.

        Args:
            lengths: int64 [n], of the sequences that stand one after the other in the row.
            position_bias: [1, H, L, L] or None.
            turns: what `rotate` turns by, two of [1, 1, N, D or less], or none.
        """
        layer = self.layer
        sequences = TracedSequences(lengths, position_bias)
        rotations = {layer.layer_type: tuple(turns)} if turns else {}
        tokens = torch.arange(hidden_states.shape[1])
        batch = Batch({layer.layer_type: None}, rotations, tokens, unpadding=sequences)
        cache = _Recorder() if self.is_causal else None
        hidden_states = layer.forward(hidden_states, None, position_bias, batch=batch, past_key_values=cache)
        return hidden_states if cache is None else (hidden_states, *cache.keys_values)


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
        self._ordered = OrderedWeights(stack)

    def __reduce__(self):
        return CompiledLayers, (None,), self._stack  # a copy finds its function on the disk

    def __setstate__(self, stack):
        self.__init__(stack)  # type: ignore[misc]

    @functools.cached_property
    def _functions(self):
        """Of each layer its function; None if one of them cannot be compiled."""
        stack = self._stack
        # What a prompt gains by packed weights is little beside holding those of a decoder twice.
        copies = None if stack.is_causal else PackedCopies()
        parts = [(_Layer(layer, stack.config, stack.is_causal), *self._example(layer)) for layer in stack.layers]
        return functions_of(parts, copies)

    def states(self, hidden_states, encoder_hidden_states, position_bias, batch, others: dict):
        """The states after all layers, or None if this call is nothing for a compiled function.

        Args:
            others: what else the layers are given, by name.
        """
        if not self._can_run(hidden_states, encoder_hidden_states, batch, others) or not self._parts.are_untouched():
            return None
        shape, types = hidden_states.shape, _layer_types(self._stack)
        turns = {name: batch.rotations.get(name, ()) for name in types}
        if batch.unpadding is None:
            lengths = [shape[1]] * shape[0]
            turns = {name: [_in_a_row(turn, shape[0]) for turn in pair] for name, pair in turns.items()}
        else:
            lengths = batch.unpadding.lengths
        if any(turn.shape[:3] != (1, 1, shape[0] * shape[1]) for pair in turns.values() for turn in pair):
            return None
        self._ordered.refresh()
        if self._functions is None:
            return None
        # A sequence of no tokens more: there are never fewer than the two that a dimension that varies must have.
        others_of = (torch.tensor([*lengths, 0]), position_bias)
        states, keys_values = hidden_states.reshape(1, -1, shape[2]), []
        for layer, function in zip(self._stack.layers, self._functions, strict=True):
            for _ in range(self._stack.passes):
                states = function(states, *others_of, list(turns[layer.layer_type]))
                if states is None:
                    return None
                if self._stack.is_causal:
                    states, *pair = states
                    keys_values.append(pair)
        if others.get("past_key_values") is not None:
            for layer_idx, pair in enumerate(keys_values):
                # [1, K, N, D] -> [B, K, T, D]
                pair = (each[0].unflatten(1, shape[:2]).transpose(0, 1) for each in pair)
                others["past_key_values"].update(*pair, layer_idx)
        states = states if self._stack.norm is None else self._stack.norm(states)
        return states.view(shape)

    def _can_run(self, hidden_states, encoder_hidden_states, batch, others: dict) -> bool:
        stack, weight = self._stack, self._stack.embed_tokens.weight
        if stack.training or stack._is_recording(others) or not is_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        if is_transformed():
            return False
        if (hidden_states.device.type, hidden_states.dtype) != ("cpu", weight.dtype) or hidden_states.requires_grad:
            return False
        tokens, has_bits = hidden_states.shape[0] * hidden_states.shape[1], getattr(stack.config, "linear_bits", None)
        if hidden_states.shape[2] != stack.config.hidden_size or tokens < (MOST_PACKED_ROWS + 1 if has_bits else 2):
            return False
        if encoder_hidden_states is not None or batch.encoder_mask is not None or batch.head_mask is not None:
            return False
        if stack.config.stack_sizes(stack.is_causal)[0] != len(stack.layers) * stack.passes:
            return False
        if any(mask is not None for mask in batch.masks.values()) or not is_in_use(stack.config):
            return False
        cache = others.get("past_key_values")
        if cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length() or batch.unpadding):
            return False
        told = ("position_ids", "past_key_values", "use_cache")
        return all(value is None or value is False or name in told for name, value in others.items())

    def _example(self, layer):
        """Example arguments for a layer, and which of their sizes vary."""
        config, weight = self._stack.config, self._stack.embed_tokens.weight
        tokens, lengths = 37, torch.tensor([11, 9, 17])
        states = torch.zeros(1, tokens, config.hidden_size, dtype=weight.dtype)
        bias = None
        if self._stack.relative_bias is not None:
            bias = self._stack.relative_bias(torch.arange(17), 17)
        rotations = rotations_of(self._stack.rotary_emb, config, states, torch.arange(tokens)[None])
        turns = [turn.clone() for turn in rotations.get(layer.layer_type, ())]
        varying = (
            {1: Dim.DYNAMIC},
            {0: Dim.DYNAMIC},
            None if bias is None else {2: Dim.DYNAMIC, 3: Dim.DYNAMIC},
            [{2: Dim.DYNAMIC}] * len(turns),
        )
        return (states, lengths, bias, turns), varying


def _in_a_row(turn, rows: int):
    """What a batch of rows turns by, [1 or B, 1, T, D], as that of one row [1, 1, B * T, D]."""
    turn = turn.expand(rows, -1, -1, -1)
    return turn.transpose(0, 1).reshape(1, 1, -1, turn.shape[3])


def can_compile(stack) -> bool:
    """Whether the stack's layers know nothing that the compiled function is not told of."""
    config = stack.config
    is_known = config.position_type in _POSITION_TYPES and not getattr(config, "relative_bias_per_layer", False)
    if not is_known or "sliding_attention" in config.layer_types:
        return False
    if not stack.is_causal:
        return config.attn_logit_softcapping is None
    # With experts, many tokens have products of their own.
    is_plain = stack.dtype in (torch.float32, torch.bfloat16) and stack.relative_bias is None
    is_plain = is_plain and config.attn_logit_softcapping is None and not stack.has_cross_attention
    return is_plain and not getattr(config, "num_experts", 0)


def gains(stack) -> bool:
    """Whether compiled layers are faster here: some of the engine's products are none that the compiler would call."""
    if stack.dtype in HALVES and is_quicker_widened(stack.dtype):
        return False
    return stack.dtype is torch.bfloat16 or not getattr(stack.config, "linear_bits", None)
