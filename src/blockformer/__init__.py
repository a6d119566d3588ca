"""Blockformer: every classic Transformer, from one small set of blocks, natively Hugging Face.

Importing this package registers its models with the Auto classes of transformers.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_blockformer import BlockformerDecoderConfig
from .modeling_blockformer import (
    BlockformerDecoderForCausalLM,
    BlockformerDecoderForQuestionAnswering,
    BlockformerDecoderForSequenceClassification,
    BlockformerDecoderForTokenClassification,
    BlockformerDecoderModel,
)
from .presets import PRESETS, preset

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "BlockformerDecoderConfig",
    "BlockformerDecoderForCausalLM",
    "BlockformerDecoderForQuestionAnswering",
    "BlockformerDecoderForSequenceClassification",
    "BlockformerDecoderForTokenClassification",
    "BlockformerDecoderModel",
    "export_model",
    "from_official",
    "preset",
]

AutoConfig.register(BlockformerDecoderConfig.model_type, BlockformerDecoderConfig)
AutoModel.register(BlockformerDecoderConfig, BlockformerDecoderModel)
AutoModelForCausalLM.register(BlockformerDecoderConfig, BlockformerDecoderForCausalLM)
AutoModelForSequenceClassification.register(BlockformerDecoderConfig, BlockformerDecoderForSequenceClassification)
AutoModelForTokenClassification.register(BlockformerDecoderConfig, BlockformerDecoderForTokenClassification)
AutoModelForQuestionAnswering.register(BlockformerDecoderConfig, BlockformerDecoderForQuestionAnswering)


def __getattr__(name):
    """`export_model` and `from_official`, imported when first used: they stand above the core."""
    if name == "export_model":
        from .export import export_model

        return export_model
    if name == "from_official":
        from .conversion import from_official

        return from_official
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
