"""How a model runs: here in plain PyTorch. Whatever makes models faster is another runtime, of the same methods.

A model and its stacks each hold one as `runtime`. What answers None leaves the question to the plain code.

B batch, T length, N tokens, C hidden size, V vocabulary.
"""

import functools

from transformers.generation import GenerationMixin

from .unpadding import find_unpadding


class Runtime:
    """The plain way, which serves every model.

    Attributes:
        least_saving, least_saving_of_row: padding times the squared width from which skipping it pays, in all, a row.
    """

    least_saving, least_saving_of_row = 1 << 21, 1 << 19

    def step(self, model, arguments: tuple, named: dict):
        """The output of a model that writes for these arguments of its `forward`, or None."""

    def sample(self, model, input_ids, arguments: tuple, named: dict):
        """What `GenerationMixin._sample` gives for a prompt [B, T] and these arguments, or None."""

    def layers(self, stack, hidden_states, encoder_hidden_states, position_bias, layer_inputs, named: dict):
        """States [B, T, C] or [1, N, C] after all layers, or None. It is given what layers are."""

    def masks(self, stack, hidden_states, attention_mask, past_key_values, position_ids):
        """The mask of each layer type for these inputs (positions, if rows hold several sequences), or None."""

    def unpadding(self, stack, tokens, attention_mask, position_ids, sequences: dict):
        """Where the real tokens of a batch, ids [B, T] or embeddings [B, T, E], lie, or None to compute its padding.

        It waits for the processor that holds the mask, so only the CPU's is read.

        Args:
            attention_mask: [B, T] or None; `position_ids` [B, T] as the caller gave them, or None.
            sequences: the caller's arguments on sequences in a row, such as `cu_seq_lens_q`, by name.
        """
        least = max(self.least_saving, self.least_saving_of_row * tokens.shape[0])
        return find_unpadding(stack.config, attention_mask, position_ids, least)

    def restores_padding(self, past_key_values) -> bool:
        """Whether `layers` takes prompts without padding and fills this cache (None: a fresh one) with it."""
        return False

    def cache(self, fresh):
        """The cache that takes the place of the library's fresh one."""
        return fresh

    def loss(self, head, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing: float):
        """Logits [..., V] (or None) and loss, as `LanguageModelHead.logits_and_loss` gives them, or None."""

    def output(self, output_class: type, **fields):
        """What a `forward` returns."""
        return output_class(**fields)

    def before_training(self, model, mode: bool):
        """Called before a model enters training mode, or leaves it if `mode` is false."""


def by_runtime(forward):
    """A `forward` of a model that writes: its runtime comes first."""

    @functools.wraps(forward)
    def forward_by_runtime(self, *args, **kwargs):
        output = self.runtime.step(self, args, kwargs)
        return forward(self, *args, **kwargs) if output is None else output

    return forward_by_runtime


def sample_by_runtime(self, input_ids, *args, **kwargs):
    """The library's loop for greedy search and sampling: the model's runtime comes first."""
    output = self.runtime.sample(self, input_ids, args, kwargs)
    return GenerationMixin._sample(self, input_ids, *args, **kwargs) if output is None else output
