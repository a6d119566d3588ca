"""T5Gemma 2 (Zhang et al., 2025): two stacks of Gemma 3, of which the second reads both texts in one attention.

An official repo also has a vision tower in its encoder. The text is what `composites.py` takes out of it.
"""

from dataclasses import dataclass, replace

from blockformer.files.errors import ConversionError, listed

from ..rules.table import Rule
from ..storage.spelling import Alternative, Prefix
from ..storage.variant import CheckpointVariant
from ..values import Computed, NotExpressible, RopeByLayerType
from .base import Family
from .encoder_decoder import BOTH, ENCODER, EncoderDecoderNames, EncoderDecoderSettings
from .gemma import STRUCTURE
from .head import Head
from .shared import LAYER as PREFIX
from .shared import Q_AND_K_NORM
from .t5gemma import LAYER, SAME, TOKENS, differences, read_both, write_both

ROPE = RopeByLayerType()
SIZES = {theirs: ours for theirs, ours in SAME.items() if theirs not in ("rope_parameters", "attn_logit_softcapping")}
"""Field of both stacks -> ours."""


def _read_stacks(official):
    encoder, decoder = official.config.encoder.text_config, official.config.decoder
    lines = differences(encoder, decoder, (*SIZES, "rope_parameters", "query_pre_attn_scalar", *TOKENS))
    if encoder.attention_bias or decoder.attention_bias:
        lines.append("attention_bias is true")
    if encoder.attn_logit_softcapping is not None or decoder.attn_logit_softcapping is not None:
        lines.append("attn_logit_softcapping is set, which T5Gemma 2 does not use; drop it")
    if not 0 <= (token := official.config.eoi_token_index) < encoder.vocab_size:
        lines.append(f"eoi_token_index is {token}, and the vocabulary has {encoder.vocab_size} tokens")
    if lines:
        raise ConversionError(f"config.json: settings that cannot be converted:{listed(lines)}")
    return {
        **read_both(official, encoder, decoder, SIZES),
        **ROPE.read(replace(official, config=encoder)),
        "centered_window": "sliding_attention" in encoder.layer_types,
        "unscaled_token_id": token,
    }


def _write_stacks(config, head):
    both = {**write_both(config, head, SIZES), **ROPE.write(config, head)}
    if config.unscaled_token_id is None:
        raise NotExpressible("unscaled_token_id", "set")
    text = {"model_type": "t5gemma2_text", "num_hidden_layers": config.num_hidden_layers}
    text |= {"layer_types": config.layer_types}
    decoder = {"model_type": "t5gemma2_decoder", "num_hidden_layers": config.decoder_layers}
    decoder |= {"layer_types": config.decoder_layer_types}
    encoder = {"model_type": "t5gemma2_encoder", "eoi_token_index": config.unscaled_token_id}
    return {"encoder": {**encoder, "text_config": both | text}, "decoder": both | decoder}


def stack_rules(stack, config):
    """The rules of a stack. Its vector of the token that ends a picture is shared, as its embeddings are."""
    modules = {"norm": "norm", **{PREFIX + theirs: PREFIX + ours for theirs, ours in {**LAYER, **Q_AND_K_NORM}.items()}}
    rules = [Rule(f"{theirs}.weight", f"{ours}.weight") for theirs, ours in modules.items()]
    shared = [Rule("embed_tokens.weight", "embed_tokens.weight")]
    shared.append(Rule("embed_tokens.eoi_embedding", "embed_tokens.unscaled"))
    return rules + (shared if stack == "encoder" else [])


@dataclass(kw_only=True, eq=False)
class MergedNames(EncoderDecoderNames):
    """The names that files have; in memory the official class has one more part in the encoder's."""

    def alternatives(self, head):
        inner = f"{head.root}encoder.text_model."
        return [
            *super().alternatives(head),
            [Alternative("text_model", Prefix(inner, f"{head.root}encoder.", ()), (inner,))],
        ]

    def embeddings_names(self, head, traits):
        return [head.root + ENCODER]

    def variant_of(self, official, names=None, read=None):
        head = self.find_head(official, names)
        traits = self.shown_alternatives(head, names or ())
        found = [*map(self.spelled(CheckpointVariant(head.official, traits)).to_class, names or ())]
        return CheckpointVariant(head.official, traits | self.traits_of_ties(head, official, found, traits))


OTHER_CLASSES = ("T5Gemma2Model", "T5Gemma2ForSequenceClassification", "T5Gemma2ForTokenClassification")
_ONLY = "of a repo with a vision tower only T5Gemma2ForConditionalGeneration is read"

FAMILY = Family(
    "t5gemma2",
    [
        Head(
            "T5Gemma2ForConditionalGeneration",
            f"{BOTH}ForConditionalGeneration",
            "model.",
            tensors={"lm_head.out_proj.weight": "lm_head.weight"},
        )
    ],
    structure={
        **STRUCTURE,
        "norm_placement": "pre_output",
        "qk_norm": True,
        "merged_attention": True,
        "tie_word_embeddings": True,
        "final_dropout": True,
    },
    names=MergedNames(rules=stack_rules, has_own_layout=False, refused=dict.fromkeys(OTHER_CLASSES, _ONLY)),
    settings=EncoderDecoderSettings(
        fields={
            "dropout_rate": ("hidden_dropout", "activation_dropout"),
            "classifier_dropout_rate": "classifier_dropout",
        },
        computed=[Computed(_read_stacks, _write_stacks)],
        unsupported={"tie_word_embeddings": (True,)},
        extra_fields=("encoder", "decoder", "decoder_start_token_id", "use_cache"),
    ),
    scales_in_embedding="rounded",
)
