"""Multi-head latent attention, MLA (DeepSeek-AI, 2024): keys and values of all heads come from one vector a token.

B batch, T query length, S key length, H heads, D head size (R of it turn), V value size, L latent size, C hidden size.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .attention import Attention, AttentionFields
from .axes import axis
from .normalization import RMSNorm
from .positions import rotate
from .rotary import RotaryFields, rotary_size

OF_LATENTS = ("q_lora_rank", "v_head_dim", "latent_norm_eps")  # fields that need `kv_lora_rank`
_EXCLUDED = (  # of other attention: nothing that is tested has both
    *("attention_type", "qk_norm", "attn_logit_softcapping", "attention_sinks", "clip_qkv", "sliding_window"),
    *("pruned_heads", "add_cross_attention", "linear_bits", "rope_layers", "attention_gate"),
)


@dataclass(eq=False, repr=False)
class LatentFields(RotaryFields, AttentionFields):
    """The fields of latent attention."""

    kv_lora_rank: int | None = axis(None, "a positive integer", "attention", "latent size L of keys and values, if any")
    q_lora_rank: int | None = axis(None, "a positive integer", "attention", "latent size of queries, if any")
    v_head_dim: int | None = axis(None, "a positive integer", "attention", "size V of a latent value; None: head_dim")
    latent_norm_eps: float | None = axis(None, "a positive number", "attention", "norm_eps of latent vectors, if other")

    def fill_defaults(self):
        """Values as wide as queries and keys."""
        self.v_head_dim = self.v_head_dim or (self.head_dim if self.kv_lora_rank else None)

    def check(self):
        """One key and one value per query head; a part of each head turns, since a latent vector cannot."""
        if self.kv_lora_rank is None:
            if idle := [name for name in OF_LATENTS if getattr(self, name) is not None]:
                raise ValueError(f"{idle[0]} is set but kv_lora_rank is None: set both or neither.")
            return
        wrong = [name for name in _EXCLUDED if getattr(self, name)]
        wrong += ["num_key_value_heads"] * (self.num_key_value_heads != self.num_attention_heads)
        if wrong:
            raise ValueError(f"{wrong[0]}={getattr(self, wrong[0])!r} does not work with kv_lora_rank: leave it out.")

    def fill_rope_parameters(self, given, rope_theta):
        """Some channels of each head turn, and some do not."""
        super().fill_rope_parameters(given, rope_theta)
        rope, size = self.rope_parameters or {}, self.head_dim or 0
        if self.kv_lora_rank is not None and ("rope_type" not in rope or rotary_size(rope, size) == size):
            fix = "set position_type='rotary' and one dict of rope_parameters, with a partial_rotary_factor below 1"
            raise ValueError(f"kv_lora_rank needs rotary positions that turn a part of each head: {fix}.")

    @property
    def qk_head_dim(self) -> int | None:
        """The size of queries and keys; the library takes a config with it for one with latent vectors."""
        return self.head_dim if self.kv_lora_rank else None


class LatentAttention(Attention):
    """Attention whose keys and values are made from a latent vector, which the cache keeps in their place.

    With c = norm(W x), the latent vector of a token x, a head's key is a part that all heads share, W' x rotated, and
    its own part, W" c. Its value is made from c, too. Queries may have another latent vector.
    """

    projects_states, other_cache = False, "cache of latent vectors"

    def add_projections(self, config, is_causal):
        """As in the usual attention, but from latent vectors to heads, and before that from states to them."""
        width, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        latent, rotated = config.kv_lora_rank, rotary_size(config.rope_parameters, config.head_dim)
        eps = config.norm_eps if config.latent_norm_eps is None else config.latent_norm_eps
        self.cached_numbers = latent + rotated if is_causal else 0
        self.paged_numbers = heads * (config.head_dim + config.v_head_dim)  # `generate_batch` keeps keys and values
        self.kv_a_proj = nn.Linear(width, latent, bias)
        self.kv_a_norm = RMSNorm(latent, eps)
        self.k_rope_proj = nn.Linear(width, rotated, bias)
        self.k_proj = nn.Linear(latent, heads * (config.head_dim - rotated), bias=False)
        self.v_proj = nn.Linear(latent, heads * config.v_head_dim, bias=False)
        if config.q_lora_rank is not None:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias)
            self.q_a_norm = RMSNorm(config.q_lora_rank, eps)
        self.q_proj = nn.Linear(config.q_lora_rank or width, heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, width, config.attention_output_bias)

    def states_of(self, hidden_states, key_value_states, position_embeddings, past_key_values, kwargs, earlier=None):
        """States [B, T, C] -> what `with_heads` gives. A cache keeps what it is given, one head of keys and values."""
        latents = self.kv_a_norm(self.kv_a_proj(hidden_states))[:, None]
        shared = rotate(self.k_rope_proj(hidden_states)[:, None], *position_embeddings[:2])
        latents, shared = self._with_past(latents, shared, past_key_values, kwargs)
        if self.config.q_lora_rank is not None:
            hidden_states = self.q_a_norm(self.q_a_proj(hidden_states))
        query = rotate(self._split_heads(self.q_proj(hidden_states)), *position_embeddings[:2])
        query = query * position_embeddings[2] if position_embeddings[2:] else query
        return self.with_heads(query, latents, shared)

    def with_heads(self, query, latents, shared):
        """[B, H, T, D], [B, 1, S, L], [B, 1, S, R] -> queries, keys [B, H, S, D] and values [B, H, S, V]."""
        own = self.k_proj(latents[:, 0]).unflatten(-1, (-1, self.head_dim - shared.shape[-1])).transpose(1, 2)
        value = self.v_proj(latents[:, 0]).unflatten(-1, (-1, self.config.v_head_dim)).transpose(1, 2)
        return query, torch.cat((shared.expand(-1, own.shape[1], -1, -1), own), dim=-1), value
