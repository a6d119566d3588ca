"""The configuration of an encoder."""

from typing import TYPE_CHECKING

from .axes import axis, flag
from .configuration_blockformer import BlockformerConfig
from .disentangled import DisentangledAttention, DisentangledFields, Distances
from .rounded_frequencies import RoundingFields
from .token_dropout import TokenDropoutFields

if TYPE_CHECKING:
    # Never run. The loader of remote code reads these lines as imports, so a config that is loaded and saved by itself
    # brings the models' code along. All modules stand here by name: older loaders follow no import of an import.
    from .attention import eager_attention_forward  # noqa: F401
    from .compat import causal_masks  # noqa: F401
    from .feed_forward import FeedForward  # noqa: F401
    from .input_checks import cached_length  # noqa: F401
    from .language_model_head import LanguageModelHead  # noqa: F401
    from .layer import Layer  # noqa: F401
    from .losses import token_cross_entropy  # noqa: F401
    from .modeling_encoder import BlockformerEncoderModel  # noqa: F401
    from .normalization import RMSNorm  # noqa: F401
    from .positions import rotations_of  # noqa: F401
    from .pretrained_model import WeightsError  # noqa: F401
    from .relative_bias import RelativeBias  # noqa: F401
    from .relative_keys import RelativeKeys  # noqa: F401
    from .release import VERSION  # noqa: F401
    from .rotary import RotaryPositions  # noqa: F401
    from .runtime import Runtime  # noqa: F401
    from .scaled_embedding import ScaledEmbedding  # noqa: F401
    from .sinusoidal import SinusoidalPositions  # noqa: F401
    from .stack import Stack  # noqa: F401
    from .task_heads import TokenClassification  # noqa: F401
    from .vector_positions import LearnedPositions  # noqa: F401


PRE_TRAINING, DETECTOR, MASKED = (
    f"BlockformerEncoderFor{task}" for task in ("PreTraining", "ReplacedTokenDetection", "MaskedLM")
)


class BlockformerEncoderConfig(RoundingFields, TokenDropoutFields, DisentangledFields, BlockformerConfig):
    """An encoder: each token sees the whole text.

    The defaults are a modern encoder (rotary positions, RMS norm, gated feed-forward); `preset("bert")` has BERT's
    settings.
    """

    model_type = "blockformer_encoder"
    parts = BlockformerConfig.parts | {
        "distances": {"disentangled": Distances},
        "attention": {"disentangled": DisentangledAttention},
    }
    is_decoder: bool = False
    num_hidden_groups: int | None = axis(
        None, "a positive integer", "size", "groups of successive layers that share their weights; None: no layers do"
    )
    token_types_as_tokens: bool = flag(False, "embeddings", "token types that are passed add these tokens' vectors")
    pooling: str = axis(
        "first",
        ("first", "mean", "mean_of_pooled"),
        "head",
        "a row's summary: its first token, or the mean of its tokens, before the pooler or after it",
    )
    auto_classes = {
        "AutoConfig": "configuration_encoder.BlockformerEncoderConfig",
        "AutoModelForTextEncoding": "modeling_encoder.BlockformerEncoderModel",
        "AutoModel": "modeling_encoder.BlockformerEncoderModel",
        "AutoModelForMaskedLM": "modeling_encoder.BlockformerEncoderForMaskedLM",
        "AutoModelForPreTraining": "modeling_encoder.BlockformerEncoderForPreTraining",
        "AutoModelForNextSentencePrediction": "modeling_encoder.BlockformerEncoderForNextSentencePrediction",
        "AutoModelForSequenceClassification": "modeling_encoder.BlockformerEncoderForSequenceClassification",
        "AutoModelForMultipleChoice": "modeling_encoder.BlockformerEncoderForMultipleChoice",
        "AutoModelForTokenClassification": "modeling_encoder.BlockformerEncoderForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_encoder.BlockformerEncoderForQuestionAnswering",
    }

    def check(self):
        """Groups of layers that share weights (ALBERT, Lan et al., 2020) are of one size, and all layers are alike."""
        groups, layers = self.num_hidden_groups, self.num_hidden_layers
        if groups and layers % groups:
            raise ValueError(f"num_hidden_layers ({layers}) must be a multiple of num_hidden_groups ({groups}).")
        is_mixed = len(set(self.layer_types or ())) > 1 or not self.first_attention_norm or self.pruned_heads
        if groups and is_mixed:
            alike = "use one layer type, first_attention_norm=True and no pruned_heads, or leave it out"
            raise ValueError(f"num_hidden_groups ({groups}) needs layers that share all settings: {alike}.")

    @property
    def pre_training_class(self) -> str:
        """The class that `AutoModelForPreTraining` takes: the one that `architectures` name.

        That is a masked language model only where the encoder tells no segments apart (RoBERTa): BERT's released
        checkpoints of one were trained with the next sentence, too.
        """
        named = (self.architectures or [None])[0]
        is_its_own = named == DETECTOR or (named == MASKED and self.type_vocab_size < 2)
        return named if is_its_own else PRE_TRAINING

    def to_dict(self):
        """As for any config; of the classes for pre-training the `auto_map` has this config's."""
        settings = super().to_dict()
        module = settings["auto_map"]["AutoModelForPreTraining"].partition(".")[0]
        settings["auto_map"]["AutoModelForPreTraining"] = f"{module}.{self.pre_training_class}"
        return settings
