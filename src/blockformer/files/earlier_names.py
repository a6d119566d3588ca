"""Names that weights had in repos and checkpoints from before 0.1, read under the present ones."""

import re
from collections.abc import Collection, Mapping

# Norms that stood for `pre` and for `post` alike, before a sub-layer could have norms in several places.
_NORMS = {
    "input_layernorm": "self_attn_{placement}_norm",
    "cross_attn_layernorm": "cross_attn_{placement}_norm",
    "post_attention_layernorm": "mlp_{placement}_norm",
}
ARE_READ = "weights have names from before Blockformer 0.1; save_pretrained writes the present names."
NOT_RESUMED = (
    "Trainer cannot resume from such a checkpoint: its optimizer has the weights in another order. Load the model with "
    "from_pretrained(CHECKPOINT) and train it without resume_from_checkpoint, in a new folder"
)
_ANY = re.compile(rf"(?<=\.)({'|'.join(_NORMS)})(?=\.)")


def are_earlier(names: Collection[str]) -> bool:
    """Whether some of these weights have names from before 0.1."""
    return any(map(_ANY.search, names))


def key_mapping(config) -> dict[str, str]:
    """Earlier names as patterns, and today's: what transformers' `key_mapping` takes.

    Args:
        config: of the model that is loaded.
    """
    return {rf"\.{old}\.": f".{new.format(placement=config.norm_placement)}." for old, new in _NORMS.items()}


def renamed(state_dict: Mapping, config) -> dict:
    """A state dict under today's names."""
    return {present_name(name, config.norm_placement): tensor for name, tensor in state_dict.items()}


def present_name(name: str, norm_placement: object) -> str:
    """A weight's name today."""
    return _ANY.sub(lambda found: _NORMS[found[0]].format(placement=norm_placement), name)
