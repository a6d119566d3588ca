"""A gated linear recurrence (Martin and Cundy, 2018; the layer of HGRN, Qin et al., 2023) in place of attention."""

import torch
from torch import nn
from torch.nn import functional as F

from .axes import axis
from .blocks import block
from .states import StateLayer


@block(
    "layer_types",
    "gated_recurrence",
    recurrence_floor=axis(0.0, "a probability from 0 to 1", "attention", "the least that a state keeps at each token"),
)
class GatedRecurrence(StateLayer):
    """h <- a h + (1 - a) v for each channel, with a = floor + (1 - floor) sigmoid(W x); the output is h silu(W' x)."""

    def __init__(self, config, layer_idx, is_causal):
        super().__init__(config, layer_idx)
        width = config.hidden_size
        self.state_shape, self.floor = (width,), config.recurrence_floor
        self.decay_proj = nn.Linear(width, width)
        self.value_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def mix(self, hidden_states, is_token, sequences, held):
        kept = self.floor + (1 - self.floor) * self.decay_proj(hidden_states).float().sigmoid()  # a, [B, T, C]
        if is_token is not None:
            kept = torch.where(is_token != 0, kept, 1.0)  # padding leaves the state as it was
        values = (1 - kept) * self.value_proj(hidden_states)
        if sequences is not None:  # the first token of another text forgets the one before
            kept = kept.masked_fill((F.pad(sequences, (1, -1), value=1) != sequences)[..., None], 0.0)
        state, states = self.state_in(held, hidden_states), []  # [B, C]
        for one_kept, value in zip(kept.unbind(1), values.unbind(1), strict=True):
            state = one_kept * state + value
            states.append(state)
        self.keep(held, state)
        return self.out_proj(torch.stack(states, dim=1).to(hidden_states.dtype) * F.silu(self.gate_proj(hidden_states)))
