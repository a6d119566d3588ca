"""Per-layer embeddings (Gemma team, 2025): each layer takes a narrow vector of the token from a table of its own.

B batch, T length, C hidden size, L layers, P width of a layer's vector.
"""

from dataclasses import dataclass

from torch import nn

from .axes import BLOCKS, Part, axis
from .feed_forward import make_activation
from .normalization import make_norm

# What no test has together with these vectors.
_EXCLUDED = (
    *("add_cross_attention", "bidirectional", "num_nextn_predict_layers", "token_embedding_size", "linear_bits"),
)


@dataclass(eq=False, repr=False)
class TokenInputFields(Part):
    """The field of per-layer embeddings."""

    hidden_size_per_layer_input: int | None = axis(
        None, "a positive integer", "embeddings", "width of the vector that each layer takes of a token, if any"
    )

    def check(self):
        """They are for a decoder's usual layers."""
        if self.hidden_size_per_layer_input is None:
            return
        what = f"hidden_size_per_layer_input={self.hidden_size_per_layer_input}"
        wrong = [name for name in _EXCLUDED if getattr(self, name)]
        wrong += ["residual"] * (self.residual in BLOCKS["residual"])
        wrong += ["layer_types"] * (not BLOCKS["layer_types"].keys().isdisjoint(self.layer_types))
        if wrong:
            value = getattr(self, wrong[0])
            raise ValueError(f"{what} is not supported with {wrong[0]}={value!r}: leave one of the two out.")


class TokenInputs(nn.Module):
    """What all layers take of the tokens: (norm(W x) + the token's vectors * sqrt(P)) / sqrt(2).

    x are the states that enter the first layer, times 1/sqrt(C). Table and matrix hold all layers side by side.
    """

    def __init__(self, config):
        super().__init__()
        self.size = config.hidden_size_per_layer_input
        width = config.num_hidden_layers * self.size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_tokens.initializer_factor = self.size**-0.5
        self.projection = nn.Linear(config.hidden_size, width, bias=False)
        self.projection_scale = config.hidden_size**-0.5
        self.projection.initializer_factor = 1 / self.projection_scale
        self.norm = make_norm(config, self.size)

    def forward(self, input_ids, hidden_states):
        """Tokens int [B, T] and the states [B, T, C] of the first layer's input -> [B, T, L, P]."""
        if input_ids is None:
            fix = "give input_ids in place of inputs_embeds"
            raise ValueError(f"each layer takes a vector of the token (hidden_size_per_layer_input): {fix}.")
        projected = (self.projection(hidden_states) * self.projection_scale).unflatten(-1, (-1, self.size))
        vectors = (self.embed_tokens(input_ids) * self.size**0.5).unflatten(-1, (-1, self.size))
        return (self.norm(projected) + vectors) * 2**-0.5


class TokenInput(nn.Module):
    """A layer's use of its vector: x + norm(W' (act(W x) * vector)). States [B, T, C], vectors [B, T, P]."""

    def __init__(self, config):
        super().__init__()
        width, size = config.hidden_size, config.hidden_size_per_layer_input
        self.input_gate = nn.Linear(width, size, bias=False)
        self.projection = nn.Linear(size, width, bias=False)
        self.act_fn = make_activation(config.hidden_act)
        self.norm = make_norm(config, width)

    def forward(self, hidden_states, vectors):
        return hidden_states + self.norm(self.projection(self.act_fn(self.input_gate(hidden_states)) * vectors))
