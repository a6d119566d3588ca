"""The runtimes of this package's models: as loaded, prepared for training or inference, and with compiled parts."""

import torch
from transformers.utils import logging

from ..model.pretrained_model import BlockformerPreTrainedModel
from ..model.runtime import Runtime
from ..training.chunked_loss import loss_in_chunks
from ..training.late_outputs import make_output
from ..watched import is_watched
from . import accelerator
from .attention import is_in_use
from .choices import is_enabled, is_switched_on
from .unpadding import (
    find_unpadding,
    is_recording,
    knows_unpadding,
    plan_without_padding,
    unpadding_in,
)

logger = logging.get_logger(__name__)


class LoadedRuntime(Runtime):
    """Plain PyTorch; a loss without logits is taken in chunks."""

    def loss(self, head, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing):
        arguments = (head, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing)
        return loss_in_chunks(*arguments) if self.takes_in_chunks(return_logits) and is_switched_on() else None

    def takes_in_chunks(self, return_logits: bool | None) -> bool:
        """Whether a loss may be taken in chunks, by what the caller says about logits: here where none are wanted."""
        return return_logits is False


class TrainingRuntime(LoadedRuntime):
    """A model that is prepared for training, or a stack of it.

    A large loss is taken in chunks, and on the CPU padding is skipped, where that pays and nobody watches.

    Attributes:
        least_saving: padding times the squared width from which skipping it pays: docs/measurements.md, "Skipped
            padding in training".
        takes_gradients: whether it is skipped where something learns.
    """

    least_saving = 1 << 21
    takes_gradients = True

    def takes_in_chunks(self, return_logits):
        return return_logits is not True

    def output(self, output_class, **fields):
        return make_output(output_class, **fields)

    def unpadding(self, stack, inputs):
        """Where the real tokens of a batch [B, T, C] lie, or None to compute its padding.

        It waits for the processor that holds the mask, so only the CPU's is read.
        """
        return find_unpadding(stack.config, inputs.attention_mask, inputs.given_positions, self.least_saving)

    def masks(self, stack, inputs) -> dict | None:
        """The mask of each layer type for these `layer.StackInputs`; None leaves them to the library."""

    def takes_prompts(self, cache) -> bool:
        """Whether prompts without padding fill this cache (None: a fresh one) with it."""
        return False

    def may_unpad(self, stack, inputs) -> bool:
        """Whether neither the caller, nor a cache, nor a gradient needs the padding."""
        has_cache = inputs.use_cache or inputs.past_key_values is not None
        needs_padding = has_cache and not self.takes_prompts(inputs.past_key_values)
        needs_padding |= inputs.source[0] is not None or inputs.head_masks[0] is not None or inputs.reads_padding
        if needs_padding or is_recording(stack.config, inputs.named):
            return False
        if isinstance(inputs.attention_mask, dict) or not is_in_use(stack.config) or not is_enabled():
            return False
        learns = torch.is_grad_enabled() and (
            inputs.hidden_states.requires_grad or any(each.requires_grad for each in stack.parameters())
        )
        return not (learns and not self.takes_gradients)

    def plan(self, stack, inputs):
        """As `stack.plan`, with an `Unpadding` where masks would be if padding is skipped: where nobody watches."""
        says_nothing = inputs.attention_mask is None and inputs.given_positions is None
        if says_nothing or not self.may_unpad(stack, inputs):
            return stack.plan(inputs, self.masks(stack, inputs))
        unpadding = self.unpadding(stack, inputs)
        if unpadding is not None and inputs.attention_mask is not None and unpadding.indices is None:
            return self.plan(stack, inputs._replace(attention_mask=None, given_positions=None))  # every token is real
        # Last, since it takes as long as half a layer, and full batches go without it.
        if unpadding is None or not knows_unpadding(stack) or is_watched(stack):
            return stack.plan(inputs, self.masks(stack, inputs))
        return plan_without_padding(stack, inputs, unpadding)

    def layers(self, stack, hidden_states, encoder_hidden_states, layer_inputs, named):
        if (unpadding := unpadding_in(layer_inputs)) is None:
            return self.run(stack, hidden_states, encoder_hidden_states, layer_inputs, named)
        states = unpadding.gather(hidden_states)
        return unpadding.scatter(self.run(stack, states, encoder_hidden_states, layer_inputs, named))

    def run(self, stack, hidden_states, encoder_hidden_states, layer_inputs, named: dict):
        """As `layers`, for states [B, T, C] or [1, N, C]."""
        return stack.run_layers(hidden_states, encoder_hidden_states, layer_inputs, named)


class PreparedRuntime(TrainingRuntime):
    """A model that is prepared for inference, or a stack of it: padding is skipped, except where a cache is filled.

    Attributes:
        decoding: the `Decoding` of a model that writes, or None for the library's loop.
    """

    takes_gradients = False

    def __init__(self, decoding=None):
        self.decoding = decoding

    def cache(self, fresh):
        """The same one, with a mark if our loop may get it: `generate` has made it, and nobody sees it before."""
        fresh.is_of_generate = self.decoding is not None
        return fresh

    def write(self, model, input_ids, arguments, named):
        return None if self.decoding is None else self.decoding.write(model, input_ids, arguments, named)

    def plan(self, stack, inputs):
        if stack.training and not any(each.requires_grad for each in stack.parameters()):
            logger.warning_once(
                "the model is prepared for inference, and no weight learns: call prepare_for_training()."
            )
        return super().plan(stack, inputs)


class AcceleratorRuntime(PreparedRuntime):
    """A stack on a GPU: its attention takes sequences of any length, without padding, and long ones with caps."""

    def hides_nothing(self, stack, attention_mask, past_key_values):
        return accelerator.is_full(stack, attention_mask, past_key_values)

    def unpadding(self, stack, inputs):
        unpadding = accelerator.unpadding_of(stack, inputs.hidden_states, inputs.attention_mask, inputs.named)
        return super().unpadding(stack, inputs) if unpadding is None else unpadding

    def masks(self, stack, inputs):
        is_plain = not isinstance(inputs.attention_mask, dict) and is_in_use(stack.config)
        return accelerator.block_masks(stack, inputs) if is_plain else None

    def takes_prompts(self, cache):
        return accelerator.is_empty(cache)

    def run(self, stack, hidden_states, encoder_hidden_states, layer_inputs, named):
        """The plain layers; an unpadded prompt's keys and values reach the cache in the padded form."""
        cache, unpadding = named.get("past_key_values"), unpadding_in(layer_inputs)
        if unpadding is not None and cache is not None:
            named = {**named, "past_key_values": accelerator.PaddingCache(cache, unpadding)}
        return super().run(stack, hidden_states, encoder_hidden_states, layer_inputs, named)


def check_class(model) -> None:
    """Refuse what is not a model of this package.

    Raises:
        TypeError: the model comes from another library, or from the code in a repo.
    """
    if isinstance(model, BlockformerPreTrainedModel):
        return
    if str(getattr(getattr(model, "config", None), "model_type", "")).startswith("blockformer_"):
        raise TypeError(
            f"this {type(model).__name__} runs the code of its own repo, which has no fast paths: import blockformer "
            "before you load the model, and load it without trust_remote_code=True."
        )
    raise TypeError(f"{type(model).__name__} is not a Blockformer model: convert it, or load it with blockformer.")
