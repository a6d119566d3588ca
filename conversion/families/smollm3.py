"""SmolLM3 (Hugging Face, 2025): Llama with some layers that have no positions."""

from ..values import Computed
from .base import Family
from .decoder import DecoderSettings
from .fresh import every, rotary
from .shared import LLAMA


def read_rotating(official):
    """The official list says 1 where a layer rotates, whatever its name."""
    rotates = [bool(one) for one in official.config.no_rope_layers]
    return {"rope_layers": None if all(rotates) else rotates}


def write_rotating(config, head):
    """The way back."""
    rotates = config.rope_layers or [True] * config.num_hidden_layers
    return {"no_rope_layers": [int(one) for one in rotates]}


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM SmolLM3Model SmolLM3ForSequenceClassification "
    "SmolLM3ForTokenClassification SmolLM3ForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(2_000_000.0), **every(4), "tie_word_embeddings": True},
    settings=DecoderSettings(
        computed=[Computed(read_rotating, write_rotating)],
    ),
)
