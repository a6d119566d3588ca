"""Attention and a selective state space in one layer, which read the same states and are added (Falcon-H1; TII, 2025).

A config whose `layer_types` name `attention_and_state_space` has such
layers, and only its repo carries this file. With x the states,

    attention(a x) b + state_space(c x) d

with a factor each, as in muP; the state space's five maps and attention's keys have one each as well.

B batch, T length, C hidden size.
"""

from typing import ClassVar

from .attention import Attention
from .axes import axis
from .blocks import block, causal_mask_of
from .state_space import FIELDS, StateSpace
from .states import StateLayer

KIND = "attention_and_state_space"
FACTOR = "a positive number"
MAPS = 5
OF_HYBRID = "key_multiplier"
"""A field that configs with such layers have, and no others."""


class ScaledStateSpace(StateSpace):
    """A state space whose input, and whose five maps of it, have a factor each; its output, too."""

    kind, has_keys = KIND, True

    def __init__(self, config, layer_idx: int, is_causal: bool):
        super().__init__(config, layer_idx, is_causal)
        self.before, self.after = config.ssm_in_multiplier, config.ssm_out_multiplier
        self.factors = config.ssm_multipliers or [1.0] * MAPS

    @classmethod
    def check_config(cls, config) -> None:
        """See `StateLayer.check_config`."""
        super().check_config(config)
        factors = config.ssm_multipliers
        if factors is not None and (len(factors) != MAPS or not all(isinstance(each, int | float) for each in factors)):
            raise ValueError(f"ssm_multipliers must list a number for each of z, v, k, q and dt, not {factors!r}.")

    def projected(self, hidden_states):
        """See `StateSpace.projected`."""
        maps = super().projected(hidden_states * self.before)
        return [each * factor for each, factor in zip(maps, self.factors, strict=True)]

    def mix(self, hidden_states, is_token, sequences, held):
        """See `StateLayer.mix`."""
        return super().mix(hidden_states, is_token, sequences, held) * self.after


@block(
    "layer_types",
    KIND,
    **FIELDS,
    key_multiplier=axis(1.0, FACTOR, "attention", "factor of keys in layers that add a state space"),
    attention_in_multiplier=axis(1.0, FACTOR, "attention", "factor of what attention reads there"),
    attention_out_multiplier=axis(1.0, FACTOR, "attention", "factor of what attention adds there"),
    ssm_in_multiplier=axis(1.0, FACTOR, "attention", "factor of what a state space reads there"),
    ssm_out_multiplier=axis(1.0, FACTOR, "attention", "factor of what a state space adds there"),
    ssm_multipliers=axis(None, "a list", "attention", "factors of its z, v, k, q and dt there; None: 1 each"),
)
class AttentionAndStates(Attention):
    """A layer's attention that also has a state space (`state_space`), whose output is added to its own."""

    library_type, is_stateful = "hybrid", True
    tensor_parallel_plan: ClassVar[dict] = {}  # attention's names are shared as usual
    check_config = ScaledStateSpace.check_config

    def __init__(self, config, layer_idx: int, is_causal: bool):
        super().__init__(config, layer_idx, is_causal)
        self.before, self.after = config.attention_in_multiplier, config.attention_out_multiplier
        self.key_factor = config.key_multiplier
        self.state_space = ScaledStateSpace(config, layer_idx, is_causal)

    @staticmethod
    def mask_of(inputs, config):
        """What these layers get as `attention_mask`: attention's mask, and what says which tokens a state sees."""
        return causal_mask_of(inputs, config), StateLayer.mask_of(inputs)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, head_mask=None, **kwargs):
        """States [B, T, C] -> states [B, T, C], and the probabilities of attention. See `Attention.forward`.

        Args:
            attention_mask: a pair, see `mask_of`.
        """
        mask, tokens = (None, None) if attention_mask is None else attention_mask
        given = {"past_key_values": past_key_values, "head_mask": head_mask}
        added, _ = self.state_space(hidden_states, tokens, **given)
        states, probabilities = super().forward(hidden_states * self.before, mask, **given, **kwargs)
        return states * self.after + added, probabilities

    def before_cache(self, key, value, earlier):
        """See `Attention.before_cache`. A factor of keys commutes with their rotation."""
        return key * self.key_factor, value
