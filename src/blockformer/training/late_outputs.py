"""Outputs of a language model whose logits are computed when they are first read. V vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    ModelOutput,
    MoeCausalLMOutputWithPast,
    Seq2SeqLMOutput,
)

from ..model.modeling_encoder import PreTrainingOutput


class DeferredLogits:
    """Logits that nobody has read yet. `LateOutput` puts the tensor in its place on the first read.

    Args:
        compute: returns the logits.
        weight: the head's weight. If it changes before the logits are read, they would belong to another model.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], weight: torch.Tensor):
        self._compute, self._weight = compute, weight
        self._seen = (weight._version, weight.shape)

    def __call__(self) -> torch.Tensor:
        """The logits [..., V].

        Raises:
            RuntimeError: the head's weight has changed (an optimizer step) or was sharded again after the forward.
        """
        if (self._weight._version, self._weight.shape) != self._seen:
            raise RuntimeError(
                "the weights have changed since this output was made: read its logits before the optimizer steps, or "
                "call the model with return_logits=True."
            )
        return self._compute()


class LateOutput(ModelOutput):
    """Mixed into an output class: a `DeferredLogits` is computed when it is read, by name, by index or in a tuple.

    `items()` and `values()` alone pass it on as it is, so that what only maps over an output (accelerate casts every
    tensor in it to float32) does not compute it.
    """

    def __post_init__(self):
        super().__post_init__()  # older versions of the library read every field there
        self.is_complete = True

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if isinstance(value, DeferredLogits) and "is_complete" in self.__dict__:
            value = value()
            setattr(self, name, value)
        return value

    def __getitem__(self, key):
        if isinstance(key, str):
            return getattr(self, key) if key in self.keys() else super().__getitem__(key)
        names = list(self.keys())[key]
        return self[names] if isinstance(names, str) else tuple(self[name] for name in names)

    def get(self, key, default=None):
        """As of a dict."""
        return self[key] if key in self.keys() else default


_LATE = {}
_OF_DECODERS = (CausalLMOutputWithCrossAttentions, MoeCausalLMOutputWithPast)
for _base in (*_OF_DECODERS, MaskedLMOutput, Seq2SeqLMOutput, PreTrainingOutput):
    _name = f"Late{_base.__name__}"  # picklable by this name
    _LATE[_base] = globals()[_name] = dataclass(type(_name, (LateOutput, _base), {"__module__": __name__}))


def make_output(output_class, **fields):
    """An output of this class; where one of its fields is a `DeferredLogits`, of the class that computes it when read.

    The compiler only traces the library's own classes, and under it no logits are deferred.
    """
    is_late = any(isinstance(value, DeferredLogits) for value in fields.values())
    return (_LATE[output_class] if is_late else output_class)(**fields)
