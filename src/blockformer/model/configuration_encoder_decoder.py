"""The configuration of an encoder-decoder."""

import copy
from typing import TYPE_CHECKING, ClassVar

from .axes import axis, flag, is_integer
from .compat import announce_language_model
from .configuration_blockformer import BlockformerConfig
from .layer import NORM_SLOTS

if TYPE_CHECKING:
    # Never run. The loader of remote code reads these lines as imports, so a config that is loaded and saved by itself
    # brings the models' code along. All modules stand here by name: older loaders follow no import of an import.
    from .attention import eager_attention_forward  # noqa: F401
    from .feed_forward import FeedForward  # noqa: F401
    from .input_checks import cached_length  # noqa: F401
    from .language_model_head import LanguageModelHead  # noqa: F401
    from .losses import token_cross_entropy  # noqa: F401
    from .merged_attention import MergedAttention  # noqa: F401
    from .modeling_encoder_decoder import BlockformerEncoderDecoderModel  # noqa: F401
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
    from .unscaled_token import PartlyScaledEmbedding  # noqa: F401
    from .vector_positions import LearnedPositions  # noqa: F401

_MODELS = "modeling_encoder_decoder.BlockformerEncoderDecoder"


class BlockformerEncoderDecoderConfig(BlockformerConfig):
    """An encoder and a decoder that looks at its states.

    `num_hidden_layers` counts the encoder's layers, whose types are `layer_types`.
    """

    model_type = "blockformer_encoder_decoder"
    is_encoder_decoder: bool = True
    is_decoder: bool = False
    decoder_layers: int | None = axis(
        None, "a positive integer", "size", "the decoder's layers; None: as the encoder's"
    )
    decoder_layer_types: list | None = axis(
        None, "a list", "attention", "layer_types of the decoder; None: the encoder's, repeated from the first layer on"
    )
    decoder_intermediate_size: int | None = axis(
        None, "a positive integer", "size", "inner width of the decoder's feed-forward networks; None: as the encoder's"
    )
    decoder_vocab_size: int | None = axis(
        None, "a positive integer", "size", "size of a separate target vocabulary; None: both sides share one"
    )
    decoder_norm_placement: str | None = axis(
        None, tuple(NORM_SLOTS), "norm", "norm_placement in the decoder; None: as in the encoder"
    )
    merged_attention: bool = flag(
        False, "attention", "a decoder's layer sees its own tokens and the encoder's states in one attention"
    )
    centered_window: bool = flag(
        False, "attention", "an encoder's window of w tokens shows (w-1)//2 before a token and w//2 after it"
    )
    unscaled_token_id: int | None = axis(
        None, "a token", "embeddings", "a token with its own vector, which is not scaled and is not in the head"
    )
    share_embeddings: bool = flag(True, "embeddings", "one embedding matrix for both sides")
    decoder_start_token_id: int | None = axis(None, "a token", "tokens", "the token that the decoder reads first")
    decoder_starts_with_last_label: bool = flag(
        False, "tokens", "in training the decoder reads a row's last label first: a language code, in some translators"
    )

    decoder_reads_source: bool = flag(
        True, "tokens", "without a target the decoder reads the source, shifted right (BART), else that is an error"
    )

    auto_classes = {
        "AutoConfig": "configuration_encoder_decoder.BlockformerEncoderDecoderConfig",
        "AutoModel": f"{_MODELS}Model",
        "AutoModelForPreTraining": f"{_MODELS}ForConditionalGeneration",
        "AutoModelForSeq2SeqLM": f"{_MODELS}ForConditionalGeneration",
        "AutoModelForMaskedLM": f"{_MODELS}ForConditionalGeneration",  # BART is also one
        "AutoModelForSequenceClassification": f"{_MODELS}ForSequenceClassification",
        "AutoModelForQuestionAnswering": f"{_MODELS}ForQuestionAnswering",
    }
    base_model_pp_plan: ClassVar[dict] = {}

    def fill_defaults(self):
        """Both sides are equally deep and wide by default."""
        if self.decoder_layers is None:
            self.decoder_layers = self.num_hidden_layers
        if self.decoder_intermediate_size is None:
            self.decoder_intermediate_size = self.intermediate_size

    def check(self):
        """A separate vocabulary needs separate embeddings; both stacks have a final norm or none."""
        usual: list = self.layer_types or []
        if self.decoder_layer_types is None:  # filled here, where sizes and layer_types are known to be good
            self.decoder_layer_types = [usual[index % len(usual)] for index in range(self.decoder_layers or 0)]
        types = self.decoder_layer_types
        if not isinstance(types, list) or len(types) != self.decoder_layers or not {*types} <= {*usual}:
            known = f"each of the {self.decoder_layers} decoder layers, each type one that layer_types has"
            raise ValueError(f"decoder_layer_types must list one type for {known}, not {types!r}.")
        if "post" in {self.norm_placement, self.placement_of(True)} != {"post"}:
            raise ValueError("norm_placement and decoder_norm_placement must both be 'post', or neither: change one.")
        if self.decoder_vocab_size is not None and self.share_embeddings:
            fix = "set share_embeddings=False, or drop decoder_vocab_size"
            raise ValueError(f"decoder_vocab_size is set but share_embeddings is True: {fix}.")
        if (token := self.unscaled_token_id) is not None:
            if not (is_integer(token) and 0 < token < self.vocab_size):
                raise ValueError(f"unscaled_token_id must be a token from 1 to {self.vocab_size - 1}, not {token!r}.")
            if not (self.scales_in_embedding and self.embedding_scale):
                fix = "set both, or leave it out"
                raise ValueError(f"unscaled_token_id needs embedding_scale and scales_in_embedding: {fix}.")
        if self.centered_window and self.sliding_window is None:
            raise ValueError("centered_window needs sliding_window: set it, in tokens, or leave centered_window out.")
        wrong = [name for name in ("attention_type", "clip_qkv") if self.merged_attention and getattr(self, name)]
        wrong += ["position_type"] * (self.merged_attention and self.position_type not in ("rotary", "none"))
        if wrong:
            fix = "leave one of the two out" if wrong != ["position_type"] else "use 'rotary' or 'none'"
            raise ValueError(f"merged_attention is not supported with {wrong[0]}={getattr(self, wrong[0])!r}: {fix}.")

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        stacks = {"encoder": self.tensor_parallel_plan(False), "decoder": self.tensor_parallel_plan(True)}
        self.base_model_tp_plan = {
            f"{stack}.{name}": style
            for stack, plan in stacks.items()
            for name, style in {"embed_tokens": "embedding_rowwise", **plan}.items()
        }

    def placement_of(self, is_causal: bool) -> str:
        """The norm placement of one of the two stacks."""
        return self.decoder_norm_placement if is_causal and self.decoder_norm_placement else self.norm_placement

    def inner_width_of(self, is_causal: bool, layer_idx: int | None = None) -> int:
        """The feed-forward networks' inner width in one of the two stacks."""
        return self.decoder_intermediate_size or self.intermediate_size if is_causal else self.intermediate_size

    @property
    def d_model(self) -> int:
        """The name that tools know from T5 and BART for `hidden_size`."""
        return self.hidden_size

    def stack_sizes(self, is_decoder: bool) -> tuple[int, int]:
        """Layers and vocabulary of one of the two stacks."""
        if not is_decoder:
            return self.num_hidden_layers, self.vocab_size
        return self.decoder_layers or self.num_hidden_layers, self.decoder_vocab_size or self.vocab_size

    def get_text_config(self, decoder=None, encoder=None):
        """The config itself; for only the decoder, by which the library sizes a cache, a copy with its sizes."""
        if not decoder or encoder:
            return self
        side = copy.copy(self)
        side.num_hidden_layers, side.vocab_size = self.stack_sizes(is_decoder=True)
        side.layer_types, side.intermediate_size = self.decoder_layer_types, self.inner_width_of(is_causal=True)
        return side


announce_language_model(BlockformerEncoderDecoderConfig)
