"""Multi-head attention: self and cross, grouped heads, q/k norm, rotation, relative terms, gate, on any backend.

B batch, T query length, S key length, H heads, K key/value heads, D head size, C hidden size.
"""

from collections import ChainMap
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import EncoderDecoderCache

from .axes import BLOCKS, FLAG, SHARED, Part, axis, check_choice, flag
from .compat import CACHE, is_readable
from .normalization import make_norm
from .positions import adds_to_scores, rotate


def sdpa_attention(module, query, key, value, attention_mask, **kwargs):
    """The library's attention function "sdpa", and eager attention for what that has not. No probabilities."""
    mask, is_eager = attention_mask, "softcap" in kwargs or "s_aux" in kwargs
    if module.has_relative_terms and module.is_causal and any(each.requires_grad for each in (query, key, value)):
        # Where a token sees nothing, PyTorch's kernels take each of its probabilities for 1 in the backward pass.
        is_eager = bool((mask.amax(-1) <= torch.finfo(mask.dtype).min).any()) if is_readable(mask) else mask.size(0) > 1
    if not is_eager:
        return LIBRARY["sdpa"](module, query, key, value, attention_mask, **kwargs)
    if attention_mask is None and kwargs.get("is_causal", module.is_causal) and query.shape[2] > 1:
        # The queries are the first tokens: further keys are the empty room of a static cache.
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return eager_attention_forward(module, query, key, value, attention_mask, **kwargs)[0], None


# These models' own table. It includes everything that is registered for all models, or put into the library's table.
LIBRARY = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
ALL_ATTENTION_FUNCTIONS = type(LIBRARY)()
vars(ALL_ATTENTION_FUNCTIONS)["_local_mapping"] = ChainMap({"sdpa": sdpa_attention}, LIBRARY._local_mapping)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, **kwargs):
    """softmax(Q K^T * scaling + mask) V (Vaswani et al., 2017, section 3.2.1), the definition of every backend.

    With a soft cap c, c * tanh(scores / c) in place of the scores before the mask (Gemma 2). With sinks `s_aux` [H], a
    head's sink is the score of one more key, whose value is 0 (Xiao et al., 2023; gpt-oss).

    Queries [B, H, T, D], keys and values [B, K, S, D], an additive or boolean mask (True is visible) [B, 1 or H, T, S]
    or None -> the weighted values [B, T, H, D] and the probabilities [B, H, T, S].
    """
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        # Added, not filled in: padding that sees nothing has gradients too, for the label of a row's first token.
        attention_mask = (~attention_mask).to(scores.dtype) * (torch.finfo(scores.dtype).min / 2)
    wide = torch.promote_types(scores.dtype, torch.float32)  # in which no row that sees nothing becomes -inf
    scores = scores if attention_mask is None else scores + attention_mask.to(wide)
    if (s_aux := kwargs.get("s_aux")) is not None:
        scores = torch.cat((scores, s_aux[None, :, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)), dim=-1)
    probabilities = scores.softmax(dim=-1, dtype=wide).to(query.dtype)[..., : key.shape[2]]
    probabilities = F.dropout(probabilities, dropout, module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


def with_bias(config, attention_mask, bias, places=None):
    """A mask and a bias [1 or B, H, T, S] of the scores as one additive mask of that shape.

    With the queries' `places`, int [T], no mask is a causal one: the backend was left to see to it.
    """
    if attention_mask is None and places is not None:
        attention_mask = (torch.arange(bias.shape[-1], device=bias.device)[None, :] <= places[:, None])[None, None]
    if attention_mask is None:
        return bias
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() < 4:
        refuse_backends(config, "", "relative position term")
    if attention_mask.dtype == torch.bool:
        return bias.masked_fill(~attention_mask, torch.finfo(bias.dtype).min)
    return (bias + attention_mask).clamp(min=torch.finfo(bias.dtype).min)


def refuse_backends(config, prefixes, what: str) -> None:
    """Refuse an attention backend of which the name begins so."""
    if (backend := config._attn_implementation or "").startswith(prefixes):
        raise ValueError(f"attn_implementation='{backend}' does not support a {what}; use 'sdpa' or 'eager'.")


LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(eq=False, repr=False)
class AttentionFields(Part):
    """The fields of attention."""

    attention_type: str | None = axis(None, (), "attention", "a self-attention from outside; None: the usual one")
    num_attention_heads: int = axis(8, "a positive integer", "attention", "query heads H")
    num_key_value_heads: int | None = axis(None, "a positive integer", "attention", "key/value heads K; None means H")
    head_dim: int | None = axis(None, "a positive integer", "attention", "size D of a head; None: hidden_size / H")
    qk_norm: bool | str = axis(
        False,
        (*FLAG, "per_head", "projection", "rotated"),
        "attention",
        "norm of queries and keys, before the rotation: of each head; of each by its own weights; of all; or after it",
    )
    attention_bias: bool = flag(False, "attention", "bias of the query, key and value projections")
    attention_output_bias: bool = flag(False, "attention", "bias of the output projection")
    attention_scale: float | None = axis(None, "a positive number", "attention", "factor of scores; None: 1/sqrt(D)")
    attn_logit_softcapping: float | None = axis(None, "a positive number", "attention", "soft cap c of the scores")
    attention_sinks: bool = flag(False, "attention", "a learned score per head takes part in its softmax")
    attention_gate: bool = flag(False, "attention", "the heads' output times sigmoid(W x), x the states")
    clip_qkv: float | None = axis(None, "a positive number", "attention", "bound of queries, keys and values")
    # A window of 1 is full attention in a dynamic cache of the library.
    sliding_window: int | None = axis(
        None, "an integer above 1", "attention", "tokens that a sliding layer sees; in an encoder, to each side"
    )
    layer_types: list | None = axis(
        None, "a list", "attention", "{full, sliding, linear}_attention, conv, state_space, both; None: by window"
    )
    pruned_heads: dict | None = axis(
        None, "a dict, layer -> list of heads", "attention", "query heads removed from self-attention"
    )
    add_cross_attention: bool = flag(False, "attention", "a decoder's layers also attend to an encoder's states")
    attention_dropout: float = axis(0.0, "a probability from 0 to 1", "training", "dropout of attention probabilities")

    def fill_defaults(self):
        """Plain multi-head attention whose heads share the width; with a window all layers slide."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                sizes = f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads"
                raise ValueError(f"{sizes} ({self.num_attention_heads}): change one of them or set head_dim.")
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = [LAYER_TYPES[bool(self.sliding_window)]] * self.num_hidden_layers
        # The layers are strings in JSON.
        self.pruned_heads = {int(layer): heads for layer, heads in (self.pruned_heads or {}).items() if heads} or None

    def check(self):
        """Heads come in whole groups, pruned ones too; a window needs layers that slide, and those a window."""
        most, kinds = self.num_attention_heads, self.num_key_value_heads
        if most % kinds:
            raise ValueError(f"num_attention_heads ({most}) is not a multiple of num_key_value_heads ({kinds}).")
        if self.add_cross_attention and not self.is_decoder:
            raise ValueError("add_cross_attention=True needs a decoder: use BlockformerDecoderConfig.")
        types, count, group = self.layer_types, self.num_hidden_layers, most // kinds
        if not isinstance(types, list) or len(types) != count:
            raise ValueError(f"layer_types must list one type for each of the {count} layers, not {types!r}.")
        for layer_type in types:
            check_choice("layer_types", layer_type, (*LAYER_TYPES, *BLOCKS["layer_types"]))
        slides = "sliding_attention" in types
        if slides and self.sliding_window is None:
            raise ValueError("layer_types names 'sliding_attention' but sliding_window is None: set it, in tokens.")
        if self.sliding_window is not None and not slides:
            raise ValueError("sliding_window is set but layer_types has no 'sliding_attention': add it, or set None.")
        if slides and adds_to_scores(self.position_type):
            raise ValueError(f"sliding_window is not supported with position_type='{self.position_type}': drop it.")
        is_plain = self.is_decoder and not self.add_cross_attention and not adds_to_scores(self.position_type)
        capped = is_plain or (self.is_encoder_decoder and not adds_to_scores(self.position_type))
        if (self.attn_logit_softcapping and not capped) or (self.attention_sinks and not is_plain):
            name = "attention_sinks" if self.attention_sinks and not is_plain else "attn_logit_softcapping"
            raise ValueError(f"{name} needs a decoder-only model without relative positions or ALiBi: leave it out.")
        for layer, pruned in (self.pruned_heads or {}).items():
            left = self.heads_of(layer)
            is_whole = len(left) == group * len({head // group for head in left}) == most - len(pruned)
            if not (left and is_whole and layer < count):
                some = f"some of {most} heads for each of some of {count} layers, with all heads that share a key"
                raise ValueError(f"pruned_heads must be {some}, not {pruned} for layer {layer}.")
        if self.pruned_heads and (self.qk_norm == "projection" or self.is_encoder_decoder):
            raise ValueError("pruned_heads is not supported with qk_norm='projection' or in an encoder-decoder.")

    def heads_of(self, layer_idx: int) -> list[int]:
        """The query heads of a layer's self-attention: all that are not pruned."""
        pruned = (self.pruned_heads or {}).get(layer_idx, ())
        return [head for head in range(self.num_attention_heads) if head not in pruned]

    def head_dim_of(self, layer_type: str | None) -> int:
        """The size of a head in the layers of a type."""
        return self.head_dim  # type: ignore[return-value]  # filled by now

    def share_out(self, plan, has_cross_attention):
        """Each process has some of the heads. A head's norm is whole in each, and its gradients are added."""
        # Whole in each process: norms of all heads, sinks, layers of any width, and keys that heads or layers share.
        is_whole = self.qk_norm in ("per_head", "projection") or self.attention_sinks or self.pruned_heads
        if is_whole or self.num_key_value_heads == 1 or self.kv_lora_rank or self.is_varied:
            return
        for attention in ("self_attn", "cross_attn")[: 1 + has_cross_attention]:
            plan |= {f"layers.*.{attention}.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")}
            plan[f"layers.*.{attention}.o_proj"] = "rowwise"
            if self.qk_norm:
                plan |= {f"layers.*.{attention}.{name}": SHARED for name in ("q_norm", "k_norm")}
        if self.attention_gate:
            plan["layers.*.self_attn.gate_proj"] = "colwise"


def layer_type_of(config, layer_idx: int, is_causal: bool) -> str:
    """A layer's type; the types of an encoder-decoder's decoder are in their own field."""
    return (config.decoder_layer_types if is_causal and config.is_encoder_decoder else config.layer_types)[layer_idx]


def _head_norm(config, heads: int):
    """The norm of queries or keys, as `qk_norm` names it."""
    sizes = {"per_head": (heads, config.head_dim), "projection": (heads * config.head_dim,)}
    return make_norm(config, *sizes.get(config.qk_norm, (config.head_dim,))) if config.qk_norm else None


class Attention(nn.Module):
    """Attention in one fixed order: project, q/k norm, rotate, cache, scores, weighted sum, gate, output projection.

    Self-attention when called without `key_value_states`, cross-attention with them. Grouped heads after Ainslie et al.
    (2023), q/k norm per head after Henry et al. (2020) as in Qwen3, the gate after Qiu et al. (2025).
    """

    projects_states = True  # whether self-attention's queries, keys and values are the states times one matrix each

    def __init__(self, config, layer_idx: int, is_causal: bool, is_cross_attention: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal and not is_cross_attention
        self.is_cross_attention = is_cross_attention
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        # A module, here and elsewhere: tools that turn dropout off or on look for one, or set its `p`.
        self.dropout = nn.Dropout(config.attention_dropout) if config.attention_dropout else None
        self.softcap, self.clip_qkv = config.attn_logit_softcapping, config.clip_qkv
        self.has_relative_terms = adds_to_scores(config.position_type) and not is_cross_attention
        sliding = not is_cross_attention and layer_type_of(config, layer_idx, is_causal) == "sliding_attention"
        # Backends count the token itself; a window to both sides is given without it.
        self.sliding_window = config.sliding_window + (not is_causal) if sliding else None

        # The numbers of this layer's heads, the pruned ones counted; cross-attention has all.
        self.heads = config.heads_of(-1 if is_cross_attention else layer_idx)
        self.is_pruned = len(self.heads) < config.num_attention_heads
        self.add_projections(config, is_causal)
        self.has_gate = config.attention_gate and not is_cross_attention  # a block from outside may have a `gate_proj`
        if self.has_gate:
            self.gate_proj = nn.Linear(config.hidden_size, self.o_proj.in_features, bias=False)
        self.has_sinks = config.attention_sinks
        if self.has_sinks:  # backends take a module that has the attribute for one with sinks
            self.sinks = nn.Parameter(torch.zeros(len(self.heads)))
        kind = None if is_cross_attention else config.position_type
        bias = config.parts["biases"].get(kind) if config.relative_bias_per_layer else None
        self.relative_bias = bias(config, bidirectional=not is_causal) if bias else None
        key_terms = config.parts["key_terms"].get(kind)
        self.relative_keys = key_terms(config) if key_terms else None
        self._check_backend()

    def add_projections(self, config, is_causal: bool):
        """Make the linear layers, and the norms of queries and keys."""
        groups = len(self.heads) // self.num_key_value_groups
        query_size, key_value_size = len(self.heads) * config.head_dim, groups * config.head_dim
        self.cached_numbers = 2 * key_value_size if is_causal else 0  # of a token; in cross-attention, of the source
        self.q_proj = nn.Linear(config.hidden_size, query_size, config.attention_bias)
        # Drawn as if scaled: an unscaled attention (T5) has the missing factor in its queries.
        self.q_proj.initializer_factor = config.head_dim**-0.5 / self.scaling
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, config.attention_output_bias)
        self.norms_projection, self.norms_rotated = config.qk_norm == "projection", config.qk_norm == "rotated"
        self.q_norm = _head_norm(config, len(self.heads))
        self.k_norm = _head_norm(config, groups)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_embeddings=None,
        distances=None,
        places=None,
        key_value_states=None,
        past_key_values=None,
        head_mask=None,
        earlier=None,
        **kwargs,
    ):
        """States [B, T, C] -> states [B, T, C], and the probabilities [B, H, T, S] or None where the backend has none.

        Args:
            key_value_states: [B, S, C], the source of keys and values of cross-attention.
            head_mask: [H] or [B, H], multiplies each head's output, or None.
            attention_mask, position_embeddings, distances, places, earlier: as in `layer.LayerInputs`.
        """
        self._check_backend()  # it may be another one since
        if self.is_cross_attention or not self.projects_states:
            given = (hidden_states, key_value_states, position_embeddings, past_key_values)
            query, key, value = self.states_of(*given, kwargs, earlier)
        else:
            # vLLM makes one matmul of these calls where they stand in this source, each once.
            q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
            if self.clip_qkv is not None:
                q, k, v = (states.clamp(-self.clip_qkv, self.clip_qkv) for states in (q, k, v))
            query, key, value = self._split_states(q, k, v, position_embeddings)
            key, value = self.before_cache(key, value, earlier)
            key, value = self._with_past(key, value, past_key_values, kwargs)  # [B, K, S, D]
        if self.has_relative_terms:
            query, attention_mask = self._with_terms(query, key, attention_mask, distances, places)
        if self.softcap is not None:
            kwargs["softcap"] = self.softcap
        if self.has_sinks:
            kwargs["s_aux"] = self.sinks

        # vLLM and transformers read this source, too: one look-up and one call of what it finds.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        kwargs["dropout"] = self.dropout.p if self.training and self.dropout is not None else 0.0
        kwargs["sliding_window"] = self.sliding_window
        output, probabilities = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        if head_mask is not None:
            output = output.reshape(*hidden_states.shape[:2], query.shape[1], -1)
            output = output * self._own_heads(head_mask, -1, output.shape[2])[..., None, :, None]
        output = self.before_output(output.reshape(*hidden_states.shape[:2], -1), hidden_states)  # [B, T, H * D]
        if self.has_gate:
            output = output * self.gate_proj(hidden_states).sigmoid()
        return self.o_proj(output), probabilities

    def before_cache(self, key, value, earlier):
        """Self-attention's keys and values [B, K, T, D] of these tokens, as the cache gets them, for blocks."""
        return key, value

    def before_output(self, output, hidden_states):
        """What the output projection reads, of the heads' output [B, T, H * D] and the states [B, T, C], for blocks."""
        return output

    def _own_heads(self, terms, dim: int, heads: int):
        """Of a term for each head, H along `dim`, the entries of the remaining heads that this process holds."""
        if terms.shape[dim] in (1, heads):
            return terms
        if self.is_pruned:
            return terms.index_select(dim, torch.tensor(self.heads, device=terms.device))
        mesh = getattr(self.q_proj.weight, "device_mesh")  # noqa: B009 - of a DTensor
        return terms.narrow(dim, mesh.get_local_rank("tp") * heads, heads)

    def _split_heads(self, states, norm=None):
        """[B, T, heads * D] -> [B, heads, T, D], normalised over D or before the heads are split."""
        if norm is not None and self.norms_projection:
            states, norm = norm(states), None
        states = states.view(*states.shape[:2], -1, self.head_dim)
        return (states if norm is None else norm(states)).transpose(1, 2)

    def _project_keys_values(self, states):
        return self._split_heads(self.k_proj(states), self.k_norm), self._split_heads(self.v_proj(states))

    def _split_states(self, query, key, value, position_embeddings):
        """Projected [B, T, heads * D] -> queries [B, H, T, D], keys, values [B, K, T, D]; queries and keys rotated."""
        norms = (None, None) if self.norms_rotated else (self.q_norm, self.k_norm)
        query, key = self._split_heads(query, norms[0]), self._split_heads(key, norms[1])
        if position_embeddings is not None:
            query, key = rotate(query, *position_embeddings[:2]), rotate(key, *position_embeddings[:2])
            query = query * position_embeddings[2] if position_embeddings[2:] else query
        if self.norms_rotated:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, self._split_heads(value)

    def _with_past(self, key, value, past_key_values, kwargs):
        usual = 2 * self.config.num_key_value_heads * self.config.head_dim
        if "cache" in kwargs and getattr(self, "paged_numbers", self.cached_numbers) != usual:
            raise ValueError("generate_batch needs keys and values of one size in all layers: use generate.")
        by_backend = CACHE != "cache" and not (self.projects_states and self.config._attn_implementation == "sdpa")
        if kwargs.get("cache") is not None and not by_backend:  # of generate_batch; its update tells the backend more
            return kwargs.pop("cache").update(key, value, self.layer_idx, kwargs)
        own = getattr(past_key_values, "self_attention_cache", past_key_values)
        return (key, value) if own is None else own.update(key, value, self.layer_idx)

    def states_of(self, hidden_states, key_value_states, position_embeddings, past_key_values, kwargs, earlier=None):
        """Queries [B, H, T, D] of these states, keys and values [B, K, S, D] of the encoder's."""
        query = self._split_heads(self.q_proj(hidden_states), self.q_norm)
        return query, *self._cross_keys_values(key_value_states, past_key_values)

    def _cross_keys_values(self, key_value_states, past_key_values):
        """Keys and values of the encoder's states; with an EncoderDecoderCache projected once and then reused."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            return self._project_keys_values(key_value_states)
        cache = past_key_values.cross_attention_cache
        if past_key_values.is_updated.get(self.layer_idx):
            return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        keys_values = cache.update(*self._project_keys_values(key_value_states), self.layer_idx)
        past_key_values.is_updated[self.layer_idx] = True  # last: what fails before leaves no hole
        return keys_values

    def _with_terms(self, query, key, attention_mask, distances, places):
        """Queries, and the mask [1 or B, H, T, S] with the relative terms of the remaining heads in it."""
        if (terms := self._own_terms(query, key, distances, places)) is not None:
            terms = self._own_heads(terms, 1, query.shape[1]).to(query.dtype)
            return query, with_bias(self.config, attention_mask, terms, places if self.is_causal else None)
        return query, self._own_heads(attention_mask, 1, query.shape[1])  # the stack has put in the bias of all layers

    def _own_terms(self, query, key, distances, places):
        """What only this layer adds to the scores, [1 or B, H, T, S], or None."""
        if self.relative_keys is not None:
            return self.relative_keys(query, key, places) * self.scaling
        return None if self.relative_bias is None else self.relative_bias(places, key.shape[2])

    def _check_backend(self) -> None:
        """Refuse an attention backend that knows nothing of what this layer has."""
        if self.softcap is not None:
            refuse_backends(self.config, "paged", "soft cap of scores")
        if other := "layer of fewer heads" if self.is_pruned else getattr(self, "other_cache", None):
            refuse_backends(self.config, ("vllm", "paged"), other)
        if self.has_sinks or self.has_relative_terms:
            what = "attention sink" if self.has_sinks else "relative position term"
            refuse_backends(self.config, ("flash", "vllm", "paged"), what)
