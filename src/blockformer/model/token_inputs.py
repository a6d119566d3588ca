"""Per-layer embeddings (Gemma team, 2025): each layer takes a narrow vector of the token from its own table.

Also what such layers differ in besides: the widths of their networks, and a stored factor of their results; and the
projection that models of them may end in.

B batch, T length, C hidden size, L layers, P width of a layer's vector.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init

from .axes import BLOCKS, axis, flag, is_integer
from .feed_forward import FeedForwardFields, make_activation
from .normalization import make_norm

# Fields that change what each layer takes, has or does -> what no test has together with them.
OF_LAYERS = {
    "hidden_size_per_layer_input": (
        *("add_cross_attention", "num_nextn_predict_layers", "token_embedding_size", "linear_bits"),
    ),
    "intermediate_sizes": ("num_experts", "mlp_type", "linear_bits", "num_nextn_predict_layers"),
    "layer_scale": ("num_nextn_predict_layers",),
}
# The same of a projection after the last norm.
OF_PROJECTION = ("token_embedding_size", "num_nextn_predict_layers", "tie_word_embeddings", "linear_bits")


@dataclass(eq=False, repr=False)
class TokenInputFields(FeedForwardFields):
    """The fields of per-layer embeddings, and of layers of several widths."""

    hidden_size_per_layer_input: int | None = axis(
        None, "a positive integer", "embeddings", "width of a token's vector in each layer, if any"
    )
    intermediate_sizes: list | None = axis(
        None, "a list", "feed-forward", "inner width of the network of each layer; None: intermediate_size"
    )
    token_input_table: bool = flag(True, "embeddings", "the layers' token vectors have a table, too")
    final_projection_size: int | None = axis(
        None, "a positive integer", "size", "width of the final states, projected after the last norm; None: C"
    )
    layer_scale: bool = flag(False, "feed-forward", "each layer's output times a stored number that does not train")

    def check(self):
        """They are for a decoder's usual layers, of which each has a width."""
        super().check()
        named = [name for name in OF_LAYERS if getattr(self, name)]
        for field in named:
            wrong = [name for name in OF_LAYERS[field] if getattr(self, name)]
            if field != "intermediate_sizes":
                wrong += ["residual"] * (self.residual != "sequential")
                wrong += ["layer_types"] * (not BLOCKS["layer_types"].keys().isdisjoint(self.layer_types))
            if wrong:
                what = f"{field}={getattr(self, field)!r} is not supported with {wrong[0]}={getattr(self, wrong[0])!r}"
                raise ValueError(f"{what}: leave one of the two out.")
        self._check_projection()
        sizes, count = self.intermediate_sizes, self.num_hidden_layers
        if sizes is None:
            return
        if not isinstance(sizes, list) or [is_integer(size) and size > 0 for size in sizes] != [True] * count:
            many = f"each of the {count} layers"
            raise ValueError(f"intermediate_sizes must list a positive integer for {many}, not {sizes!r}.")
        self.intermediate_sizes = None if {*sizes} == {self.intermediate_size} else sizes

    def _check_projection(self) -> None:
        """Nothing reads or writes tokens by these states, which are of another width than their vectors."""
        if not self.token_input_table and not self.hidden_size_per_layer_input:
            raise ValueError("token_input_table=False needs hidden_size_per_layer_input: set both or neither.")
        for name in OF_PROJECTION if self.final_projection_size else ():
            if getattr(self, name):
                what = f"final_projection_size={self.final_projection_size} is not supported with {name}"
                raise ValueError(f"{what}={getattr(self, name)!r}: leave one of the two out.")

    @property
    def output_size(self) -> int:
        """See `BlockformerConfig.output_size`."""
        return self.final_projection_size or self.token_embedding_size or self.hidden_size

    def inner_width_of(self, is_causal, layer_idx=None):
        """See `FeedForwardFields.inner_width_of`."""
        sizes = self.intermediate_sizes
        if not isinstance(sizes, list) or layer_idx is None:
            return max([self.intermediate_size, *filter(is_integer, sizes if isinstance(sizes, list) else ())])
        return sizes[layer_idx]


class TokenInputs(nn.Module):
    """What all layers take of the tokens: (norm(W x) + the token's vectors * sqrt(P)) / sqrt(2), or only norm(W x).

    x are the states that enter the first layer, times 1/sqrt(C). Table and matrix hold all layers side by side.
    """

    def __init__(self, config):
        super().__init__()
        self.size = config.hidden_size_per_layer_input
        width = config.num_hidden_layers * self.size
        table = (config.vocab_size, width, config.pad_token_id if config.pad_token_learns is False else None)
        self.embed_tokens = nn.Embedding(*table) if config.token_input_table else None
        if self.embed_tokens is not None:
            self.embed_tokens.initializer_factor = self.size**-0.5
        self.projection = nn.Linear(config.hidden_size, width, bias=False)
        self.projection_scale = config.hidden_size**-0.5
        self.projection.initializer_factor = 1 / self.projection_scale
        self.norm = make_norm(config, self.size)

    def forward(self, input_ids, hidden_states):
        """Tokens int [B, T] and the states [B, T, C] of the first layer's input -> [B, T, L, P]."""
        if self.embed_tokens is not None and input_ids is None:
            fix = "pass input_ids, not inputs_embeds"
            raise ValueError(f"each layer reads a vector of the token (hidden_size_per_layer_input): {fix}.")
        projected = (self.projection(hidden_states) * self.projection_scale).unflatten(-1, (-1, self.size))
        if self.embed_tokens is None:
            return self.norm(projected)
        vectors = (self.embed_tokens(input_ids) * self.size**0.5).unflatten(-1, (-1, self.size))
        return (self.norm(projected) + vectors) * 2**-0.5

    def resize_tables(self, resized, count: int, mean_resizing: bool) -> None:
        """Take `count` rows, by the library's function that gives a table of another size."""
        if self.embed_tokens is not None:
            self.embed_tokens = resized(self.embed_tokens, count, mean_resizing=mean_resizing)


class LayerEnd(nn.Module):
    """What a layer does last: x + norm(W' (act(W x) * vector)), if it takes a vector of the token, times a factor.

    Shapes: states [B, T, C], vectors [B, T, P] -> [B, T, C].
    """

    def __init__(self, config):
        super().__init__()
        width, self.size = config.hidden_size, config.hidden_size_per_layer_input
        if self.size:
            self.input_gate = nn.Linear(width, self.size, bias=False)
            self.projection = nn.Linear(self.size, width, bias=False)
            self.act_fn = make_activation(config.hidden_act)
            self.norm = make_norm(config, width)
        self.scale = nn.Buffer(torch.ones(1)) if config.layer_scale else None

    def init_tensors(self) -> None:
        """A fresh layer has the factor 1."""
        if self.scale is not None:
            init.ones_(self.scale)

    def forward(self, hidden_states, vectors=None):
        if self.size:
            gated = self.act_fn(self.input_gate(hidden_states)) * vectors
            hidden_states = hidden_states + self.norm(self.projection(gated))
        return hidden_states if self.scale is None else hidden_states * self.scale
