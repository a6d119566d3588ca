"""Selective state spaces (Mamba-2; Dao and Gu, 2024), in layers that keep a state in place of keys.

A config whose `layer_types` name `state_space` has them, and only its repo carries this file. What a head remembers is
a matrix S, of one size however long the text is. A token with query q, key k and value v changes it and reads it:

    S <- a S + d k v^T,   output S^T q + D v,   a = exp(-A d)

The step d, from 0 on, says how much of the token is written, and with a rate A of the head how much is forgotten. The
article calls q, k and v C, B and x. As keys and values in attention, a group of heads shares queries and keys.

B batch, T length, G groups, R heads in a group, K key size, V value size, N length of a chunk, C hidden size.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .axes import axis, flag
from .blocks import block
from .feed_forward import ACT2FN
from .states import Convolution, MatrixStates, states_of

CHUNK = 64
RATES, STEPS = (1.0, 16.0), (0.001, 0.1)  # of a fresh layer, as in the article's code


def scan_by_token(query, key, value, decay, state):
    """The definition, one token after the other.

    Args:
        query: float32 [B, G, T, K], and `key` likewise.
        value: d v, float32 [B, G, T, R, V].
        decay: log a, float32 [B, G, T, R], at most 0.
        state: S, float32 [B, G, K, R, V].

    Returns:
        The outputs S^T q [B, G, T, R, V] and the state after the last token.
    """
    outputs = []
    for q, k, v, a in zip(*(each.unbind(2) for each in (query, key, value, decay.exp())), strict=True):
        state = state * a[:, :, None, :, None] + k[..., None, None] * v[:, :, None]
        outputs.append((q[..., None, None] * state).sum(2))
    return torch.stack(outputs, dim=2), state


def scan_of_one(query, key, value, decay, state):
    """The same of one token without gradients, which writes the new state over the old one."""
    state.mul_(decay.exp()[:, :, :, :, None])  # T = 1 stands where K does
    state.flatten(-2).addcmul_(key.transpose(2, 3), value.flatten(-2))
    return (query @ state.flatten(-2)).unflatten(-1, value.shape[3:]), state


def scan_by_chunk(query, key, value, decay, state, sequences=None):
    """The same in chunks, each of which is a few matmuls (section 6).

    With A_t the product of a chunk's decays up to t, a token gets A_t S^T q_t from the state before the chunk and
    (A_t / A_s) (q_t . k_s) v_s from each token s up to itself.

    Args:
        query, key, value, decay, state: as in `scan_by_token`.
        sequences: int [B, T], which sequence of its row a token belongs to; the state belongs to number 1. Tokens see
            only their own. None: there is one.

    Returns:
        As `scan_by_token`; the state is that of the last sequence.
    """
    length, heads = value.shape[2:4]
    size = min(CHUNK, length)
    rest = -length % size
    if rest:  # padding by nothing would copy
        query, key, decay = (F.pad(each, (0, 0, 0, rest)) for each in (query, key, decay))
        value = F.pad(value, (0, 0, 0, 0, 0, rest))
    query, key, value, decay = (each.unflatten(2, (-1, size)) for each in (query, key, value, decay))
    total = decay.cumsum(3)  # log A, [B, G, T / N, N, R]
    by_head = total.transpose(3, 4)
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    between = (by_head[..., :, None] - by_head[..., None, :]).masked_fill(later, -torch.inf).exp()  # A_t / A_s, or 0
    reads, writes = total.exp(), (total[..., -1:, :] - total).exp()
    kept = reads[..., -1, :]
    if sequences is not None:
        rows = torch.cat((sequences, sequences[:, -1:].expand(-1, rest)), dim=1)
        rows = rows.unflatten(1, (-1, size))[:, None]  # [B, 1, T / N, N]
        ends = rows[..., -1:]
        before = F.pad(ends[..., :-1, :], (0, 0, 1, 0), value=1)  # whose state a chunk begins with
        between = between * (rows[..., :, None] == rows[..., None, :])[..., None, :, :]
        reads, writes = reads * (rows == before)[..., None], writes * (rows == ends)[..., None]
        kept = kept * (ends == before)

    within = (query @ key.transpose(-1, -2))[..., None, :, :] * between
    within = (within @ value.transpose(3, 4)).transpose(3, 4)  # [B, G, T / N, N, R, V]
    written = key.transpose(-1, -2) @ (value * writes[..., None]).flatten(-2)  # [B, G, T / N, K, R V]
    outputs = []
    for chunk in range(query.shape[2]):
        read = (query[:, :, chunk] @ state.flatten(-2)).unflatten(-1, (heads, -1))
        outputs.append(within[:, :, chunk] + read * reads[:, :, chunk, :, :, None])
        new = written[:, :, chunk].unflatten(-1, (heads, -1))
        state = state * kept[:, :, chunk, None, :, None] + new
    return torch.cat(outputs, dim=2)[:, :, :length], state


class GatedGroupNorm(nn.Module):
    """norm(x silu(z)): an RMS norm of each of some equal groups of channels, computed in float32 at least.

    Shapes: twice [..., size] -> [..., size]. With `gates_last` norm(x) silu(z).
    """

    def __init__(self, size: int, groups: int, eps: float, gates_last: bool):
        super().__init__()
        self.groups, self.eps, self.gates_last = groups, eps, gates_last
        self.weight = nn.Parameter(torch.ones(size))

    def init_tensors(self) -> None:
        """A fresh norm has the factor 1."""
        init.ones_(self.weight)

    def forward(self, states, gate):
        states = (states if self.gates_last else states * F.silu(gate)).unflatten(-1, (self.groups, -1))
        states = self.weight * F.rms_norm(states, states.shape[-1:], eps=self.eps).flatten(-2).to(self.weight.dtype)
        return states * F.silu(gate) if self.gates_last else states


OUTPUT_NORMS = ("after_gate", "before_gate", "none")
FIELDS = {
    "mamba_n_heads": axis(16, "a positive integer", "attention", "heads H of layers with a state space"),
    "mamba_d_head": axis(64, "a positive integer", "attention", "size V of a head's values there"),
    "mamba_d_state": axis(128, "a positive integer", "attention", "size K of queries and keys there"),
    "mamba_n_groups": axis(1, "a positive integer", "attention", "groups G of heads that share queries and keys there"),
    "mamba_d_conv": axis(4, "an integer above 1", "attention", "tokens W that the convolution before them sees"),
    "mamba_hidden_act": axis("silu", tuple(ACT2FN), "attention", "activation after that convolution"),
    "mamba_output_norm": axis("after_gate", OUTPUT_NORMS, "attention", "norm(x silu(z)), norm(x) silu(z) or x silu(z)"),
    "mamba_step_min": axis(0.0, "a number of 0 or more", "attention", "least step d there"),
    "mamba_conv_bias": flag(True, "attention", "bias of that convolution"),
    "mamba_proj_bias": flag(False, "attention", "biases of the other maps of layers with a state space"),
}
"""The fields of a state space, in each type of layer that has one."""


@block(
    "layer_types",
    "state_space",
    **FIELDS,
    mlp_layers=axis(None, "a list", "feed-forward", "whether each layer has a feed-forward network; None: all have"),
)
class StateSpace(MatrixStates):
    """A layer's attention by a selective state space.

    Queries, keys and values go through a causal convolution of each channel and an activation. What heads read is
    multiplied by silu(z) and normed. States are computed in float32, so that none overflows.
    """

    rule = "selective state space"

    def __init__(self, config, layer_idx: int, is_causal: bool):
        super().__init__(config, layer_idx, config.mamba_d_conv)
        width, bias = config.hidden_size, config.mamba_proj_bias
        self.heads, self.groups = range(config.mamba_n_heads), config.mamba_n_groups
        self.key_size, self.value_size = config.mamba_d_state, config.mamba_d_head
        keys, values = self.groups * self.key_size, len(self.heads) * self.value_size
        self.sizes = (values, keys, keys)
        self.state_shape = (self.groups, self.key_size, len(self.heads) // self.groups, self.value_size)
        self.in_proj_z = nn.Linear(width, values, bias=bias)
        self.in_proj_v = nn.Linear(width, values, bias=bias)
        self.in_proj_k = nn.Linear(width, keys, bias=bias)
        self.in_proj_q = nn.Linear(width, keys, bias=bias)
        self.in_proj_dt = nn.Linear(width, len(self.heads), bias=bias)
        channels = sum(self.sizes)
        self.conv1d = Convolution(channels, channels, self.window, groups=channels, bias=config.mamba_conv_bias)
        self.act, self.least_step = ACT2FN[config.mamba_hidden_act], config.mamba_step_min
        self.dt_bias = nn.Parameter(torch.ones(len(self.heads)))
        self.A_log = nn.Parameter(torch.zeros(len(self.heads)))
        self.D = nn.Parameter(torch.ones(len(self.heads)))
        has_norm, gates_last = config.mamba_output_norm != "none", config.mamba_output_norm == "before_gate"
        self.norm = GatedGroupNorm(values, self.groups, config.norm_eps, gates_last) if has_norm else None
        self.out_proj = nn.Linear(values, width, bias=bias)

    @classmethod
    def check_config(cls, config) -> None:
        """See `StateLayer.check_config`."""
        super().check_config(config)
        heads, groups = config.mamba_n_heads, config.mamba_n_groups
        if heads % groups:
            raise ValueError(f"mamba_n_heads ({heads}) is not a multiple of mamba_n_groups ({groups}).")
        if (has := config.mlp_layers) is None:
            return
        is_list = isinstance(has, list) and all(isinstance(each, bool) for each in has)
        if not is_list or len(has) != config.num_hidden_layers:
            raise ValueError(f"mlp_layers must list a bool for each layer, not {has!r}.")
        if config.residual != "sequential":
            raise ValueError(f"mlp_layers is not supported with residual={config.residual!r}: leave one of them out.")

    def init_tensors(self) -> None:
        """Draw rates A and steps d of all sizes for a fresh model; a step is softplus of its bias and what is added."""
        count = len(self.heads)
        steps = torch.empty(count).uniform_(*map(math.log, STEPS)).exp()
        init.copy_(self.dt_bias, steps.expm1().log())
        init.copy_(self.A_log, torch.empty(count).uniform_(*RATES).log())
        init.ones_(self.D)

    def projected(self, hidden_states) -> list[torch.Tensor]:
        """Gates z, values, keys, queries and what is added to the steps, each [B, T, its channels], of the states."""
        return [getattr(self, f"in_proj_{name}")(hidden_states) for name in ("z", "v", "k", "q", "dt")]

    def mix(self, hidden_states, is_token, sequences, held):
        """See `StateLayer.mix`."""
        gate, *maps, step = self.projected(hidden_states)
        projected = torch.cat(maps, dim=-1)
        if is_token is not None and self.out_proj.bias is not None:
            projected = projected * is_token  # a bias makes padding count
        wide = torch.promote_types(projected.dtype, torch.float32)
        device = hidden_states.device.type
        _, state = states_of(held)
        with torch.autocast("cpu" if device == "meta" else device, enabled=False):
            states = self.conv1d(projected, self.convolved, sequences, held)
            values, key, query = self.act(states).split(self.sizes, dim=-1)
            key, query = (each.unflatten(-1, (self.groups, -1)).transpose(1, 2) for each in (key, query))
            values = values.unflatten(-1, (self.groups, -1, self.value_size))  # [B, T, G, R, V]
            step = F.softplus(step.to(wide) + self.dt_bias.to(wide)).clamp(min=self.least_step)
            if is_token is not None:
                step = step * is_token
            decay = (-self.A_log.to(wide).exp() * step).unflatten(-1, (self.groups, -1)).transpose(1, 2)
            written = (values * step.unflatten(-1, (self.groups, -1))[..., None]).transpose(1, 2)
            if state is not None and torch.is_grad_enabled():
                state = state.clone()  # the cache writes over it
            elif state is None:
                state = written.new_zeros(*written.shape[:2], self.key_size, *written.shape[3:])
            given = (query, key, written, decay, state.to(wide))
            if query.shape[2] > 1:
                output, state = scan_by_chunk(*given, sequences)
            else:
                output, state = (scan_by_token if torch.is_grad_enabled() else scan_of_one)(*given)
            if held is not None:
                held.update_recurrent_state(state)
            output = output.transpose(1, 2) + values * self.D.to(wide).unflatten(0, (self.groups, -1))[..., None]
            output, gate = output.flatten(2), gate.to(wide)
            output = output * F.silu(gate) if self.norm is None else self.norm(output, gate)
        return self.out_proj(output.to(projected.dtype))
