"""The public names, and what importing them sets up.

The Auto classes of transformers know the models; the models load more strictly, run faster and upload better than by a
repo's own code. `on_import` sees to it that this is imported with the first part of the model.
"""

import transformers

from .engine import explain, prepare_for_inference, prepare_for_training, warm_up
from .engine import plug_in as _plug_in
from .model import modeling_decoder, modeling_encoder, modeling_encoder_decoder
from .model.configuration_decoder import BlockformerDecoderConfig
from .model.configuration_encoder import BlockformerEncoderConfig
from .model.configuration_encoder_decoder import BlockformerEncoderDecoderConfig
from .model.modeling_decoder import (
    BlockformerDecoderForCausalLM,
    BlockformerDecoderForQuestionAnswering,
    BlockformerDecoderForSequenceClassification,
    BlockformerDecoderForTokenClassification,
    BlockformerDecoderModel,
)
from .model.modeling_encoder import (
    BlockformerEncoderForMaskedLM,
    BlockformerEncoderForMultipleChoice,
    BlockformerEncoderForNextSentencePrediction,
    BlockformerEncoderForPreTraining,
    BlockformerEncoderForQuestionAnswering,
    BlockformerEncoderForReplacedTokenDetection,
    BlockformerEncoderForSequenceClassification,
    BlockformerEncoderForTokenClassification,
    BlockformerEncoderModel,
)
from .model.modeling_encoder_decoder import (
    BlockformerEncoderDecoderForConditionalGeneration,
    BlockformerEncoderDecoderForQuestionAnswering,
    BlockformerEncoderDecoderForSequenceClassification,
    BlockformerEncoderDecoderModel,
)
from .presets import PRESETS, preset
from .pruning import prune_heads, restore_heads
from .publishing import export_model
from .publishing.strict_loading import plug_in as _plug_in_strict_loading
from .publishing.upload import plug_in as _plug_in_uploads
from .registering import register
from .reshaping import reshape
from .size_bounds import plug_in as _plug_in_size_bounds
from .training.muon import muon
from .training.optimizer import adamw, mup_groups, optimizer_groups
from .training.width_transfer import mup_model


class _ForPreTraining(BlockformerEncoderForPreTraining):
    """What `AutoModelForPreTraining` takes for an encoder: of its classes the one of the config."""

    @classmethod
    def from_pretrained(cls, *args, config, **kwargs):
        return getattr(modeling_encoder, config.pre_training_class).from_pretrained(*args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config, **kwargs):
        return getattr(modeling_encoder, config.pre_training_class)._from_config(config, **kwargs)


for _config, _models in (
    (BlockformerDecoderConfig, modeling_decoder),
    (BlockformerEncoderConfig, modeling_encoder),
    (BlockformerEncoderDecoderConfig, modeling_encoder_decoder),
):
    transformers.AutoConfig.register(_config.model_type, _config)
    for _auto_class, _target in _config.auto_classes.items():
        if _auto_class != "AutoConfig":
            getattr(transformers, _auto_class).register(_config, getattr(_models, _target.rpartition(".")[2]))
transformers.AutoModelForPreTraining.register(BlockformerEncoderConfig, _ForPreTraining, exist_ok=True)

_plug_in()
_plug_in_strict_loading()
_plug_in_uploads()
_plug_in_size_bounds()
