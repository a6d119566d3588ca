"""The runtimes of this package's models: as loaded, and with compiled parts."""

from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from ..model.runtime import Runtime
from ..training.chunked_loss import loss_in_chunks
from ..training.late_outputs import make_output
from . import accelerator
from .attention import is_in_use
from .decoding import GraphDecoding
from .growing_cache import grow_in_place
from .layers import CompiledLayers
from .step import CompiledSteps, output_of

logger = logging.get_logger(__name__)


class LoadedRuntime(Runtime):
    """Plain PyTorch with a cache that grows in place, fewer masks, and a large loss in chunks."""

    least_saving_of_row = 0  # the engine's attention takes the short sequences of a batch in one product

    def cache(self, fresh):
        return grow_in_place(fresh)

    def masks(self, stack, hidden_states, attention_mask, past_key_values, position_ids):
        """One token [B, 1, C] sees all that a dynamic cache holds, which is known without the library."""
        own = getattr(past_key_values, "self_attention_cache", past_key_values)
        is_step = attention_mask is None and hidden_states.shape[1] == 1 and type(own) is DynamicCache
        if is_step and stack.config.sliding_window is None and stack.config._attn_implementation == "sdpa":
            return {"full_attention": None}
        return None

    def loss(self, head, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing):
        return loss_in_chunks(head, hidden_states, labels, num_items_in_batch, return_logits, label_smoothing)

    def output(self, output_class, **fields):
        return make_output(output_class, **fields)

    def before_training(self, model, mode):
        if mode and "_trainable" in vars(model) and not any(each.requires_grad for each in model.parameters()):
            told = "the model is prepared for inference, and no weight learns: call prepare_for_training()."
            logger.warning_once(told)


class AcceleratorRuntime(LoadedRuntime):
    """A stack on a GPU: its attention takes sequences of any length, without padding, and long ones with caps."""

    def unpadding(self, stack, tokens, attention_mask, position_ids, sequences):
        given = (stack, tokens, attention_mask, position_ids, sequences)
        found = accelerator.unpadding_of(*given)
        return super().unpadding(*given) if found is None else found

    def masks(self, stack, *given):
        found = super().masks(stack, *given)
        return accelerator.block_masks(stack, *given) if found is None and is_in_use(stack.config) else found

    def restores_padding(self, past_key_values):
        return accelerator.is_empty(past_key_values)

    def layers(self, stack, hidden_states, encoder_hidden_states, position_bias, layer_inputs, named):
        """The plain layers; an unpadded prompt's keys and values reach the cache in the padded form."""
        cache = named.get("past_key_values")
        if layer_inputs.unpadding is None or cache is None or isinstance(cache, accelerator.PaddingCache):
            return None
        named = {**named, "past_key_values": accelerator.PaddingCache(cache, layer_inputs.unpadding)}
        return stack._run_layers(hidden_states, encoder_hidden_states, position_bias, layer_inputs, **named)


class WritingRuntime(LoadedRuntime):
    """A model on a GPU that writes by captured steps."""

    def __init__(self, decoding: GraphDecoding):
        self.decoding = decoding

    def sample(self, model, input_ids, arguments, named):
        return self.decoding.sample(model, input_ids, arguments, named)


class CompiledRuntime(LoadedRuntime):
    """A runtime of one model, or of one of its stacks.

    Args:
        steps: of a model that writes, or None.
        compiled_layers: of a stack, or None.
    """

    def __init__(self, steps: CompiledSteps | None = None, compiled_layers: CompiledLayers | None = None):
        self.steps, self.compiled_layers = steps, compiled_layers
        if compiled_layers is not None:
            self.least_saving = 0  # compiled layers take the sequences of a batch, and no mask

    def cache(self, fresh):
        """A compiled step reads and writes buffers that hold everything."""
        return grow_in_place(fresh, and_windows=True)

    def step(self, model, arguments, named):
        return None if self.steps is None else output_of(self.steps, model, arguments, named)

    def layers(self, stack, hidden_states, encoder_hidden_states, position_bias, layer_inputs, named):
        given = (hidden_states, encoder_hidden_states, position_bias, layer_inputs, named)
        return None if self.compiled_layers is None else self.compiled_layers.states(*given)
