"""The configuration of a decoder."""

from typing import TYPE_CHECKING

from .compat import announce_language_model
from .configuration_blockformer import BlockformerConfig

if TYPE_CHECKING:
    # Never run. The loader of remote code reads it as an import: a config that is loaded and saved alone brings the
    # models' code along.
    from .modeling_blockformer import BlockformerDecoderModel  # noqa: F401


class BlockformerDecoderConfig(BlockformerConfig):
    """A decoder: causal self-attention, with `add_cross_attention` also a look at an encoder's states.

    Takes the fields of `BlockformerConfig`. The defaults are a small Llama-style model.

    Example:
        >>> config = BlockformerDecoderConfig(hidden_size=256, num_attention_heads=4, qk_norm=True)
        >>> config.head_dim
        64
    """

    model_type = "blockformer_decoder"
    is_decoder: bool = True
    auto_classes = {
        "AutoConfig": "configuration_decoder.BlockformerDecoderConfig",
        "AutoModel": "modeling_blockformer.BlockformerDecoderModel",
        "AutoModelForCausalLM": "modeling_blockformer.BlockformerDecoderForCausalLM",
        "AutoModelForSequenceClassification": "modeling_blockformer.BlockformerDecoderForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_blockformer.BlockformerDecoderForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_blockformer.BlockformerDecoderForQuestionAnswering",
    }


announce_language_model(BlockformerDecoderConfig)
