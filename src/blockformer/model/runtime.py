"""How a model runs: here in plain PyTorch. Whatever makes models faster is another runtime, of the same methods.

A model and its stacks each hold one as `runtime`. What answers None leaves the question to the plain code.

B batch, T length, C hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable

from transformers.generation import GenerationMixin

PACKAGE: dict[str, Callable] = {}
"""What the package does in place of a method, by the method's name. It gets the method first, then its arguments."""


def by_package(method):
    """A method for which the package may have another way, files and kernels: that comes first, if it is imported."""

    @functools.wraps(method)
    def method_by_package(self, *args, **kwargs):
        own = PACKAGE.get(method.__name__)
        return method(self, *args, **kwargs) if own is None else own(method, self, *args, **kwargs)

    return method_by_package


class Runtime:
    """The plain way, which serves every model: padding is computed like other tokens, and every hook sees [B, T, C]."""

    def plan(self, stack, inputs):
        """The `layer.LayerInputs` of a forward, made once for all layers of a stack from its `layer.StackInputs`."""
        return stack.plan(inputs)

    def layers(self, stack, hidden_states, encoder_hidden_states, layer_inputs, named: dict):
        """States [B, T, C] after all layers, which get `named` by name."""
        return stack.run_layers(hidden_states, encoder_hidden_states, layer_inputs, named)

    def loss(self, head, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing: float):
        """Logits [..., V] (or None) and loss, as `LanguageModelHead.logits_and_loss` gives them, or None."""

    def write(self, model, input_ids, arguments: tuple, named: dict):
        """What a loop of `GenerationMixin.generate` gives for a prompt [B, T] and these arguments, or None."""

    def cache(self, fresh):
        """The cache of a call of `generate` that brings none, in place of the library's fresh one."""
        return fresh

    def output(self, output_class: type, **fields):
        """What a `forward` returns."""
        return output_class(**fields)


def loop_by_runtime(name: str):
    """The loop of that name in `GenerationMixin`, `_sample` or `_beam_search`: the model's runtime comes first."""

    def loop(self, input_ids, *args, **kwargs):
        output = self.runtime.write(self, input_ids, args, kwargs)
        return getattr(GenerationMixin, name)(self, input_ids, *args, **kwargs) if output is None else output

    return loop
