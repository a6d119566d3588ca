"""A sigmoid gate on attention's output (Qiu et al., 2025), "Gated Attention for Large Language Models"."""

from torch import nn

from .attention import Attention
from .blocks import block


@block("attention_type", "gated_attention")
class GatedAttention(Attention):
    """Each channel of each head's output times sigmoid(gate(x)), x what the layer's queries are made of."""

    tensor_parallel_plan = {"gate_proj": "colwise"}

    def __init__(self, config, layer_idx, is_causal):
        super().__init__(config, layer_idx, is_causal)
        self.gate_proj = nn.Linear(config.hidden_size, self.q_proj.out_features, bias=False)

    def before_output(self, output, hidden_states):
        return output * self.gate_proj(hidden_states).sigmoid()
