"""EXAONE 4.0 (LG AI Research, 2025): norms after the sub-layers; with windows, only layers that have one rotate."""

from ..values import Computed, only_sliding_layers_rotate
from .base import Family
from .decoder import DecoderSettings
from .fresh import every, rotary
from .shared import LLAMA


def read_rotating(official):
    """Without a window, all layers rotate."""
    return {"rope_layers": None} if official.config.sliding_window is None else only_sliding_layers_rotate(official)


def write_rotating(config, head):
    """A window that no layer has tells those that do not rotate."""
    return {"sliding_window": None} if config.rope_layers is None and config.sliding_window is None else {}


FAMILY = Family(
    "exaone4",
    "Exaone4ForCausalLM Exaone4Model Exaone4ForSequenceClassification "
    "Exaone4ForTokenClassification Exaone4ForQuestionAnswering",
    structure={**LLAMA, "norm_placement": "output", "qk_norm": True},
    fresh={**rotary(1_000_000.0), **every(4, 4096), **every(4), "norm_eps": 1e-5},
    settings=DecoderSettings(computed=[Computed(read_rotating, write_rotating)]),
)
