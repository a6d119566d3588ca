"""Layers that keep a state in place of keys: what all of them share, and the smallest, a short convolution.

Only the repo of a config whose `layer_types` name such layers carries this file. A state is of one size however long
the text is. `StateLayer` says where it is stored, whose tokens reach it, and which caches and configs are refused.

B batch, T length, C hidden size, D channels of a convolution, W tokens that it sees.
"""

import math
from typing import ClassVar

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, masking_utils

from .attention import LAYER_TYPES, refuse_backends
from .axes import BLOCKS, axis, flag
from .blocks import block
from .compat import is_readable
from .positions import adds_to_scores, starts_of

# What no test has together with these layers.
WITHOUT_STATES = (
    *("attention_type", "kv_lora_rank", "pruned_heads", "linear_bits", "attn_logit_softcapping"),
    *("attention_sinks", "add_cross_attention", "bidirectional"),
)
# Older releases take a layer with a state for one with keys, and make the mask of all keys as long as a window.
KNOWS_KEYS = hasattr(masking_utils, "find_first_full_attention_index")

OWN_CACHE = "make it with DynamicCache(config=model.config)"


class StateLayer(nn.Module):
    """A layer's attention that keeps a state, or nothing; a kind of it has `mix`.

    Attributes:
        kind: its layer type, which `block` enters.
        library_type: the library's word for it, by which caches are made.
        has_keys: whether it keeps keys, too, which count a text's tokens.
        heads: the numbers of its heads, if it has any.
        norm_placement: where its layer has norms; None: where the others have them.
        state_shape: of a row's state; empty if only its convolution, `conv1d`, keeps anything.
        is_stateful: whether no cache can drop tokens again. Newer releases' can where there is only a convolution.
        knows_sequences: whether `mix` tells the texts of a row apart; otherwise rows of several are refused.
        reads_whole_text: whether it reads earlier tokens and keeps nothing of them, so that a cache cannot go on.
    """

    kind, library_type = "", "linear_attention"
    has_keys, is_stateful = False, True
    reads_whole_text, knows_sequences = False, True
    state_shape: tuple[int, ...] = ()
    heads = range(0)
    norm_placement: str | None = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.is_stateful = cls.is_stateful or not hasattr(DynamicCache, "activate_past_recording")

    def __init__(self, config, layer_idx: int, window: int = 1):
        super().__init__()
        self.config, self.layer_idx, self.window = config, layer_idx, window

    def state_bytes(self, size: int) -> int:
        """Bytes that a cache keeps of a row, however long it is, in a dtype of so many bytes."""
        numbers = math.prod(self.state_shape) if self.state_shape else 0
        return numbers * max(size, 4) + self.channels * self.window * size

    @property
    def channels(self) -> int:
        """How many its convolution has; 0 without one."""
        return getattr(self._modules.get("conv1d"), "in_channels", 0)

    @property
    def words(self) -> tuple[str, ...]:
        """Its size, and what it does, in a few words for figures."""
        size = " \N{MULTIPLICATION SIGN} ".join(f"{each:,}" for each in self.state_shape)
        convolution = [f"convolution over {self.window} tokens"] if self.channels else []
        return f"a state of {size}" if size else "no state", self.kind.replace("_", " "), *convolution

    @classmethod
    def check_config(cls, config) -> None:
        """Refuse what these layers cannot be together with; the config has its own fields only so far."""
        what = f"layer_types names '{cls.kind}'"
        if not config.is_decoder:
            raise ValueError(f"{what}, which needs a decoder: a state only knows what came before.")
        for name in (*WITHOUT_STATES, *["sliding_window"] * cls.has_keys):
            if value := getattr(config, name):
                raise ValueError(f"{what}, which is not supported with {name}={value!r}: leave {name} out.")
        if config.sliding_window is not None and not KNOWS_KEYS:
            why = f"transformers {transformers.__version__} makes wrong masks for a window next to them"
            raise ValueError(f"{what}, and sliding_window is {config.sliding_window}: {why}. Install a newer release.")
        if adds_to_scores(config.position_type):
            fix = "use 'rotary', 'learned', 'sinusoidal' or 'none'"
            raise ValueError(f"{what}, which is not supported with position_type={config.position_type!r}: {fix}.")
        lacks_keys = not cls.has_keys and len({*config.layer_types}) == 1
        known = {*config.layer_types} & {*LAYER_TYPES, *BLOCKS["layer_types"]}  # others are refused as misspelt
        if not known <= {cls.kind, *LAYER_TYPES} or lacks_keys:
            fix = "add a layer of 'full_attention', whose keys count a text's tokens, and no other type"
            raise ValueError(f"{what}: {fix}.")

    @staticmethod
    def mask_of(inputs, config=None):
        """What these layers get as `attention_mask`, of a `layer.StackInputs`: see `forward`."""
        mask, positions, places = inputs.attention_mask, inputs.given_positions, inputs.places
        if not isinstance(mask, torch.Tensor):
            return None if positions is None or places.shape[0] == 1 else starts_of(positions).cumsum(-1)
        if mask.dim() != 2:
            fix = "pass one of [batch, length] with 0 for padding; a state cannot skip anything else"
            raise ValueError(f"attention_mask is {[*mask.shape]}, but some layers keep a state: {fix}.")
        mask = mask[:, places] != 0
        if not is_readable(mask):
            return mask
        if positions is not None and _begins_again(mask, positions):
            fix = "pack texts without padding and leave attention_mask out, or put one text in each row"
            raise ValueError(f"position_ids start again in a row where attention_mask hides tokens: {fix}.")
        return None if mask.all() else mask

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, head_mask=None, **kwargs):
        """States [B, T, C] -> states [B, T, C], and None for the probabilities.

        Args:
            hidden_states: the states.
            attention_mask: bool [B, T], where tokens are and not padding; or int [B, T], each token's sequence in its
                row, from 1 on; or None.
            past_key_values: a cache of the library's whose layer here is a `LinearAttentionLayer`, or None.
            head_mask: None; there are other heads here than elsewhere, or none.
            kwargs: what attention gets beyond it, which nothing reads.

        Raises:
            ValueError: the cache is for other layers or another batch, or is to be cropped; or there is a `head_mask`.
        """
        refuse_backends(self.config, ("vllm", "paged"), "layer that keeps a state")
        if head_mask is not None:
            raise ValueError(f"head_mask is not supported with layer_types of '{self.kind}': leave it out.")
        sequences = is_token = None
        if attention_mask is not None and attention_mask.dtype is not torch.bool:
            if self.knows_sequences:
                sequences = attention_mask
            else:
                _refuse_several(attention_mask, self.kind)
        elif attention_mask is not None:  # padding changes no state
            is_token = attention_mask[..., None].to(hidden_states.dtype)
            hidden_states = hidden_states * is_token
        held = _layer_of(past_key_values, self, hidden_states.shape[0])
        if held is not None and not (self.channels or self.state_shape):
            if self.reads_whole_text and states_of(held)[0] is not None:
                fix = "pass use_cache=False, also to generate"
                raise ValueError(f"layers of '{self.kind}' keep nothing of earlier tokens, so no cache goes on: {fix}.")
            _mark(held, hidden_states)
        return self.mix(hidden_states, is_token, sequences, held), None

    def mix(self, hidden_states, is_token, sequences, held):
        """States [B, T, C] -> states [B, T, C].

        Args:
            hidden_states: the states, 0 where there is padding.
            is_token: [B, T, 1], 1 for a token and 0 for padding; None: all are tokens.
            sequences: int [B, T], each token's sequence in its row, from 1 on, or None.
            held: the cache's layer, or None.
        """
        raise NotImplementedError

    def state_in(self, held, hidden_states):
        """The state [B, *state_shape] before the tokens of these states [B, T, C], in float32 at least.

        It is 0 where no cache holds one, and a copy, since the cache writes over its own.
        """
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        if (state := states_of(held)[1]) is None:
            return hidden_states.new_zeros(hidden_states.shape[0], *self.state_shape, dtype=wide)
        return state.to(wide, copy=True)

    def keep(self, held, state) -> None:
        """Store the state [B, *state_shape] after these tokens for the next ones; nothing without a cache."""
        if not self.state_shape or state.shape[1:] != self.state_shape:
            sizes = f"{[*state.shape]}, but state_shape is {[*self.state_shape]}"
            raise ValueError(f"keep got a state of {sizes}: set self.state_shape to its sizes without the batch.")
        if held is not None:
            if not self.channels:
                _mark(held, state)
            held.update_recurrent_state(state)

    def convolved(self, states, weight, sequences, held):
        """Channels [B, T, D] after a causal convolution of each channel, weight [D, 1, W], in float32 at least.

        It also sees the last tokens before them, which `held` keeps as [B, D, W], or more of them if it can drop some
        again; all but the last W - 1 are too old.
        """
        length, window, past = states.shape[1], self.window, states_of(held)[0]
        start = window - 1  # so many come before the tokens: the past, or zeros, which add nothing
        seen = F.pad(states, (0, 0, start, 0)) if past is None else torch.cat((past[..., -start:].mT, states), dim=1)
        if getattr(held, "record_past", False):
            new = F.pad(states, (0, 0, window, 0)) if past is None else states
            held.update_conv_state(new.transpose(1, 2), conv_kernel_size=window)
        elif held is not None:
            new = F.pad(states, (0, 0, max(window - length, 0), 0))[:, -window:] if past is None else states
            held.update_conv_state(new.transpose(1, 2))
        wide = torch.promote_types(weight.dtype, torch.float32)
        taps, seen = weight[:, 0].t().to(wide), seen.to(wide)  # [W, D]
        earlier = None if sequences is None else F.pad(sequences, (start, 0), value=1)
        output = seen[:, start:] * taps[-1]
        for back in range(1, window):
            places = slice(start - back, start - back + length)
            part = seen[:, places]
            if earlier is not None:
                part = part * (earlier[:, places] == sequences)[..., None]
            output.addcmul_(part, taps[-1 - back])
        return output


class Convolution(nn.Conv1d):
    """A convolution of each channel by its layer's `convolved`: a module that is called, which offloading waits for."""

    def forward(self, states, convolved, sequences, held):
        """[B, T, D] -> [B, T, D], in float32 at least, with the bias."""
        states = convolved(states, self.weight, sequences, held)
        return states if self.bias is None else states + self.bias


class MatrixStates(StateLayer):
    """A layer whose heads each keep a matrix of keys by values, with a convolution before it.

    Attributes:
        key_size, value_size: K and V of a head's state [K, V].
        sizes: channels of the convolution, of queries, keys and values.
        rule: what changes a state, in a few words.
    """

    rule = ""
    tensor_parallel_plan: ClassVar[dict] = {}  # each process has it whole, by names that attention has not
    key_size = value_size = 0
    sizes: tuple[int, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """See `StateLayer.words`."""
        size = f"{len(self.heads)} states of {self.key_size} \N{MULTIPLICATION SIGN} {self.value_size}"
        return size, self.rule, f"convolution over {self.window} tokens", "silu gate"


def _begins_again(is_token, positions):
    """Whether the positions [B, T] of some row's tokens do not grow."""
    least = torch.iinfo(positions.dtype).min
    before = positions.masked_fill(~is_token, least).cummax(-1).values
    return bool((is_token & (positions <= F.pad(before[:, :-1], (1, 0), value=least))).any())


def _layers_of(past_key_values):
    return getattr(getattr(past_key_values, "self_attention_cache", past_key_values), "layers", ())


def _layer_of(past_key_values, layer: StateLayer, rows: int):
    """The layer of a cache that belongs to a layer, checked, or None."""
    if past_key_values is None:
        return None
    number, layers = layer.layer_idx, _layers_of(past_key_values)
    if number >= len(layers) or not hasattr(layers[number], "update_recurrent_state"):
        kind = type(past_key_values).__name__
        raise ValueError(f"past_key_values ({kind}) keeps no state for layer {number}: {OWN_CACHE}.")
    held = layers[number]
    records = getattr(held, "record_past", False)
    if records and layer.is_stateful:
        fix = "generate without an assistant, prompt_lookup_num_tokens and the like"
        raise ValueError(f"past_key_values would be cropped, but a state cannot go back: {fix}.")
    past, state = states_of(held)
    if past is None:
        return held
    if past.shape[0] != rows:
        fix = "use a cache of the same batch"
        raise ValueError(f"past_key_values holds {past.shape[0]} rows, the input has {rows}: {fix}.")
    found = [*past.shape[1:], *(state.shape[1:] if state is not None and state.numel() else ())]
    own = [layer.channels, found[1] if records else layer.window, *layer.state_shape]
    if found != own:
        sizes = f"a state of sizes {found} for layer {number}, whose sizes are {own}"
        raise ValueError(f"past_key_values holds {sizes}: {OWN_CACHE}.")
    return held


def _mark(held, states) -> None:
    """Tell a cache's layer that it holds something of the rows of some states [B, ...]: a convolution of nothing."""
    held.update_conv_state(states.new_zeros(states.shape[0], 0, 1))


def _refuse_several(sequences, kind: str) -> None:
    """Refuse rows of several texts, of which `sequences` int [B, T] has the numbers, as far as they can be read."""
    if sequences.device.type != "meta" and is_readable(numbers := sequences.cpu()) and numbers.max() > 1:
        fix = "put one text in each row"
        raise ValueError(f"position_ids start again in a row, and layers of '{kind}' cannot tell texts apart: {fix}.")


def states_of(held):
    """What a cache's layer keeps: the last tokens before a convolution [B, D, W] and the state, each None if empty."""
    if held is None:
        return None, None
    named = [getattr(held, name) for name in ("has_previous_state", "conv_states", "recurrent_states")]
    has_any, past, state = (each[0] if isinstance(each, dict) else each for each in named)  # dicts in newer releases
    return (past, state) if has_any else (None, None)


@block(
    "layer_types",
    "conv",
    conv_L_cache=axis(3, "an integer above 1", "attention", "tokens W that the convolution of layers of conv sees"),
    conv_bias=flag(False, "attention", "biases in layers of conv"),
)
class ShortConvolution(StateLayer):
    """A layer's attention by a gated convolution of each channel (Liquid AI, 2025): C * conv(B * x), linearly mapped.

    B, C and x are three maps of the states, side by side in one matrix. Its state is what the convolution still sees.
    """

    library_type, is_stateful = "conv", False
    tensor_parallel_plan: ClassVar[dict] = {}  # as in `MatrixStates`

    def __init__(self, config, layer_idx: int, is_causal: bool):
        super().__init__(config, layer_idx, config.conv_L_cache)
        width, bias = config.hidden_size, config.conv_bias
        self.in_proj = nn.Linear(width, 3 * width, bias=bias)
        self.conv1d = Convolution(width, width, self.window, groups=width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)

    @property
    def words(self) -> tuple[str, ...]:
        """See `StateLayer.words`."""
        return f"{self.conv1d.out_channels:,} channels", f"convolution over {self.window} tokens", "two gates"

    def mix(self, hidden_states, is_token, sequences, held):
        """See `StateLayer.mix`."""
        before, after, states = self.in_proj(hidden_states).chunk(3, dim=-1)
        states = before * states if is_token is None else before * states * is_token  # a bias makes padding count
        states = self.conv1d(states, self.convolved, sequences, held)
        return self.out_proj(after * states.to(after.dtype))
