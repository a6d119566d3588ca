"""T5 (Raffel et al., 2020) in all its versions, mT5 and umT5: encoder-decoders, and only the encoder.

The versions differ in settings: the first T5 has plain ReLU layers and uses its scaled embeddings as head; version 1.1,
Flan-T5 and mT5 have gated layers and a separate head; umT5 has a relative bias in every layer. Today's official classes
say in every config that the head is tied, and still keep a stored head that differs: the tensors decide whether it is
tied.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from ..rules.table import Rule
from ..rules.ties import check_tied
from ..storage.variant import CheckpointVariant
from ..values import DROPOUTS, Computed
from .base import Family
from .encoder_decoder import (
    BOTH,
    EMBEDDINGS,
    LM_HEAD,
    UNTIED,
    EncoderDecoderNames,
    EncoderDecoderSettings,
    HeadDropout,
    encoder_decoder_heads,
    same_bits,
    stacks_of,
)
from .fresh import by_width
from .head import Head
from .preset import Preset
from .shared import fields_without

STRUCTURE = {
    "norm_type": "rms_norm",
    "norm_placement": "pre",
    "position_type": "relative_bias",
    "attention_scale": 1.0,
    "float32_down_proj": True,
    "final_dropout": True,
}
FRESH = {
    "vocab_size": 32128,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
    "gated_mlp": True,
    "hidden_act": "gelu_new",
    "initializer_range": None,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "decoder_reads_source": False,
}
MT5_FRESH = {
    **FRESH,
    "vocab_size": 250112,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
}
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
SELF_ATTENTION = {
    "layer_norm": "self_attn_pre_norm",
    "SelfAttention.q": "self_attn.q_proj",
    "SelfAttention.k": "self_attn.k_proj",
    "SelfAttention.v": "self_attn.v_proj",
    "SelfAttention.o": "self_attn.o_proj",
}
CROSS_ATTENTION = {
    "layer_norm": "cross_attn_pre_norm",
    "EncDecAttention.q": "cross_attn.q_proj",
    "EncDecAttention.k": "cross_attn.k_proj",
    "EncDecAttention.v": "cross_attn.v_proj",
    "EncDecAttention.o": "cross_attn.o_proj",
}
PLAIN = {
    "layer_norm": "mlp_pre_norm",
    "DenseReluDense.wi": "mlp.up_proj",
    "DenseReluDense.wo": "mlp.down_proj",
}
GATED = {
    "layer_norm": "mlp_pre_norm",
    "DenseReluDense.wi_0": "mlp.gate_proj",
    "DenseReluDense.wi_1": "mlp.up_proj",
    "DenseReluDense.wo": "mlp.down_proj",
}
"""Official module of a sub-layer -> ours."""


def t5_heads(both: str, encoder: str, tokens: str) -> list[Head]:
    """The heads: official classes of both stacks, of only the encoder, and of the encoder with a head of tokens."""
    score = {"classifier": "score"}
    return [
        *encoder_decoder_heads(both, rows="transformer."),
        Head(encoder, "BlockformerEncoderModel"),
        Head(tokens, "BlockformerEncoderForTokenClassification", "transformer.", score),
    ]


def stack_rules(stack, config):
    """The rules of a stack."""
    layer, module = ("{layer}", "layers.{layer}.self_attn.") if config.relative_bias_per_layer else ("0", "")
    bias = f"block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
    rules = [
        Rule("final_layer_norm.weight", "norm.weight"),
        Rule(bias, f"{module}relative_bias.embedding.weight"),
    ]
    attentions = [SELF_ATTENTION, CROSS_ATTENTION] if stack == "decoder" else [SELF_ATTENTION]
    for index, modules in enumerate([*attentions, GATED if config.gated_mlp else PLAIN]):
        for theirs, ours in modules.items():
            rules.append(Rule(f"block.{{layer}}.layer.{index}.{theirs}.weight", f"layers.{{layer}}.{ours}.weight"))
    return rules


def read_activation(official):
    """The feed-forward network; fresh weights have their own deviations."""
    config = official.config
    return {"gated_mlp": config.is_gated_act, "hidden_act": config.dense_act_fn, "initializer_range": None}


def write_activation(config, head):
    """The way back of `read_activation`."""
    gated, act = config.gated_mlp, config.hidden_act
    named = ("gated-" if gated else "") + ("gelu" if gated and act == "gelu_new" else act)
    return {"feed_forward_proj": named, "is_gated_act": gated, "dense_act_fn": act}


def read_stacks(official):
    """The decoder's sizes and tokens, which a single encoder does not have."""
    config = official.config
    settings = {"bos_token_id": getattr(config, "bos_token_id", None)}
    if len(stacks_of(official.head)) > 1:
        settings["decoder_layers"] = config.num_decoder_layers
        settings["decoder_start_token_id"] = getattr(config, "decoder_start_token_id", None)
    return settings


def write_stacks(config, head):
    """The way back of `read_stacks`. The official class saves no `bos_token_id` that is null."""
    entries = {} if config.bos_token_id is None else {"bos_token_id": config.bos_token_id}
    if len(stacks_of(head)) == 1:
        return {**entries, "is_encoder_decoder": False}
    decoder = {"num_decoder_layers": config.decoder_layers, "decoder_start_token_id": config.decoder_start_token_id}
    return {**entries, **decoder}


class ScaledHead:
    """The head: whether it is the embeddings, and whether the states are scaled before it.

    Once read, the official class knows only `scale_decoder_outputs`; older ones know only `tie_word_embeddings`.

    Args:
        otherwise: whether a class scales them whose config has no `scale_decoder_outputs`: mT5's never does, UMT5's
            always did up to transformers 5.23.
    """

    def __init__(self, otherwise: bool):
        self.otherwise = otherwise

    def read(self, official):
        config = official.config
        scaled = config.scale_decoder_outputs if _is_told(type(config)) else self.otherwise
        scale = config.d_model**-0.5 if scaled else 1.0
        return {"logit_scale": scale, "tie_word_embeddings": UNTIED not in official.variant.traits}

    def write(self, config, head):
        entries = {"tie_word_embeddings": config.tie_word_embeddings}
        if _is_told(head.official_class.config_class):
            entries["scale_decoder_outputs"] = config.logit_scale != 1
        return entries


def _is_told(config_class: type[PretrainedConfig]) -> bool:
    """Whether an official config says if the states are scaled."""
    return hasattr(config_class(), "scale_decoder_outputs")


def t5_settings(scales: bool = True) -> EncoderDecoderSettings:
    """The settings of a T5; `scales` is what `ScaledHead` does otherwise."""
    return EncoderDecoderSettings(
        usual=fields_without("bos_token_id"),
        fields={
            **{name: name for name in ("relative_attention_num_buckets", "relative_attention_max_distance")},
            "d_kv": "head_dim",
            "d_ff": "intermediate_size",
            "dropout_rate": DROPOUTS,
        },
        computed=[
            Computed(read_activation, write_activation),
            Computed(read_stacks, write_stacks),
            ScaledHead(scales),
            HeadDropout(),
        ],
        extra_fields=(
            *("tie_word_embeddings", "scale_decoder_outputs", "dense_act_fn", "is_gated_act"),
            "decoder_start_token_id",
        ),
        without_effect=["max_position_embeddings"],
    )


@dataclass(kw_only=True, eq=False)
class T5Names(EncoderDecoderNames):
    """The names of a T5."""

    rules: Callable[[str, PretrainedConfig], list[Rule]] = stack_rules
    former_classes: Mapping[str, str] = field(
        default_factory=lambda: {"T5WithLMHeadModel": "T5ForConditionalGeneration"}
    )

    def variant_of(self, official, names=None, read=None):
        """See `Names.variant_of`.

        Raises:
            ConversionError: also for stored copies of the embeddings that differ.
        """
        head = self.find_head(official, names)
        untied = official.get("tie_word_embeddings") is False
        if names is None:
            return CheckpointVariant(head.official, frozenset((EMBEDDINGS[0], *([UNTIED] if untied else []))))
        traits, names, read = self.as_in_class(head, official, names, read)
        stored = self.stored_embeddings(head, names)
        traits |= set(stored)
        if read is not None:
            check_tied(read, [(head.root + stored[0], head.root + other) for other in stored[1:]])
        if head.writes_text and LM_HEAD in names:
            tied = not untied and bool(stored)
            if not tied or read is None or not same_bits(read, LM_HEAD, head.root + stored[0]):
                traits.add(UNTIED)
        return CheckpointVariant(head.official, frozenset(traits))

    def head_by_tensors(self, official, names):
        if (found := self.head_of_rows(names)) is not None:
            return found
        alone = not any(name.startswith("decoder.") for name in names)
        return next(head for head in self.heads if head.ours == "BlockformerEncoderModel") if alone else self.heads[0]

    def stored_head(self, head, official, names):
        """See `Names.stored_head`. A checkpoint without a decoder holds only the encoder."""
        if head.ours.startswith(BOTH) and not any(".decoder." in f".{name}" for name in names):
            return next(each for each in self.heads if each.ours == "BlockformerEncoderModel")
        return super().stored_head(head, official, names)

    def variant_for(self, config, earlier=None):
        head = self.known_head(config)
        traits = {UNTIED} if head.writes_text and not config.tie_word_embeddings else set()
        if earlier is not None and earlier.head == head.official and earlier.traits & {UNTIED} == traits:
            return earlier
        return CheckpointVariant(head.official, frozenset({*traits, EMBEDDINGS[0]}))

    def ignored(self, variant, config):
        return [UNUSED] if len(stacks_of(self.head(variant))) > 1 else []


PRESETS = {"t5-v1.1": Preset("encoder_decoder", {**STRUCTURE, **FRESH})}
T5 = Family(
    "t5",
    t5_heads(
        "T5ForConditionalGeneration T5Model T5ForSequenceClassification T5ForQuestionAnswering",
        "T5EncoderModel",
        "T5ForTokenClassification",
    ),
    structure=STRUCTURE,
    fresh={**FRESH, "gated_mlp": False, "hidden_act": "relu", "tie_word_embeddings": True, "logit_scale": by_width},
    names=T5Names(),
    settings=t5_settings(),
    pad_token_learns=True,
)
MT5 = Family(
    "mt5",
    t5_heads(
        "MT5ForConditionalGeneration MT5Model MT5ForSequenceClassification MT5ForQuestionAnswering",
        "MT5EncoderModel",
        "MT5ForTokenClassification",
    ),
    structure=STRUCTURE,
    fresh=MT5_FRESH,
    names=T5Names(),
    settings=t5_settings(scales=False),
    pad_token_learns=True,
)
UMT5 = Family(
    "umt5",
    t5_heads(
        "UMT5ForConditionalGeneration UMT5Model UMT5ForSequenceClassification UMT5ForQuestionAnswering",
        "UMT5EncoderModel",
        "UMT5ForTokenClassification",
    ),
    structure={**STRUCTURE, "relative_bias_per_layer": True},
    fresh={**MT5_FRESH, "logit_scale": by_width},
    names=T5Names(),
    settings=t5_settings(),
    pad_token_learns=True,
)
