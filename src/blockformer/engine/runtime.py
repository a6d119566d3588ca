"""The runtimes of this package's models: as loaded, prepared for training or inference, and with compiled parts."""

from typing import Any

import torch
from transformers.utils import logging

from ..model.positions import adds_to_scores
from ..model.pretrained_model import BlockformerPreTrainedModel
from ..model.runtime import Runtime
from ..training.chunked_loss import loss_in_chunks
from ..training.late_outputs import make_output
from ..watched import is_transformed, is_watched
from . import attention
from .attention import is_in_use
from .choices import is_enabled, is_switched_on
from .unpadding import (
    PaddingCache,
    Unpadding,
    find_unpadding,
    is_recording,
    knows_unpadding,
    plan_without_padding,
    unpadding_in,
)

logger = logging.get_logger(__name__)

# Tokens of a batch, times the square of the width, from which on the device and not the host is what takes time, and so
# skipping pays: measured on an H200, where a layer of BERT keeps the host busy for half a millisecond.
_LEAST_WORK, _LEAST_WORK_OF_FLOAT32 = 8e9, 1.1e9
_LEAST_SHARE = 0.25  # of padding, by hand: below it, attention side by side costs what the other layers save


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
        """Whether neither the caller, nor a cache, nor a gradient, nor torch.func needs the padding."""
        has_cache = inputs.use_cache or inputs.past_key_values is not None
        needs_padding = has_cache and not self.takes_prompts(inputs.past_key_values)
        needs_padding |= inputs.source[0] is not None or inputs.head_masks[0] is not None or inputs.reads_padding
        needs_padding |= inputs.named.get("is_causal") is False  # each sequence's own attention asks the module
        if needs_padding or is_recording(stack.config, inputs.named) or is_transformed():
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
        unpadding = None if says_nothing or not self.may_unpad(stack, inputs) else self.unpadding(stack, inputs)
        if unpadding is not None and inputs.attention_mask is not None and unpadding.indices is None:
            # Every token is real.
            inputs, unpadding = inputs._replace(attention_mask=None, given_positions=None), None
        # Last, since it takes as long as half a layer, and full batches go without it.
        if unpadding is None or not knows_unpadding(stack) or is_watched(stack):
            return stack.plan(inputs, self.masks(stack, inputs))
        return plan_without_padding(stack, inputs, unpadding)

    def layers(self, stack, hidden_states, encoder_hidden_states, layer_inputs, named):
        """The plain layers; an unpadded prompt's keys and values reach the cache in the padded form."""
        cache, unpadding = named.get("past_key_values"), unpadding_in(layer_inputs)
        if unpadding is None:
            return stack.run_layers(hidden_states, encoder_hidden_states, layer_inputs, named)
        if cache is not None:
            named = {**named, "past_key_values": PaddingCache(cache, unpadding)}
        states = unpadding.gather(hidden_states)
        return unpadding.scatter(stack.run_layers(states, encoder_hidden_states, layer_inputs, named))


class PreparedRuntime(TrainingRuntime):
    """A model that is prepared for inference, or a stack of it: padding is skipped, except where a cache is filled.

    Attributes:
        decoding: the `Decoding` of a model that writes, or None for the library's loop.
    """

    takes_gradients = False
    decoding: Any = None

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

    def unpadding(self, stack, inputs):
        """Where the real tokens of a batch [B, T, C] on a GPU lie, or None if its padding is computed.

        It waits for the device, to count them; not at all if the caller says where sequences begin and how long the
        longest one is (`cu_seq_lens_q`, `max_length_q`).
        """
        config, states, mask = stack.config, inputs.hidden_states, inputs.attention_mask
        if states.device.type != attention.DEVICE:  # the model has been moved
            return super().unpadding(stack, inputs)
        if not _has_plain_attention(config):
            return None
        has_kernel = attention.has_kernel(attention.dtype_in(states), config.head_dim, states.device)
        starts, longest = inputs.named.get("cu_seq_lens_q"), inputs.named.get("max_length_q")
        if mask is None and has_kernel and starts is not None and len(starts) > 1:
            return Unpadding(states.shape[:2], None, None, starts.int(), None if longest is None else int(longest))
        work = states.shape[:2].numel() * config.hidden_size**2
        if mask is None or work < (_LEAST_WORK if attention.is_half(states) else _LEAST_WORK_OF_FLOAT32):
            return None
        least = 0 if has_kernel else int(_LEAST_SHARE * work)
        return find_unpadding(config, mask, None, least, attention.DEVICE)

    def masks(self, stack, inputs):
        is_plain = not isinstance(inputs.attention_mask, dict) and is_in_use(stack.config)
        return attention.block_masks(stack, inputs) if is_plain else None

    def takes_prompts(self, cache):
        """Whether it is known to hold nothing, without waiting for the device.

        A layer with a state does not say whether it holds something; some layer always has keys.
        """
        held = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
        return cache is None or (held is not None and not any(getattr(each, "is_initialized", False) for each in held))


def _has_plain_attention(config) -> bool:
    """Whether attention looks at queries, keys and whole sequences only, and values are as wide as keys."""
    has_terms = adds_to_scores(config.position_type) or config.attn_logit_softcapping is not None
    has_terms = has_terms or config.kv_lora_rank is not None or config.is_varied
    return not (has_terms or config.attention_sinks or "sliding_attention" in config.layer_types)


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
