"""The configuration of a decoder."""

from typing import TYPE_CHECKING

from .alibi import Alibi
from .awq_linear import LinearFields
from .axes import BLOCKS, axis, flag
from .compat import announce_language_model
from .configuration_blockformer import BlockformerConfig
from .dense_and_sparse import DenseAndSparse
from .experts import ExpertsFields, SparseFeedForward
from .latent_attention import LatentAttention, LatentFields
from .multi_token import MultiTokenFields
from .token_inputs import LayerEnd, TokenInputFields, TokenInputs
from .varied_attention import VariedAttention, VariedFields

if TYPE_CHECKING:
    # Never run. The loader of remote code reads these lines as imports, so a config that is loaded and saved by itself
    # brings the models' code along. All modules stand here by name: older loaders follow no import of an import.
    from .attention import eager_attention_forward  # noqa: F401
    from .feed_forward import FeedForward  # noqa: F401
    from .input_checks import cached_length  # noqa: F401
    from .language_model_head import LanguageModelHead  # noqa: F401
    from .layer import Layer  # noqa: F401
    from .losses import token_cross_entropy  # noqa: F401
    from .modeling_decoder import BlockformerDecoderModel  # noqa: F401
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


class BlockformerDecoderConfig(
    MultiTokenFields, LinearFields, TokenInputFields, VariedFields, LatentFields, ExpertsFields, BlockformerConfig
):
    """A decoder: causal self-attention, with `add_cross_attention` also a look at an encoder's states.

    The defaults are a small Llama-style model. A `bidirectional` one is for embeddings (BehnamGhader et al., 2024).
    """

    model_type = "blockformer_decoder"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "aux_loss", "router_logits"]
    parts = BlockformerConfig.parts | {
        "biases": BlockformerConfig.parts["biases"] | {"alibi": Alibi},
        "attention": {"latent": LatentAttention, "varied": VariedAttention},
        "token_inputs": (TokenInputs, LayerEnd),
        "mlp": BlockformerConfig.parts["mlp"] | {"sparse": SparseFeedForward, "both": DenseAndSparse},
    }
    is_decoder: bool = True
    token_embedding_size: int | None = axis(
        None, "a positive integer", "size", "width of token vectors and final states, projected to C and back, if any"
    )
    token_types_as_tokens: bool = flag(False, "embeddings", "token types that are passed add these tokens' vectors")
    bidirectional: bool = flag(False, "attention", "a token also sees later ones; then the decoder cannot generate")
    auto_classes = {
        "AutoConfig": "configuration_decoder.BlockformerDecoderConfig",
        "AutoModel": "modeling_decoder.BlockformerDecoderModel",
        "AutoModelForPreTraining": "modeling_decoder.BlockformerDecoderForCausalLM",
        "AutoModelForCausalLM": "modeling_decoder.BlockformerDecoderForCausalLM",
        "AutoModelForSequenceClassification": "modeling_decoder.BlockformerDecoderForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_decoder.BlockformerDecoderForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_decoder.BlockformerDecoderForQuestionAnswering",
    }

    def get_text_config(self, decoder=None, encoder=None):
        """The config itself; for the decoder, by which the library makes caches, one with the library's layer types."""
        blocks = [BLOCKS["layer_types"].get(kind) for kind in self.layer_types or () if decoder and not encoder]
        return next((block.in_library(self) for block in blocks if block), self)

    def validate(self):
        """The library's check at saving, which knows its own layer types only; ours run when a config is made."""


announce_language_model(BlockformerDecoderConfig)
