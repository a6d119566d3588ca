"""The base of every model: initialisation, what the library may do with it, and its place in a repo."""

from transformers import PreTrainedModel
from transformers import initialization as init

from .attention import Attention
from .compat import OutputRecorder
from .layer import Layer
from .positions import ComputedPositions


class BlockformerPreTrainedModel(PreTrainedModel):
    """Loading, saving and placement, from transformers; weights drawn from N(0, `initializer_range`)."""

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
        if isinstance(module, ComputedPositions):
            # Not in a checkpoint, so it must be computed anew after the model was built on the meta device.
            init.copy_(module.inv_freq, module.compute_frequencies())
