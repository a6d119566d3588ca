"""Outputs of a language model whose logits are computed when they are first read. V vocabulary."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    ModelOutput,
    MoeCausalLMOutputWithPast,
    Seq2SeqLMOutput,
)

from ..model.language_model_head import finished
from ..model.modeling_encoder import PreTrainingOutput


class DeferredLogits:
    """Logits that nobody has read yet. `LateOutput` puts the tensor in its place on the first read.

    They are what they would have been at the call: of its states and weights, and of its modes (gradients, inference,
    autocast), whatever is in force where they are read.

    Args:
        states: [..., C], the input of the head's matrix.
        head: a plain linear layer, from states to logits [..., V].
        logits_bias: [V], or None.
        cap: soft cap of the logits, or None.

    Attributes:
        dtype: of the logits.
    """

    def __init__(self, states: torch.Tensor, head: nn.Linear, logits_bias: torch.Tensor | None, cap: float | None):
        self._states, self._weight, self._bias, self._after = states, head.weight, head.bias, (logits_bias, cap)
        self._seen = self._state()
        kind = states.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self._has_gradients, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._read: list[torch.Tensor] = []  # by any copy
        dtype = self._autocast[1] if self._autocast[2] else states.dtype
        self.dtype = dtype if logits_bias is None else torch.promote_types(dtype, logits_bias.dtype)

    def __call__(self) -> torch.Tensor:
        """The logits [..., V].

        Raises:
            RuntimeError: the head's weights have changed (an optimizer step) or were sharded again after the forward.
        """
        if not all(map(_is_same, self._seen, self._state())):
            raise RuntimeError(
                "the weights have changed since this output was made: read its logits before the optimizer steps, or "
                "call the model with return_logits=True."
            )
        inference, gradients = self._is_inference, self._has_gradients
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            logits = self._logits_of(*self.inputs)
        self._read.append(logits)
        return logits

    def __getattr__(self, name: str):
        """Whatever else a tensor has, the logits have: who goes through `items()` or `values()` may ask for it."""
        if name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self(), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda each: each() if isinstance(each, cls) else each, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def inputs(self) -> tuple:
        """States [..., C], weight [V, C] and bias [V] or None."""
        return self._states, self._weight, self._bias

    def _logits_of(self, states, weight, bias):
        with torch.autocast(*self._autocast):
            states = states.contiguous().view(states.shape)  # see `LanguageModelHead.logits_of`
            return finished(nn.functional.linear(states, weight, bias), *self._after).to(self.dtype)

    def gradients_through(self, loss_of, grad) -> tuple | None:
        """Gradients of the `inputs`, by way of logits whose own gradient somebody asked for; None if nobody did.

        Their graph may have been freed: a loss of the user's own, which reads them, has gone back first.

        Args:
            loss_of: from logits [..., V] to the loss.
            grad: of the loss.
        """
        watched = [each for each in self._read if each.retains_grad or each._backward_hooks]
        if not watched or torch.is_grad_enabled():  # as with `create_graph`, which a loss in chunks refuses
            return None
        logits = watched[-1]
        with torch.enable_grad():
            leaf = _leaf_of(logits)
            (errors,) = torch.autograd.grad(loss_of(leaf), leaf, grad)
            inputs = [each if each is None else _leaf_of(each) for each in self.inputs]
            again = self._logits_of(*inputs)
        for hook in (logits._backward_hooks or {}).values():
            changed = hook(errors)
            errors = errors if changed is None else changed
        if logits.retains_grad:
            logits.grad = errors if logits.grad is None else logits.grad + errors
        needed = [each for each in inputs if each is not None and each.requires_grad]
        found = iter(torch.autograd.grad(again, needed, errors.to(again.dtype)))
        return tuple(next(found) if each is not None and each.requires_grad else None for each in inputs)

    def float(self) -> DeferredLogits:
        """The same in float32, as late: accelerate asks every tensor of half precision in an output for it."""
        other = copy.copy(self)
        other.dtype = torch.float32
        return other

    def _state(self) -> list[tuple]:
        return [_state_of(weight) for weight in (self._weight, self._bias) if weight is not None]


def _leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _state_of(weight: torch.Tensor) -> tuple:
    """What shows that a weight [V, C] or [V] has changed: some bits too, as no write through `.data` is counted."""
    version = None if weight.is_inference() else weight._version
    some = weight.detach().diagonal() if weight.dim() == 2 else weight.detach()
    return (version, weight.shape, weight.data_ptr()), some.clone().view(torch.uint8)


def _is_same(one: tuple, other: tuple) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])


class LateOutput(ModelOutput):
    """Mixed into an output class: a `DeferredLogits` is computed when it is read, by name, by index or in a tuple.

    Only `items()` and `values()` pass it on as it is, so that what only maps over an output (accelerate casts every
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
