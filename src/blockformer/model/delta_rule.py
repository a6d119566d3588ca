"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2025), in layers that keep a state in place of keys.

A config whose `layer_types` name `linear_attention` has them, and only its repo carries this file. What a head
remembers is a matrix S, of one size however long the text is. A token with query q, key k and value v changes it and
reads it:

    S <- a S,   S <- S + b k (v - S^T k)^T,   output S^T q

The decay a, from 0 to 1, forgets; the step b, from 0 to 1, says how far what is found under k moves towards v.

B batch, T length, G key heads, H value heads, K key size, V value size, N length of a chunk, C hidden size.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .axes import axis, flag
from .blocks import block
from .feed_forward import ACT2FN
from .normalization import RMSNorm
from .runtime import by_package
from .states import Convolution, MatrixStates, states_of

CHUNK = 64


def delta_rule_by_token(query, key, value, decay, step, state):
    """The definition, one token after the other.

    Args:
        query: float32 [B, H, T, K], and `key` likewise.
        value: float32 [B, H, T, V].
        decay: log a, float32 [B, H, T], at most 0.
        step: b, float32 [B, H, T].
        state: S, float32 [B, H, K, V].

    Returns:
        The outputs [B, H, T, V] and the state after the last token.
    """
    outputs = []
    for q, k, v, a, b in zip(*(each.unbind(2) for each in (query, key, value, decay.exp(), step)), strict=True):
        state = state * a[..., None, None]
        found = (k[..., None, :] @ state)[..., 0, :]
        state = state + k[..., None] * (b[..., None] * (v - found))[..., None, :]
        outputs.append((q[..., None, :] @ state)[..., 0, :])
    return torch.stack(outputs, dim=2), state


def delta_rule_of_one(query, key, value, decay, step, state):
    """The same of one token without gradients, which reads the state once and writes the new one over it.

    What a key or a query finds after the decay is a times what it finds before, and a query also finds the change
    under its key: S^T q + (k . q) w.
    """
    factor, pair = decay[..., None].exp(), torch.cat((key, query), dim=2)
    found, read = (pair @ state).mul_(factor).split(1, dim=2)
    change = (value - found).mul_(step[..., None])  # [B, H, 1, V]
    state.mul_(factor).addcmul_(key.transpose(2, 3), change)
    return torch.addcmul(read, (key * query).sum(-1, keepdim=True), change), state


def delta_rule_by_chunk(query, key, value, decay, step, state, sequences=None):
    """The same in chunks, each of which is a few matmuls (section 3.3).

    In a chunk, with A_t the product of the decays up to t, all changes w_t of the state solve one triangular system:
    w_t = b_t (v_t - A_t S^T k_t - sum over s < t of (A_t / A_s) (k_t . k_s) w_s).

    Args:
        query, key, value, decay, step, state: as in `delta_rule_by_token`.
        sequences: int [B, T], which sequence of its row a token belongs to; the state belongs to number 1. Tokens see
            only their own. None: there is one.

    Returns:
        As `delta_rule_by_token`; the state is that of the last sequence.
    """
    length = query.shape[2]
    size = min(CHUNK, length)
    rest = -length % size
    if rest:  # padding by nothing would copy
        query, key, value = (F.pad(each, (0, 0, 0, rest)) for each in (query, key, value))
        decay, step = (F.pad(each, (0, rest)) for each in (decay, step))
    query, key, value, decay, step = (each.unflatten(2, (-1, size)) for each in (query, key, value, decay, step))
    total = decay.cumsum(-1)  # log A, [B, H, T / N, N]
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()  # A_t / A_s, or 0
    reads, writes = total.exp(), (total[..., -1:] - total).exp()
    kept = reads[..., -1]
    if sequences is not None:
        rows = torch.cat((sequences, sequences[:, -1:].expand(-1, rest)), dim=1)
        rows = rows.unflatten(1, (-1, size))[:, None]  # [B, 1, T / N, N]
        ends = rows[..., -1:]
        before = F.pad(ends[..., :-1, :], (0, 0, 1, 0), value=1)  # whose state a chunk begins with
        between = between * (rows[..., :, None] == rows[..., None, :])
        reads, writes = reads * (rows == before), writes * (rows == ends)
        kept = kept * (ends == before)[..., 0]

    stepped = step[..., None] * key
    system = (stepped @ key.transpose(-1, -2)) * between
    # The diagonal, and what is above it, are taken for 1 and 0.
    change, of_state = (
        torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
        for given in (step[..., None] * value, stepped * reads[..., None])
    )
    within = (query @ key.transpose(-1, -2)) * between
    query, key = query * reads[..., None], (key * writes[..., None]).transpose(-1, -2)
    outputs = []
    for chunk in range(query.shape[2]):
        new = change[:, :, chunk] - of_state[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + within[:, :, chunk] @ new)
        state = state * kept[:, :, chunk, None, None] + key[:, :, chunk] @ new
    return torch.cat(outputs, dim=2)[:, :, :length], state


@block(
    "layer_types",
    "linear_attention",
    linear_num_key_heads=axis(4, "a positive integer", "attention", "key heads G of layers with a state"),
    linear_num_value_heads=axis(8, "a positive integer", "attention", "value heads H of layers with a state"),
    linear_key_head_dim=axis(64, "a positive integer", "attention", "size K of a head's keys there"),
    linear_value_head_dim=axis(64, "a positive integer", "attention", "size V of a head's values there"),
    linear_conv_kernel_dim=axis(4, "an integer above 1", "attention", "tokens W that the convolution before them sees"),
    linear_allow_neg_eigval=flag(False, "attention", "steps b there reach from 0 to 2, in place of 1"),
    linear_norm_eps=axis(None, "a positive number", "attention", "of the norm of heads there; None: norm_eps"),
    linear_norm_placement=axis(
        None, ("pre", "output", "pre_output"), "norm", "norm_placement of layers with a state; None: as in the others"
    ),
)
class GatedDeltaRule(MatrixStates):
    """A layer's attention by the gated delta rule.

    Queries, keys and values go through a causal convolution of each channel, an activation, and, except values, a
    norm to length 1. Heads are normed and multiplied by silu(W x). The rule is computed in float32, so that no state
    overflows. Names are as in Qwen3.5, one matrix each.
    """

    rule = "gated delta rule"

    def __init__(self, config, layer_idx: int, is_causal: bool):
        super().__init__(config, layer_idx, config.linear_conv_kernel_dim)
        self.norm_placement = config.linear_norm_placement
        width, self.heads = config.hidden_size, range(config.linear_num_value_heads)
        self.largest_step = 2 if config.linear_allow_neg_eigval else 1
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = config.linear_num_key_heads * self.key_size, len(self.heads) * self.value_size
        self.sizes, self.state_shape = (keys, keys, values), (len(self.heads), self.key_size, self.value_size)
        self.in_proj_q = nn.Linear(width, keys, bias=False)
        self.in_proj_k = nn.Linear(width, keys, bias=False)
        self.in_proj_v = nn.Linear(width, values, bias=False)
        self.in_proj_z = nn.Linear(width, values, bias=False)
        self.in_proj_b = nn.Linear(width, len(self.heads), bias=False)
        self.in_proj_a = nn.Linear(width, len(self.heads), bias=False)
        channels = sum(self.sizes)
        self.conv1d = Convolution(channels, channels, self.window, groups=channels, bias=False)
        self.act = ACT2FN[config.hidden_act]
        self.dt_bias = nn.Parameter(torch.ones(len(self.heads)))
        self.A_log = nn.Parameter(torch.zeros(len(self.heads)))
        self.norm = RMSNorm(self.value_size, config.linear_norm_eps or config.norm_eps)
        self.out_proj = nn.Linear(values, width, bias=False)

    @classmethod
    def check_config(cls, config) -> None:
        """See `StateLayer.check_config`."""
        super().check_config(config)
        values, keys = config.linear_num_value_heads, config.linear_num_key_heads
        if values % keys:
            raise ValueError(f"linear_num_value_heads ({values}) is not a multiple of linear_num_key_heads ({keys}).")

    def init_tensors(self) -> None:
        """Draw the decays of a fresh model, log a = -A softplus(1 + ...) with A from 0 to 16 (Dao and Gu, 2024)."""
        init.ones_(self.dt_bias)
        init.copy_(self.A_log, torch.empty(len(self.heads)).uniform_(0.01, 16).log())

    def mix(self, hidden_states, is_token, sequences, held):
        """See `StateLayer.mix`."""
        projected = torch.cat(
            [proj(hidden_states) for proj in (self.in_proj_q, self.in_proj_k, self.in_proj_v)], dim=-1
        )
        step, decay, gate = (proj(hidden_states) for proj in (self.in_proj_b, self.in_proj_a, self.in_proj_z))
        wide = torch.promote_types(projected.dtype, torch.float32)
        device = hidden_states.device.type
        _, state = states_of(held)
        with torch.autocast("cpu" if device == "meta" else device, enabled=False):
            states = self.act(self.conv1d(projected, self.convolved, sequences, held))
            query, key, value = states.split(self.sizes, dim=-1)
            query, key = (each.unflatten(-1, (-1, self.key_size)) for each in (query, key))
            query, key = self._by_head(_of_length(query, self.key_size**-0.5)), self._by_head(_of_length(key, 1.0))
            value = self._by_head(value.unflatten(-1, (-1, self.value_size)))
            step = step.sigmoid().to(wide)
            step = step if self.largest_step == 1 else self.largest_step * step
            decay = -self.A_log.to(wide).exp() * F.softplus(decay.to(wide) + self.dt_bias.to(wide))
            if is_token is not None:
                step, decay = step * is_token, decay * is_token
            if state is not None and torch.is_grad_enabled():
                state = state.clone()  # the cache writes over it
            elif state is None:
                state = value.new_zeros(*value.shape[:2], self.key_size, self.value_size)
            decay, step = decay.transpose(1, 2), step.transpose(1, 2)
            given = (query, key, value, decay, step, state.to(wide))
            output, state = self.apply_rule(*given, sequences, projected.dtype)
            if held is not None:
                held.update_recurrent_state(state)
            output = self.norm(output.transpose(1, 2).to(self.norm.weight.dtype))  # [B, T, H, V]
            output = output.flatten(2) * F.silu(gate.to(wide))
        return self.out_proj(output.to(projected.dtype))

    @by_package
    def apply_rule(self, query, key, value, decay, step, state, sequences, dtype):
        """Outputs and state as `delta_rule_by_chunk` gives them; the layer's own states are of this dtype."""
        given = (query, key, value, decay, step, state)
        if query.shape[2] > 1:
            return delta_rule_by_chunk(*given, sequences)
        return (delta_rule_by_token if torch.is_grad_enabled() else delta_rule_of_one)(*given)

    def _by_head(self, states):
        """[B, T, G or H, size] -> [B, H, T, size]; key heads are repeated for value heads."""
        states = states.transpose(1, 2)
        times = len(self.heads) // states.shape[1]
        return states.contiguous() if times == 1 else states.repeat_interleave(times, dim=1)


def _of_length(states, length: float):
    """Vectors of this length; very short ones stay short."""
    return states * (torch.rsqrt(states.square().sum(-1, keepdim=True) + 1e-6) * length)
