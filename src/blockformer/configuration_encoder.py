"""The configuration of an encoder."""

from typing import TYPE_CHECKING

from .configuration_blockformer import BlockformerConfig

if TYPE_CHECKING:
    # Never run. The loader of remote code reads it as an import: a config that is loaded and saved alone brings the
    # models' code along.
    from .modeling_blockformer import BlockformerEncoderModel  # noqa: F401


class BlockformerEncoderConfig(BlockformerConfig):
    """An encoder: each token sees the whole text.

    Takes the fields of `BlockformerConfig`. The defaults are a modern encoder (rotary positions, RMS norm, gated
    feed-forward); `preset("bert")` has BERT's settings.

    Raises:
        ValueError: also for cross-attention, which only a decoder has.
    """

    model_type = "blockformer_encoder"
    is_decoder: bool = False
    auto_classes = {
        "AutoConfig": "configuration_encoder.BlockformerEncoderConfig",
        "AutoModel": "modeling_blockformer.BlockformerEncoderModel",
        "AutoModelForMaskedLM": "modeling_blockformer.BlockformerEncoderForMaskedLM",
        "AutoModelForPreTraining": "modeling_blockformer.BlockformerEncoderForPreTraining",
        "AutoModelForNextSentencePrediction": "modeling_blockformer.BlockformerEncoderForNextSentencePrediction",
        "AutoModelForSequenceClassification": "modeling_blockformer.BlockformerEncoderForSequenceClassification",
        "AutoModelForMultipleChoice": "modeling_blockformer.BlockformerEncoderForMultipleChoice",
        "AutoModelForTokenClassification": "modeling_blockformer.BlockformerEncoderForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_blockformer.BlockformerEncoderForQuestionAnswering",
    }
