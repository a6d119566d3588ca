"""Attention that is not the same in all layers (Gemma team, 2026): other heads by layer type, shared keys and values.

B batch, T query length, S key length, H heads, K key/value heads, D head size, C hidden size.
"""

import copy
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .attention import Attention, AttentionFields, layer_type_of
from .axes import BLOCKS, axis, flag, is_integer
from .positions import rotate
from .rotary import RotaryFields

VARIED = ("attention_by_type", "num_shared_kv_layers", "value_norm")
_SIZES = ("head_dim", "num_key_value_heads")
WITHOUT_VARIED = (  # nothing that is tested has both
    *("attention_type", "kv_lora_rank", "pruned_heads", "linear_bits", "add_cross_attention", "clip_qkv"),
    *("attention_sinks", "attention_gate", "query_growth", "num_nextn_predict_layers"),
)


@dataclass(eq=False, repr=False)
class VariedFields(RotaryFields, AttentionFields):
    """The fields of attention that is not the same in all layers."""

    attention_by_type: dict | None = axis(
        None, "a dict, layer type -> a dict", "attention", "a type's head_dim, num_key_value_heads and keys_as_values"
    )
    num_shared_kv_layers: int = axis(
        0, "an integer of 0 or more", "attention", "last layers, which reuse an earlier layer's keys and values"
    )
    value_norm: bool = flag(False, "attention", "an RMS norm of values, over each head and without weights")

    def check(self):
        """A type's settings are known and fit, and each type of a layer that reads keys has one that makes them."""
        named = [name for name in VARIED if getattr(self, name)]
        if not named:
            return
        what = f"{named[0]}={getattr(self, named[0])!r}"
        wrong = [name for name in WITHOUT_VARIED if getattr(self, name)]
        wrong += ["qk_norm"] * (self.qk_norm not in (False, True))
        wrong += ["layer_types"] * (not BLOCKS["layer_types"].keys().isdisjoint(self.layer_types))
        if wrong:
            value = getattr(self, wrong[0])
            raise ValueError(f"{what} is not supported with {wrong[0]}={value!r}: leave one of the two out.")
        if self.position_type not in ("rotary", "none"):
            raise ValueError(f"{what} does not work with position_type={self.position_type!r}: use 'rotary' or 'none'.")
        self._check_types()
        self._check_shared()

    def _check_types(self) -> None:
        for kind, settings in (self.attention_by_type or {}).items():
            if kind not in self.layer_types:
                raise ValueError(f"attention_by_type names {kind!r}, which layer_types does not: take it out.")
            for name, value in settings.items():
                known = is_integer(value) and value > 0 if name in _SIZES else type(value) is bool
                if name not in (*_SIZES, "keys_as_values") or not known:
                    fix = "head_dim and num_key_value_heads take a positive integer, keys_as_values true or false"
                    raise ValueError(f"attention_by_type of {kind!r} has {name}={value!r}: {fix}.")
            if self.num_attention_heads % (count := settings.get("num_key_value_heads", 1)):
                heads = f"num_attention_heads ({self.num_attention_heads})"
                raise ValueError(f"{heads} is not a multiple of num_key_value_heads ({count}) of {kind!r}.")
        self.attention_by_type = self.attention_by_type or None

    def _check_shared(self) -> None:
        if not (shared := self.num_shared_kv_layers):
            return
        types: list = self.layer_types  # type: ignore[assignment]  # filled by now
        own = types[: max(self.num_hidden_layers - shared, 0)]
        if lacking := sorted(set(types) - set(own)):
            what = f"num_shared_kv_layers={shared} leaves no layer of '{lacking[0]}' that makes keys"
            raise ValueError(f"{what}: make it smaller, or add one before the last {shared} layers.")

    def fill_rope_parameters(self, given, rope_theta):
        """Heads of another size turn by their own plain frequencies."""
        super().fill_rope_parameters(given, rope_theta)
        rope = self.rope_parameters or {}
        for kind in self.attention_by_type or ():
            name = rope.get(kind, rope).get("rope_type", "default")
            if self.head_dim_of(kind) != self.head_dim and name not in ("default", "proportional"):
                fix = "use 'default' or 'proportional'"
                raise ValueError(f"attention_by_type with another head_dim and rope_type {name!r} is untested: {fix}.")
        sizes = {self.head_dim_of(kind) for kind in self.layer_types}
        if "rope_type" in rope and len(sizes) > 1:
            fix = "use one dict of rope_parameters for each layer type"
            raise ValueError(
                f"attention_by_type has heads of several sizes, which rotate at different frequencies: {fix}."
            )

    @property
    def is_varied(self) -> bool:
        """Whether layers have `VariedAttention`."""
        return any(getattr(self, name) for name in VARIED)

    def head_dim_of(self, layer_type: str | None) -> int:
        """See `AttentionFields.head_dim_of`."""
        return (self.attention_by_type or {}).get(layer_type, {}).get("head_dim", self.head_dim)

    @property
    def kv_sharing_modes(self) -> list | None:
        """Which layers a cache keeps nothing for. The library asks for it, from 5.23 on."""
        shared = self.num_shared_kv_layers
        return [None] * (self.num_hidden_layers - shared) + ["reuse"] * shared if shared else None

    @property
    def qk_head_dim(self) -> int | None:
        """A size, by which the library lets a static cache take the keys' sizes, layer by layer; or None."""
        return self.head_dim if self.attention_by_type else getattr(super(), "qk_head_dim", None)


class VariedAttention(Attention):
    """Attention with the sizes of its layer type, whose keys may be its values, too, or an earlier layer's keys.

    Values may be normed over each head (Gemma 4). A layer that shares reads what the last layer before the sharing
    ones of its type has got from the cache, so it caches nothing (Brandon et al., 2024).
    """

    projects_states, other_cache = False, "cache whose layers are not alike"

    def __init__(self, config, layer_idx: int, is_causal: bool, is_cross_attention: bool = False):
        kind = layer_type_of(config, layer_idx, is_causal)
        settings = (config.attention_by_type or {}).get(kind, {})
        own = config.num_hidden_layers - config.num_shared_kv_layers
        self._reads, self._leaves = layer_idx >= own, own < config.num_hidden_layers
        self._leaves = self._leaves and layer_idx == own - 1 - config.layer_types[:own][::-1].index(kind)
        self._keys_as_values = settings.get("keys_as_values", False)
        view = copy.copy(config)  # with this layer's sizes
        for name in _SIZES:
            setattr(view, name, settings.get(name, getattr(config, name)))
        super().__init__(view, layer_idx, is_causal, is_cross_attention)
        self.config, self.layer_type = config, kind
        self.value_eps = config.norm_eps if config.value_norm else None

    def add_projections(self, config, is_causal):
        """As in the usual attention, without what other parts serve for."""
        super().add_projections(config, is_causal)
        if self._reads:
            self.cached_numbers = 0
        unused = ["k_proj", "k_norm"] * self._reads + ["v_proj"] * (self._reads or self._keys_as_values)
        for name in unused:
            setattr(self, name, None)

    @property
    def words(self) -> tuple[str, ...]:
        """What is special of this layer, in a few words for figures."""
        words = ["keys and values of an earlier layer"] if self._reads else []
        words += ["values are the keys"] if self._keys_as_values and not self._reads else []
        return (*words, *(["value norm"] if self.value_eps is not None and not self._reads else []))

    def states_of(self, hidden_states, key_value_states, position_embeddings, past_key_values, kwargs, earlier=None):
        """Queries [B, H, T, D], keys and values [B, K, S, D] of these states, or an earlier layer's keys and values."""
        names = [f"{name}_of_{self.layer_type}" for name in ("keys", "values")]
        query = self._turned(self.q_proj(hidden_states), self.q_norm, position_embeddings)
        if self._reads:
            return query, *(_left(earlier, name).to(query.device) for name in names)
        key = self.k_proj(hidden_states)
        value = self._split_heads(key if self._keys_as_values else self.v_proj(hidden_states))
        if self.value_eps is not None:
            value = F.rms_norm(value, value.shape[-1:], eps=self.value_eps)
        key = self._turned(key, self.k_norm, position_embeddings)
        states = self._with_past(key, value, past_key_values, kwargs)
        if self._leaves:
            for name, tensor in zip(names, states, strict=True):
                setattr(earlier, name, (tensor, torch.is_grad_enabled()))
        return query, *states

    def _turned(self, states, norm, position_embeddings):
        states = self._split_heads(states, norm)
        return states if position_embeddings is None else rotate(states, *position_embeddings)


def _left(earlier, name: str):
    """What an earlier layer of the same forward has left, unless reentrant checkpointing would lose its gradients."""
    tensor, has_gradients = getattr(earlier, name)
    if torch.is_grad_enabled() and not has_gradients:
        fix = "leave out use_reentrant=True, or set gradient_checkpointing_kwargs={'use_reentrant': False}"
        raise ValueError(f"use_reentrant=True loses the gradients of '{name}', which an earlier layer left: {fix}.")
    return tensor
