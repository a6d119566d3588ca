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
    "preset",
]

AutoConfig.register(BlockformerDecoderConfig.model_type, BlockformerDecoderConfig)
AutoModel.register(BlockformerDecoderConfig, BlockformerDecoderModel)
AutoModelForCausalLM.register(BlockformerDecoderConfig, BlockformerDecoderForCausalLM)
AutoModelForSequenceClassification.register(BlockformerDecoderConfig, BlockformerDecoderForSequenceClassification)
AutoModelForTokenClassification.register(BlockformerDecoderConfig, BlockformerDecoderForTokenClassification)
AutoModelForQuestionAnswering.register(BlockformerDecoderConfig, BlockformerDecoderForQuestionAnswering)
