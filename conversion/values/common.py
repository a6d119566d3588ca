"""What configs of both layouts say in the same words, and ids of tokens."""

from typing import Any

from transformers import PretrainedConfig

DROPOUTS = ("hidden_dropout", "attention_dropout", "activation_dropout")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
"""Fields that some official classes leave out."""
ENDS = ("bos_token_id", "eos_token_id")
"""Tokens that begin and end a text. Official classes have them by default, though a small vocabulary lacks them."""
LAST_PLACE = -1
"""The padding token of some old classifiers of decoders: no token is it, so each row is read at its last place."""
COMMON_FIELDS = ("problem_type", "output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward")
"""Of every configuration class: nothing that a model computes with, but part of what a user set."""


def common_entries(config: PretrainedConfig, default_labels: int) -> dict[str, Any]:
    """What a config says in the same words in both layouts: `COMMON_FIELDS`, names of labels, the dtype.

    Args:
        config: of either layout.
        default_labels: how many labels the official class has where nobody says it; ours has two.
    """
    entries = config.to_dict()
    found = {name: entries[name] for name in (*COMMON_FIELDS, "dtype") if entries.get(name) not in (None, "")}
    names = entries.get("id2label")
    usual = names is None or {int(number): name for number, name in names.items()} == {0: "LABEL_0", 1: "LABEL_1"}
    if names is not None and not (usual and default_labels == 2):
        found |= {"id2label": names, "label2id": entries["label2id"]}
    return found


def token_or_none(token: Any) -> Any:
    """A token id, None for the -1 of old files, which means that there is none."""
    return None if isinstance(token, int) and token < 0 else token


def within(token: Any, size: int | None) -> Any:
    """A token id, None where a vocabulary of this size does not have it."""
    return None if isinstance(token, int) and isinstance(size, int) and token >= size else token
