"""What stands for a whole row of tokens, for a head to read.

B batch, T length, C hidden size.
"""

import torch


def head_dropout(config) -> float:
    """The dropout before a classification head."""
    return config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout


def last_token_states(config, states, input_ids, attention_mask):
    """Each row's state at its last real token, whichever side is padded: [B, T, C] -> [B, C].

    Args:
        attention_mask: [B, T] of 0 and 1; without one the end is told by `config.pad_token_id` in `input_ids` [B, T].

    Raises:
        ValueError: several rows and neither to tell where they end.
    """
    batch, length = states.shape[:2]
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        real = attention_mask[:, -length:].to(states.device) != 0
    elif input_ids is not None and config.pad_token_id is not None:
        real = input_ids.to(states.device) != config.pad_token_id
    elif batch == 1:
        return states[:, -1]
    else:
        raise ValueError("several rows, and nothing tells where each ends: give attention_mask or set pad_token_id.")
    last = (torch.arange(length, device=states.device) * real).argmax(-1)
    return states[torch.arange(batch, device=states.device), last]
