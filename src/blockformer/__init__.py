"""Blockformer: every classic Transformer, from one small set of blocks, natively Hugging Face.

Importing this package registers its models with the Auto classes of transformers.
"""

import transformers

from . import modeling_blockformer
from .configuration_blockformer import BlockformerDecoderConfig, BlockformerEncoderConfig
from .modeling_blockformer import (
    BlockformerDecoderForCausalLM,
    BlockformerDecoderForQuestionAnswering,
    BlockformerDecoderForSequenceClassification,
    BlockformerDecoderForTokenClassification,
    BlockformerDecoderModel,
    BlockformerEncoderForMaskedLM,
    BlockformerEncoderForMultipleChoice,
    BlockformerEncoderForNextSentencePrediction,
    BlockformerEncoderForPreTraining,
    BlockformerEncoderForQuestionAnswering,
    BlockformerEncoderForSequenceClassification,
    BlockformerEncoderForTokenClassification,
    BlockformerEncoderModel,
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
    "BlockformerEncoderConfig",
    "BlockformerEncoderForMaskedLM",
    "BlockformerEncoderForMultipleChoice",
    "BlockformerEncoderForNextSentencePrediction",
    "BlockformerEncoderForPreTraining",
    "BlockformerEncoderForQuestionAnswering",
    "BlockformerEncoderForSequenceClassification",
    "BlockformerEncoderForTokenClassification",
    "BlockformerEncoderModel",
    "export_model",
    "from_official",
    "preset",
]

for _config in (BlockformerDecoderConfig, BlockformerEncoderConfig):
    for _auto_class, _target in _config.auto_classes.items():
        _ours = _config.model_type if _auto_class == "AutoConfig" else _config
        _class = _config if _auto_class == "AutoConfig" else getattr(modeling_blockformer, _target.rpartition(".")[2])
        getattr(transformers, _auto_class).register(_ours, _class)


def __getattr__(name):
    """`export_model` and `from_official`, imported when first used: they stand above the core."""
    if name == "export_model":
        from .export import export_model

        return export_model
    if name == "from_official":
        from .conversion import from_official

        return from_official
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
