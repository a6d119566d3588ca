"""SmolLM3 (Hugging Face, 2025): Llama with some layers that have no positions."""

from .fields import Computed, HeadDim, WindowByLayer
from .llama_like import ALL_ATTENTION_BIASES, LlamaLikeFamily


def read_rotating(official):
    """The official list says 1 where a layer rotates, whatever its name."""
    rotates = [bool(one) for one in official.config.no_rope_layers]
    return {"rope_layers": None if all(rotates) else rotates}


def write_rotating(config, head):
    """The way back."""
    rotates = config.rope_layers or [True] * config.num_hidden_layers
    return {"no_rope_layers": [int(one) for one in rotates]}


FAMILY = LlamaLikeFamily(
    "smollm3",
    "SmolLM3",
    spans="transformer.",
    fields={"attention_bias": ALL_ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
    window=WindowByLayer(),
    head_dim=HeadDim(always=False),
    computed=[Computed(read_rotating, write_rotating)],
)
