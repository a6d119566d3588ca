"""The configuration of an encoder."""

from typing import TYPE_CHECKING

from .configuration_blockformer import BlockformerConfig

if TYPE_CHECKING:
    # Never run. The loader of remote code reads these lines as imports, so a config that is loaded and saved alone
    # brings the models' code along. All modules stand here by name: older loaders follow no import of an import.
    from .attention import eager_attention_forward  # noqa: F401
    from .base import WeightsError  # noqa: F401
    from .cache import GrowingLayer  # noqa: F401
    from .compat import config_field_names  # noqa: F401
    from .config_checks import check_names  # noqa: F401
    from .configuration_decoder import BlockformerDecoderConfig  # noqa: F401
    from .feed_forward import FeedForward  # noqa: F401
    from .heads import Pooler  # noqa: F401
    from .inference import PackedWeight  # noqa: F401
    from .inputs import cached_length  # noqa: F401
    from .joint import Joint  # noqa: F401
    from .kernels import fast_paths_enabled  # noqa: F401
    from .layer import Layer  # noqa: F401
    from .losses import token_cross_entropy  # noqa: F401
    from .modeling_blockformer import BlockformerDecoderModel  # noqa: F401
    from .normalization import RMSNorm  # noqa: F401
    from .outputs import DeferredLogits  # noqa: F401
    from .packing import Packing  # noqa: F401
    from .positions import LearnedPositions  # noqa: F401
    from .quantized_kernels import has_kernel  # noqa: F401
    from .quantized_linear import unpack  # noqa: F401
    from .stack import Stack  # noqa: F401


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
