"""`generate` of an encoder-decoder: the beams of an input share the encoder's states, and their keys and values."""

import functools

from transformers.cache_utils import DynamicLayer, EncoderDecoderCache
from transformers.generation import GenerationMixin

from .compat import CACHE
from .input_checks import check_early_exit
from .stack import shared_cache


# `can_generate` looks for "GenerationMixin" in the names of a model's bases.
class SharedBeamsGenerationMixin(GenerationMixin):
    """Generation with one row of encoder states for all beams of an input."""

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        outputs = super().generate(*args, **kwargs)
        cache = getattr(outputs, CACHE, None)
        if isinstance(cache, EncoderDecoderCache):  # the caller gets a row a beam, as from any model
            beams = cache.self_attention_cache.layers[0].keys.shape[0]
            for layer in cache.cross_attention_cache.layers:
                if isinstance(layer, DynamicLayer) and layer.keys.shape[0] < beams:
                    layer.batch_repeat_interleave(beams // layer.keys.shape[0])
        return outputs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        check_early_exit(generation_config, 0)
        is_fresh = model_kwargs.get(CACHE) is None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE)
        if is_fresh and isinstance(cache, EncoderDecoderCache):  # the library sizes it for every beam
            cache.cross_attention_cache = shared_cache()
        if is_fresh and cache is not None:
            model_kwargs[CACHE] = self.runtime.cache(cache)

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=True, input_ids=None, **model_kwargs):
        """Only what belongs to the target is repeated for each beam."""
        names = ("encoder_outputs", "attention_mask")
        shared = {name: model_kwargs.pop(name) for name in names if name in model_kwargs}
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=False, input_ids=input_ids, **model_kwargs
        )
        return input_ids, {**model_kwargs, **shared}
