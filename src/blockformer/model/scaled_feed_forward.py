"""The gated feed-forward network with two factors, as in muP (Falcon-H1; TII, 2025).

A config whose `mlp_type` is `scaled` has it, and only its repo carries this file.
"""

from torch import nn

from .axes import axis
from .blocks import block
from .feed_forward import FeedForward


class ScaledActivation(nn.Module):
    """act(g x) with a factor g."""

    def __init__(self, act: nn.Module, factor: float):
        super().__init__()
        self.act, self.factor = act, factor

    def forward(self, states):
        return self.act(states * self.factor)


@block(
    "mlp_type",
    "scaled",
    mlp_gate_multiplier=axis(1.0, "a positive number", "feed-forward", "factor of what enters the activation"),
    mlp_down_multiplier=axis(1.0, "a positive number", "feed-forward", "factor of the network's output"),
)
class ScaledFeedForward(FeedForward):
    """down(act(g gate(x)) * up(x)) h. Shapes: as in `FeedForward`."""

    tensor_parallel_plan = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}

    def __init__(self, config, inner: int):
        super().__init__(config, inner)
        self.act_fn = ScaledActivation(self.act_fn, config.mlp_gate_multiplier)
        self.after = config.mlp_down_multiplier

    @staticmethod
    def check_config(config) -> None:
        """It has a gate, and is the network of every layer."""
        wrong = {"gated_mlp": not config.gated_mlp, "num_experts": config.num_experts}
        if named := [name for name, is_wrong in wrong.items() if is_wrong]:
            value = getattr(config, named[0])
            raise ValueError(f"mlp_type='scaled' is not supported with {named[0]}={value!r}: leave one of them out.")

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.after
