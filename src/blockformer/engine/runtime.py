"""The runtimes of this package's models: as loaded, prepared for training or inference, and with compiled parts."""

import torch
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from ..model.runtime import Runtime
from ..training.chunked_loss import loss_in_chunks
from ..training.late_outputs import make_output
from . import accelerator
from .attention import is_in_use
from .beams import share_sources
from .decoding import Decoding
from .growing_cache import grow_in_place
from .measure import is_enabled, is_switched_on
from .step import CompiledSteps, output_of
from .unpadding import find_unpadding, is_watched, knows_unpadding, masks_of, unpadding_in, without_padding

logger = logging.get_logger(__name__)


class LoadedRuntime(Runtime):
    """Plain PyTorch, but for masks that are known without the library, and a large loss in chunks."""

    def masks(self, stack, hidden_states, attention_mask, past_key_values, position_ids, others):
        """One token [B, 1, C] sees all that a dynamic cache holds."""
        own = getattr(past_key_values, "self_attention_cache", past_key_values)
        is_step = attention_mask is None and hidden_states.shape[1] == 1 and type(own) is DynamicCache
        is_step = is_step and stack.config.sliding_window is None and stack.config._attn_implementation == "sdpa"
        return {"full_attention": None} if is_step and is_enabled() else None

    def loss(self, head, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing):
        given = (head, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing)
        return loss_in_chunks(*given) if is_switched_on() else None

    def output(self, output_class, **fields):
        return make_output(output_class, **fields)

    def before_training(self, model, mode):
        if mode and "_trainable" in vars(model) and not any(each.requires_grad for each in model.parameters()):
            told = "the model is prepared for inference, and no weight learns: call prepare_for_training()."
            logger.warning_once(told)


class TrainingRuntime(LoadedRuntime):
    """A stack that is prepared for training: on the CPU its padding is skipped where that pays and nobody watches.

    Attributes:
        least_saving: padding times the squared width from which skipping it pays.
        takes_gradients: whether it is skipped where something learns.
    """

    least_saving = 1 << 21
    takes_gradients = True

    def unpadding(self, stack, hidden_states, attention_mask, position_ids, sequences: dict):
        """Where the real tokens of a batch [B, T, C] lie, or None to compute its padding.

        It waits for the processor that holds the mask, so only the CPU's is read.

        Args:
            attention_mask: [B, T] or None; `position_ids` [B, T] as the caller gave them, or None.
            sequences: the caller's arguments on sequences in a row, such as `cu_seq_lens_q`, by name.
        """
        return find_unpadding(stack.config, attention_mask, position_ids, self.least_saving)

    def takes_prompts(self, cache) -> bool:
        """Whether prompts without padding fill this cache (None: a fresh one) with it."""
        return False

    def _may_unpad(self, stack, hidden_states, attention_mask, position_ids, others: dict) -> bool:
        """Whether nobody looks at the padding: neither the caller, nor a cache that needs it, nor a hook."""
        if others["reads_padding"] or (attention_mask is None and position_ids is None):
            return False
        cache = others["past_key_values"]
        needs = (others["use_cache"] or cache is not None) and not self.takes_prompts(cache)
        asked = [others[name] is not None for name in ("encoder_hidden_states", "head_mask")]
        if needs or any(asked) or stack._is_recording(others) or not is_in_use(stack.config) or not is_enabled():
            return False
        learns = torch.is_grad_enabled() and (
            hidden_states.requires_grad or any(each.requires_grad for each in stack.parameters())
        )
        return not (learns and not self.takes_gradients) and knows_unpadding(stack) and not is_watched(stack)

    def masks(self, stack, hidden_states, attention_mask, past_key_values, position_ids, others):
        given = (stack, hidden_states, attention_mask, past_key_values, position_ids, others)
        if not self._may_unpad(stack, hidden_states, attention_mask, position_ids, others):
            return super().masks(*given)
        unpadding = self.unpadding(stack, hidden_states, attention_mask, position_ids, others)
        if unpadding is None:
            return super().masks(*given)
        if attention_mask is not None and unpadding.indices is None:  # there is no padding
            return stack.plain_masks(hidden_states, None, past_key_values, None)
        return masks_of(stack, unpadding, hidden_states.device)

    def layers(self, stack, hidden_states, encoder_hidden_states, position_bias, layer_inputs, named):
        unpadding = unpadding_in(layer_inputs)
        if unpadding is None:
            given = (encoder_hidden_states, position_bias, layer_inputs, named)
            return self.run(stack, hidden_states, *given)
        states, inputs = unpadding.gather(hidden_states), without_padding(layer_inputs, unpadding)
        return unpadding.scatter(self.run(stack, states, encoder_hidden_states, position_bias, inputs, named))

    def run(self, stack, hidden_states, encoder_hidden_states, position_bias, layer_inputs, named: dict):
        """As `layers`, for states [B, T, C] or [1, N, C]."""
        return stack.run_layers(hidden_states, encoder_hidden_states, position_bias, layer_inputs, named)


class PreparedRuntime(TrainingRuntime):
    """A model that is prepared for inference, or a stack of it: its cache grows in place, and beams share a source."""

    takes_gradients = False

    def cache(self, fresh, beams=1, windows=False):
        if not is_enabled():
            return fresh
        share_sources(fresh, beams)
        return grow_in_place(fresh, and_windows=windows)


class AcceleratorRuntime(PreparedRuntime):
    """A stack on a GPU: its attention takes sequences of any length, without padding, and long ones with caps."""

    def unpadding(self, stack, hidden_states, attention_mask, position_ids, sequences):
        found = accelerator.unpadding_of(stack, hidden_states, attention_mask, sequences)
        if found is not None:
            return found
        return super().unpadding(stack, hidden_states, attention_mask, position_ids, sequences)

    def masks(self, stack, *given):
        found = super().masks(stack, *given)
        return accelerator.block_masks(stack, *given[:-1]) if found is None and is_in_use(stack.config) else found

    def takes_prompts(self, cache):
        return accelerator.is_empty(cache)

    def run(self, stack, hidden_states, encoder_hidden_states, position_bias, layer_inputs, named):
        """The plain layers; an unpadded prompt's keys and values reach the cache in the padded form."""
        cache, unpadding = named.get("past_key_values"), unpadding_in(layer_inputs)
        if unpadding is not None and cache is not None:
            named = {**named, "past_key_values": accelerator.PaddingCache(cache, unpadding)}
        return super().run(stack, hidden_states, encoder_hidden_states, position_bias, layer_inputs, named)


class WritingRuntime(AcceleratorRuntime):
    """A model on a GPU that writes by captured steps."""

    def __init__(self, decoding: Decoding):
        self.decoding = decoding

    def sample(self, model, input_ids, arguments, named):
        return self.decoding.sample(model, input_ids, arguments, named)


class CompiledRuntime(PreparedRuntime):
    """A model that writes, whose step is compiled, or a stack of it.

    Args:
        steps, decoding: of the model; None for a stack.
    """

    def __init__(self, steps: CompiledSteps | None = None, decoding: Decoding | None = None):
        self.steps, self.decoding = steps, decoding

    def cache(self, fresh, beams=1, windows=True):
        """A compiled step reads and writes buffers that hold everything."""
        return super().cache(fresh, beams, windows)

    def step(self, model, arguments, named):
        return None if self.steps is None else output_of(self.steps, model, arguments, named)

    def sample(self, model, input_ids, arguments, named):
        return None if self.decoding is None else self.decoding.sample(model, input_ids, arguments, named)
