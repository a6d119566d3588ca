"""The layers of a stack over tokens that see no earlier ones (an encoder's, a prompt's) as functions for the compiler.

Rows are unpadded, so that one graph serves every batch: it knows tokens, and only attention knows sequences.

B batch, T padded length, N tokens of all rows, n sequences, L tokens of the longest, H heads, K key/value heads, D head
size, C hidden size.
"""

import functools
import threading

import torch
from torch import nn
from torch.export import Dim
from transformers.cache_utils import Cache, DynamicCache

from ..model.axes import BLOCKS
from ..model.layer import LayerInputs
from ..model.positions import rotations_of
from .attention import is_in_use
from .compiled import Modules, functions_of
from .fallbacks import NO_CODE, OTHER_WEIGHTS, Fallbacks, Uncompiled
from .four_bit_rows import OrderedWeights
from .four_bits import MOST_PACKED_ROWS
from .linear import HALVES, is_quicker_widened, is_transformed
from .measure import is_enabled
from .onednn import PackedCopies
from .sequences import TracedSequences
from .unpadding import Unpadding, is_recording, unpadding_in

# Where the stack makes all position terms itself, as it does of a block from outside; a relative bias of all layers is
# one of its tensors.
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

    def forward(self, hidden_states, lengths, position_bias, cos_sin):
        """Run the layer.

        Args:
            lengths: int64 [n], of the sequences that stand one after the other in the row.
            position_bias: [1, H, L, L] or None.
            cos_sin: cosines and signed sines for `rotate`, two of [1, 1, N, D or less], or none.
        """
        layer = self.layer
        mask = TracedSequences(lengths, position_bias)
        rotations = {layer.layer_type: tuple(cos_sin)} if cos_sin else {}
        tokens = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        layer_inputs = LayerInputs({}, rotations, tokens)
        cache = _Recorder() if self.is_causal else None
        hidden_states = layer.forward(hidden_states, None, mask, layer_inputs=layer_inputs, past_key_values=cache)
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
        # A prompt gains little by packed weights, and a decoder would hold its weights twice for it.
        self._ordered, self._copies = OrderedWeights(stack), PackedCopies()
        self._lock = threading.Lock()  # of this stack: others need not wait for its compiler

    def __reduce__(self):
        return CompiledLayers, (None,), self._stack  # a copy finds its function on the disk

    def __setstate__(self, stack):
        self.__init__(stack)  # type: ignore[misc]

    @functools.cached_property
    def fallbacks(self) -> Fallbacks:
        """Why calls ran uncompiled."""
        return Fallbacks("a prompt" if self._stack.is_causal else "an encoder's layers")

    def _made_functions(self):
        """Of each layer its function; None if one of them cannot be compiled."""
        with self._lock:
            if "_functions" not in vars(self):
                stack, copies = self._stack, None if self._stack.is_causal else self._copies
                layers = [_Layer(layer, stack.config, stack.is_causal) for layer in stack.layers]
                with torch.device("cpu"):
                    parts = [(each, *self._example(each.layer)) for each in layers]
                self._functions = functions_of(parts, copies)
        return self._functions

    def bytes_of_copies(self) -> int:
        """Of weights in oneDNN's layout, held in addition to the plain ones."""
        return self._copies.nbytes

    def states(self, hidden_states, encoder_hidden_states, layer_inputs, others: dict):
        """The states after all layers, or None if this call is nothing for a compiled function.

        Args:
            others: what else the layers are given, by name.
        """
        if not self._is_for(hidden_states, others):
            return None
        try:
            self._check(hidden_states, encoder_hidden_states, layer_inputs, others)
            return self._states(hidden_states, layer_inputs, others)
        except Uncompiled as reason:
            self.fallbacks.note(str(reason), is_said=str(reason) == NO_CODE)
            return None

    def _states(self, hidden_states, layer_inputs, others: dict):
        shape, types = hidden_states.shape, _layer_types(self._stack)
        cos_sin = {name: layer_inputs.rotations.get(name, ()) for name in types}
        unpadding = unpadding_in(layer_inputs)
        if unpadding is None:
            lengths, bias = [shape[1]] * shape[0], None
            cos_sin = {name: [_in_a_row(each, shape[0]) for each in pair] for name, pair in cos_sin.items()}
        else:
            lengths, bias = unpadding.lengths, unpadding.bias
        if any(each.shape[:3] != (1, 1, shape[0] * shape[1]) for pair in cos_sin.values() for each in pair):
            raise Uncompiled("position_ids do not count the tokens")
        self._ordered.refresh()
        if (functions := self._made_functions()) is None:
            raise Uncompiled(NO_CODE)
        # A sequence of no tokens more: there are never fewer than the two that a dimension that varies must have.
        others_of = (torch.tensor([*lengths, 0], device="cpu"), bias)
        states, keys_values = hidden_states.reshape(1, -1, shape[2]), []
        for layer, function in zip(self._stack.layers, functions, strict=True):
            for _ in range(self._stack.passes):
                states = function(states, *others_of, list(cos_sin[layer.layer_type]))
                if states is None:
                    raise Uncompiled(OTHER_WEIGHTS)
                if self._stack.is_causal:
                    states, *pair = states
                    keys_values.append(pair)
        if others.get("past_key_values") is not None:
            for layer_idx, pair in enumerate(keys_values):
                # [1, K, N, D] -> [B, K, T, D]
                pair = (each[0].unflatten(1, shape[:2]).transpose(0, 1) for each in pair)
                others["past_key_values"].update(*pair, layer_idx)
        return states.view(shape)

    def _is_for(self, hidden_states, others: dict) -> bool:
        """Whether these are the tokens of some texts, a prompt's without earlier ones; a step is another thing."""
        cache, tokens = others.get("past_key_values"), hidden_states.shape[0] * hidden_states.shape[1]
        has_bits = getattr(self._stack.config, "linear_bits", None)
        if hidden_states.device.type != "cpu" or tokens < (MOST_PACKED_ROWS + 1 if has_bits else 2):
            return False
        return is_enabled() and not (self._stack.is_causal and cache is not None and cache.get_seq_length())

    def _check(self, hidden_states, encoder_hidden_states, layer_inputs, others: dict) -> None:
        """Refuse what the compiled code does not support: see `Uncompiled`."""
        stack, dtype, cache = self._stack, self._stack.embed_tokens.weight.dtype, others.get("past_key_values")
        known = ("position_ids", "past_key_values", "use_cache")
        asked = [
            name for name, value in others.items() if name not in known and value is not None and value is not False
        ]
        asked += ["encoder_hidden_states"] * (
            encoder_hidden_states is not None or layer_inputs.encoder_mask is not None
        )
        asked += ["head_mask"] * (layer_inputs.head_mask is not None)
        if torch.is_autocast_enabled("cpu"):
            raise Uncompiled("autocast is on")
        if is_transformed():
            raise Uncompiled("torch.func is at work")
        if is_recording(stack.config, others) or asked:
            raise Uncompiled(f"{asked[0]} is given" if asked else "every layer's states or attentions are requested")
        if hidden_states.dtype is not dtype or hidden_states.shape[2] != stack.config.hidden_size:
            raise Uncompiled("the embeddings do not have the model's dtype and width")
        if hidden_states.requires_grad:
            raise Uncompiled("gradients are recorded")
        if stack.config.stack_sizes(stack.is_causal)[0] != len(stack.layers) * stack.passes:
            raise Uncompiled("the config and the model differ in the number of layers")
        if any(not isinstance(mask, Unpadding | None) for mask in layer_inputs.masks.values()):
            raise Uncompiled("the attention mask hides more than padding, or padding that is not skipped")
        if not is_in_use(stack.config):
            kind = stack.config._attn_implementation
            raise Uncompiled(f"attention is computed by '{kind}', not by the package's 'sdpa'")
        if cache is not None and type(cache) is not DynamicCache:
            raise Uncompiled(f"the cache is a {type(cache).__name__}")
        if not self._parts.are_untouched():
            raise Uncompiled("a module was replaced or wrapped, has a hook or another setting, or is in training mode")

    def _example(self, layer):
        """Example arguments for a layer, and which of their sizes vary."""
        config, weight = self._stack.config, self._stack.embed_tokens.weight
        tokens, lengths = 37, torch.tensor([11, 9, 17])
        states = torch.zeros(1, tokens, config.hidden_size, dtype=weight.dtype)
        bias = None
        if self._stack.relative_bias is not None:
            bias = self._stack.relative_bias(torch.arange(17), 17)
        rotations = rotations_of(self._stack.rotary_emb, config, states, torch.arange(tokens)[None])
        cos_sin = [each.clone() for each in rotations.get(layer.layer_type, ())]
        varying = (
            {1: Dim.DYNAMIC},
            {0: Dim.DYNAMIC},
            None if bias is None else {2: Dim.DYNAMIC, 3: Dim.DYNAMIC},
            [{2: Dim.DYNAMIC}] * len(cos_sin),
        )
        return (states, lengths, bias, cos_sin), varying


def _in_a_row(each, rows: int):
    """Cosines or sines of a batch of rows, [1 or B, 1, T, D], as one row [1, 1, B * T, D]."""
    each = each.expand(rows, -1, -1, -1)
    return each.transpose(0, 1).reshape(1, 1, -1, each.shape[3])


def can_compile(stack) -> bool:
    """Whether the compiled function gets everything that the stack's layers know."""
    config = stack.config
    is_known = config.position_type in (*_POSITION_TYPES, *BLOCKS["position_type"])
    if not is_known or getattr(config, "relative_bias_per_layer", False) or "sliding_attention" in config.layer_types:
        return False
    if not stack.is_causal:
        return config.attn_logit_softcapping is None
    # With experts, many tokens have products of their own.
    is_plain = stack.dtype in (torch.float32, torch.bfloat16) and stack.relative_bias is None
    is_plain = is_plain and config.attn_logit_softcapping is None and not stack.has_cross_attention
    return is_plain and not getattr(config, "num_experts", 0)


def gains(stack) -> bool:
    """Whether compiled layers are faster here: the compiler would not call some of the engine's products."""
    if stack.dtype in HALVES and is_quicker_widened(stack.dtype):
        return False
    return stack.dtype is torch.bfloat16 or not getattr(stack.config, "linear_bits", None)
