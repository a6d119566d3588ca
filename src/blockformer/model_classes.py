"""Our config and model classes by name, for what stands below the public names (`api`)."""

from transformers import PreTrainedModel

from .model import (
    delta_rule,  # noqa: F401 - it enters a layer type
    hybrid,  # noqa: F401 - and it another
    modeling_decoder,
    modeling_encoder,
    modeling_encoder_decoder,
    scaled_feed_forward,  # noqa: F401 - and it a feed-forward network
    state_space,  # noqa: F401 - and it another
    states,  # noqa: F401 - and it a third
)
from .model.configuration_blockformer import BlockformerConfig
from .model.configuration_decoder import BlockformerDecoderConfig
from .model.configuration_encoder import BlockformerEncoderConfig
from .model.configuration_encoder_decoder import BlockformerEncoderDecoderConfig

CONFIGS: dict[str, type[BlockformerConfig]] = {
    each.model_type: each
    for each in (BlockformerDecoderConfig, BlockformerEncoderConfig, BlockformerEncoderDecoderConfig)
}
"""`model_type` -> the config class."""
MODELS: dict[str, type[PreTrainedModel]] = {
    name: each
    for module in (modeling_decoder, modeling_encoder, modeling_encoder_decoder)
    for name, each in vars(module).items()
    if name.startswith("Blockformer") and isinstance(each, type) and issubclass(each, PreTrainedModel)
    if not name.endswith("PreTrainedModel")
}
"""Name -> the model class."""
