"""The inputs of a model, each described once: the argument of `forward`, its title, its length and an example.

What compares models, draws them or tests them reads this. What `forward` refuses is in `model/input_checks.py`.

B batch, T length, C hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TYPES = {"token_type_ids": "type_vocab_size", "task_type_ids": "task_type_vocab_size"}
"""Argument -> the field that says how many types there are."""


@dataclass(frozen=True)
class ModelInput:
    """An argument of `forward` that holds what a model reads.

    Attributes:
        name: the argument.
        title: what it holds, in words.
        kind: "tokens", "types" or "states".
        size: how many tokens or types there are, or the width C of states.
        of_source: whether it has the length of the source that cross-attention looks at, not of the text.
    """

    name: str
    title: str
    kind: str
    size: int
    of_source: bool = False

    def example(self, rows: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Tokens or types int64 [B, T], or states [B, T, C]: random ones, or zeros without a generator."""
        if self.kind == "states":
            shape = (rows, length, self.size)
            return torch.zeros(shape) if generator is None else torch.randn(shape, generator=generator)
        if generator is None:
            return torch.zeros(rows, length, dtype=torch.long)
        return torch.randint(self.size, (rows, length), generator=generator)


def inputs_of(config) -> tuple[ModelInput, ...]:
    """The inputs of a config's models, the main one first; without masks and positions, which follow from them."""
    if config.is_encoder_decoder:
        source, target = (config.stack_sizes(is_decoder)[1] for is_decoder in (False, True))
        return (
            ModelInput("input_ids", "source tokens", "tokens", source, of_source=True),
            ModelInput("decoder_input_ids", "target tokens", "tokens", target),
        )
    inputs = [ModelInput("input_ids", "tokens", "tokens", config.vocab_size)]
    for name, field in TYPES.items():
        if count := getattr(config, field, 0):
            inputs.append(ModelInput(name, f"{name.removesuffix('_ids').replace('_', ' ')}s", "types", count))
    if getattr(config, "add_cross_attention", False):
        inputs.append(
            ModelInput("encoder_hidden_states", "source states", "states", config.hidden_size, of_source=True)
        )
    return tuple(inputs)
