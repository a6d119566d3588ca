"""The configuration of a decoder."""

import copy
from typing import TYPE_CHECKING

from .alibi import Alibi
from .awq_linear import LinearFields
from .axes import BLOCKS, axis, flag
from .compat import announce_language_model
from .configuration_blockformer import BlockformerConfig
from .experts import ExpertsFields, SparseFeedForward
from .latent_attention import LatentAttention, LatentFields

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
    from .positions import LearnedPositions  # noqa: F401
    from .pretrained_model import WeightsError  # noqa: F401
    from .relative_bias import RelativeBias  # noqa: F401
    from .relative_keys import RelativeKeys  # noqa: F401
    from .release import VERSION  # noqa: F401
    from .rotary import RotaryPositions  # noqa: F401
    from .runtime import Runtime  # noqa: F401
    from .sinusoidal import SinusoidalPositions  # noqa: F401
    from .stack import Stack  # noqa: F401
    from .task_heads import TokenClassification  # noqa: F401


class BlockformerDecoderConfig(LinearFields, LatentFields, ExpertsFields, BlockformerConfig):
    """A decoder: causal self-attention, with `add_cross_attention` also a look at an encoder's states.

    The defaults are a small Llama-style model. A `bidirectional` one is for embeddings (BehnamGhader et al., 2024).
    """

    model_type = "blockformer_decoder"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "aux_loss", "router_logits"]
    parts = BlockformerConfig.parts | {
        "biases": BlockformerConfig.parts["biases"] | {"alibi": Alibi},
        "attention": {"latent": LatentAttention},
        "mlp": BlockformerConfig.parts["mlp"] | {"sparse": SparseFeedForward},
    }
    is_decoder: bool = True
    token_embedding_size: int | None = axis(
        None, "a positive integer", "size", "width of token vectors and final states, projected to C and back, if any"
    )
    bidirectional: bool = flag(False, "attention", "a token sees later ones too; then the decoder writes no text")
    mlp_layers: list | None = axis(
        None, "a list", "feed-forward", "whether each layer of a decoder has a feed-forward network; None: all have"
    )
    auto_classes = {
        "AutoConfig": "configuration_decoder.BlockformerDecoderConfig",
        "AutoModel": "modeling_decoder.BlockformerDecoderModel",
        "AutoModelForCausalLM": "modeling_decoder.BlockformerDecoderForCausalLM",
        "AutoModelForSequenceClassification": "modeling_decoder.BlockformerDecoderForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_decoder.BlockformerDecoderForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_decoder.BlockformerDecoderForQuestionAnswering",
    }

    def check(self):
        """Layers without a network are for sequences of sub-layers, without experts and cross-attention."""
        if (has := self.mlp_layers) is None:
            return
        is_list = isinstance(has, list) and all(isinstance(each, bool) for each in has)
        if not is_list or len(has) != self.num_hidden_layers:
            raise ValueError(f"mlp_layers must list a bool for each layer, not {has!r}.")
        idle = {"num_experts": 0, "residual": "sequential", "add_cross_attention": False}
        for name, value in idle.items():
            if (given := getattr(self, name)) != value:
                raise ValueError(f"mlp_layers is not supported with {name}={given!r}: leave one of them out.")

    def get_text_config(self, decoder=None, encoder=None):
        """The config itself; for the decoder, by which the library makes caches, one whose layers have its words."""
        words = {kind: each.cls.library_type for kind, each in BLOCKS["layer_types"].items()}
        types = [words.get(kind) or kind for kind in self.layer_types or ()]
        if not decoder or encoder or types == self.layer_types:
            return self
        side = copy.copy(self)
        side.layer_types = types
        return side

    def validate(self):
        """What the library checks before it saves a config; it knows layers by its own words only."""
        super(BlockformerDecoderConfig, self.get_text_config(decoder=True)).validate()


announce_language_model(BlockformerDecoderConfig)
