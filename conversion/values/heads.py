"""The size of attention heads, and which of them are pruned."""

from .base import Computed, Value


class HeadDim(Value):
    """The size of a head, which official configs may leave out.

    Args:
        always: whether it is written also where it is `hidden_size / num_attention_heads`.
    """

    def __init__(self, always: bool = True):
        self.always = always

    def read(self, official):
        config = official.config
        return {"head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads}

    def write(self, config, head):
        usual = config.head_dim * config.num_attention_heads == config.hidden_size
        return {"head_dim": config.head_dim} if self.always or not usual else {}


def _write_pruned(config, head):
    pruned = config.pruned_heads or {}
    return {"pruned_heads": {str(layer): heads for layer, heads in pruned.items()}} if pruned else {}


PRUNED_HEADS = Computed(lambda official: {"pruned_heads": official.entries.get("pruned_heads") or None}, _write_pruned)
"""Heads that a checkpoint is without. Official classes of transformers 4 read the entry."""
NOT_PRUNED = "transformers has no layers of fewer heads (pruned_heads) since version 5"
