"""The base of every model: initialisation, what the library may do with it, and its place in a repo."""

from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .attention import Attention
from .compat import OutputRecorder
from .layer import Layer
from .positions import ComputedPositions


class BlockformerPreTrainedModel(PreTrainedModel):
    """Loading, saving and placement, from transformers; weights drawn as `initializer_range` says."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Layer",)
    _skip_keys_device_placement = ("past_key_values",)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # A name for each recorder: self- and cross-attention are one class.
    _can_record_outputs = {
        "hidden_states": Layer,
        "attentions": OutputRecorder(Attention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(Attention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config):
        super().__init__(config)
        if config.float32_down_proj:
            self._keep_in_fp32_modules = {"down_proj"}

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # The library greps the class's own module for the call; here it stands in attention.py.
        return True

    def _init_weights(self, module):
        super()._init_weights(module)
        if self.config.initializer_range is None:
            _draw_by_inputs(module)
        if isinstance(module, ComputedPositions):
            # Not in a checkpoint, so it must be computed anew after the model was built on the meta device.
            init.copy_(module.inv_freq, module.compute_frequencies())


def _draw_by_inputs(module) -> None:
    """Weights with the deviation 1/sqrt(inputs), embeddings with 1, as T5 draws them (Raffel et al., 2020).

    A module that is to differ has an `initializer_factor`; of remote code the library does not ask what holds a module.
    """
    factor = getattr(module, "initializer_factor", 1.0)
    if isinstance(module, nn.Linear):
        init.normal_(module.weight, std=factor * module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        init.normal_(module.weight, std=factor)
