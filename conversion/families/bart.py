"""BART (Lewis et al., 2020), mBART (Liu et al., 2020) and what Marian shares with them (`marian.py`).

The original Transformer with biases, tied heads and a bias of the logits. BART trains its positions and has a norm on
the embeddings, PLBART (Ahmad et al., 2021) and MVP (Tang et al., 2023) too; mBART is BART with pre-norm. Blenderbot
(Roller et al., 2021) has pre-norm, too, and no norm on the embeddings.

Without `tie_word_embeddings`, today's official classes tie nothing: all matrices are stored, each stack reads its
own, and nothing reads `shared.weight`. Which of this a checkpoint does is its `CheckpointVariant`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.files.errors import ConversionError

from ..rules.operations import LeadingAxis, Shape
from ..rules.table import Rule, module_rules
from ..rules.ties import check_tied
from ..storage.variant import CheckpointVariant
from ..values import NotExpressible, RootOfWidth, Value, constants
from .base import Family
from .encoder_decoder import (
    DECODER,
    EMBEDDINGS,
    ENCODER,
    LM_HEAD,
    SEPARATE,
    SHARED,
    UNTIED,
    EncoderDecoderNames,
    EncoderDecoderSettings,
    HeadDropout,
    encoder_decoder_heads,
    same_bits,
)
from .fresh import root_of_width
from .head import Head
from .original import FRESH as ORIGINAL_FRESH
from .original import STRUCTURE as ORIGINAL

LOGITS_BIAS = "final_logits_bias"
TABLES = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
VERSIONS = ("encoder.version", "decoder.version")
"""Numbers that the first BART checkpoints hold and that no class reads."""
OWN, ONE_SIZE, LEARNT = "own vocabularies", "own vocabularies of one size", "learnt bias"
"""Traits, on top of what all encoder-decoders have, and the name of the stored bias."""
LAYER = {
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn_layer_norm": "self_attn_{placement}_norm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
    "final_layer_norm": "mlp_{placement}_norm",
}
CROSS_ATTENTION = {
    "encoder_attn.q_proj": "cross_attn.q_proj",
    "encoder_attn.k_proj": "cross_attn.k_proj",
    "encoder_attn.v_proj": "cross_attn.v_proj",
    "encoder_attn.out_proj": "cross_attn.o_proj",
    "encoder_attn_layer_norm": "cross_attn_{placement}_norm",
}
"""Official module of a layer -> ours; "{placement}" is "pre" or "post"."""
STRUCTURE = {**ORIGINAL, "position_type": "learned", "position_offset": 2, "embedding_norm": True}
FRESH = {
    **ORIGINAL_FRESH,
    "vocab_size": 50265,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 1024,
    "hidden_act": "gelu",
    "lm_head_bias": "fixed",
    "initializer_range": 0.02,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def stack_rules(stack: str, config: PretrainedConfig) -> list[Rule]:
    """The rules of a stack's tensors, its embeddings excepted."""
    modules = {"layernorm_embedding": "embedding_norm"} if config.embedding_norm else {}
    if config.final_norm:
        modules["layer_norm"] = "norm"
    for theirs, ours in (LAYER | (CROSS_ATTENTION if stack == "decoder" else {})).items():
        modules[f"layers.{{layer}}.{theirs}"] = "layers.{layer}." + ours.replace("{placement}", config.norm_placement)
    table = "embed_positions.weight"
    return module_rules(modules) + ([Rule(table, table)] if config.position_type == "learned" else [])


FIELDS = {
    "encoder_ffn_dim": "intermediate_size",
    "decoder_ffn_dim": "decoder_intermediate_size",
    "encoder_attention_heads": "num_attention_heads",
    "decoder_attention_heads": "num_attention_heads",
    "encoder_layers": "num_hidden_layers",
    "decoder_layers": "decoder_layers",
    "decoder_start_token_id": "decoder_start_token_id",
}
"""Official field -> ours."""
SCALE = RootOfWidth("scale_embedding")
NO_FORCED_END = constants(forced_eos_token_id=None)
"""Ours is a generation setting, which lies in another file."""


class Matrices:
    """Which embeddings, head and bias of the logits there are.

    Args:
        own_vocabularies: whether the two sides may have one each.
    """

    def __init__(self, own_vocabularies: bool):
        self.own_vocabularies = own_vocabularies

    def read(self, official):
        traits, config = official.variant.traits, official.config
        bias = (True if LEARNT in traits else "fixed") if LOGITS_BIAS in traits else False
        return {
            "tie_word_embeddings": UNTIED not in traits,
            "share_embeddings": SEPARATE not in traits,
            "decoder_vocab_size": config.decoder_vocab_size if OWN in traits and ONE_SIZE not in traits else None,
            "lm_head_bias": bias if official.head.writes_text else "fixed",
        }

    def write(self, config, head):
        entries = {"tie_word_embeddings": config.tie_word_embeddings}
        if self.own_vocabularies:
            entries["share_encoder_decoder_embeddings"] = not has_own_vocabularies(config)
            entries["decoder_vocab_size"] = config.decoder_vocab_size or config.vocab_size
        elif config.tie_word_embeddings and not config.share_embeddings:
            raise NotExpressible("share_embeddings", "True", False)
        return entries


def has_own_vocabularies(config: PretrainedConfig) -> bool:
    """Whether a Blockformer config is written with a vocabulary for each side, where the family has that."""
    return not config.share_embeddings and (config.decoder_vocab_size is not None or config.tie_word_embeddings)


@dataclass(kw_only=True, eq=False)
class BartNames(EncoderDecoderNames):
    """The names of an encoder-decoder after BART.

    Attributes:
        own_vocabularies: whether the two sides may have one each.
        logits_bias: whether the official language model has a bias of the logits.
        table: (positions, width) -> the official table of computed positions, in float64, if checkpoints may hold it.
    """

    rules: Callable[[str, PretrainedConfig], list[Rule]] = stack_rules
    own_vocabularies: bool = False
    logits_bias: bool = True
    table: Callable[[int, int], Tensor] | None = None

    @property
    def own_traits(self):
        return super().own_traits | {LOGITS_BIAS, OWN, ONE_SIZE, LEARNT}

    def usual_heads(self, classes):
        return encoder_decoder_heads(classes, rows="model.", root="model.")

    @property
    def computes_positions(self) -> bool:
        """Whether its positions are computed, not weights."""
        return self.settings.constant["position_type"] != "learned"

    # The variant: which head, which matrices, whether there is a bias.

    def variant_of(self, official, names=None, read=None):
        """See `Names.variant_of`.

        Raises:
            ConversionError: also for embeddings that must be equal and are not, or that are not all there.
        """
        head = self.find_head(official, names)
        config = self.settings.official_config(official)
        own = self.own_vocabularies and not config.share_encoder_decoder_embeddings
        tied = config.tie_word_embeddings
        traits = ({OWN, SEPARATE} if own else set()) | (set() if tied else {UNTIED})
        if names is None:
            has_bias = head.writes_text and self.logits_bias
            return CheckpointVariant(
                head.official, frozenset({*traits, *_written(traits), *([LOGITS_BIAS] * has_bias)})
            )
        traits, names, read = self.as_in_class(head, official, names, read, traits)
        stored = self.stored_embeddings(head, names)
        traits |= {*stored, *({LOGITS_BIAS} & set(names))}
        if not own and not tied:
            _check_all_stored(head, stored)
        if read is None:
            return CheckpointVariant(head.official, frozenset(traits))
        sizes: dict[str, Shape] = {}
        if not own and tied:
            check_tied(read, [(head.root + stored[0], head.root + other) for other in stored[1:]])
        elif not own:
            traits, sizes = _by_values(head, stored, traits, read)
        if head.writes_text and tied and LM_HEAD in names and (sources := [DECODER] if own else stored):
            traits |= set() if same_bits(read, LM_HEAD, head.root + sources[0]) else {UNTIED}
        if self.computes_positions:
            sizes |= {table: tuple(read(head.root + table).shape) for table in TABLES if head.root + table in names}
        return CheckpointVariant(head.official, frozenset(traits), sizes)

    def head_by_tensors(self, official, names):
        bare = not any(name.startswith("model.") for name in names)
        return self.head_of_rows(names) or next(head for head in self.heads if head.bare == bare)

    def variant_for(self, config, earlier=None):
        head = self.known_head(config)
        traits = set() if config.tie_word_embeddings else {UNTIED}
        if self.own_vocabularies and has_own_vocabularies(config):
            traits |= {OWN} if config.decoder_vocab_size is not None else {OWN, ONE_SIZE}
        traits |= set() if config.share_embeddings else {SEPARATE}
        if head.writes_text and config.lm_head_bias:
            traits |= {LOGITS_BIAS} if config.lm_head_bias == "fixed" else {LOGITS_BIAS, LEARNT}
        if earlier is not None and earlier.head == head.official:
            meant = {OWN, SEPARATE, UNTIED, LOGITS_BIAS, LEARNT}
            rows = {SHARED: config.vocab_size, **dict.fromkeys(TABLES, config.max_position_embeddings)}
            fits = all(size == (rows.get(name), config.hidden_size) for name, size in earlier.sizes.items())
            if fits and earlier.traits & meant == traits & meant:
                return earlier
        return CheckpointVariant(head.official, frozenset({*traits, *_written(traits)}))

    # The tensors.

    def more_rules(self, variant):
        ours = "lm_head.bias" if LEARNT in variant.traits else "logits_bias"
        return [Rule(LOGITS_BIAS, ours, LeadingAxis())] if LOGITS_BIAS in variant.traits else []

    def ignored(self, variant, config):
        tables = TABLES if self.computes_positions else ()
        return [*VERSIONS, *tables, *([SHARED] if SHARED in variant.sizes else [])]

    def reads_ignored(self, name):
        return self.table is not None and name.endswith(TABLES)

    def check_ignored(self, name, tensor):
        if self.table is not None and name.endswith(TABLES) and not _is_table(tensor, self.table):
            return "is not the table of sines and cosines that the official class computes, so it cannot be left out"
        return None


def _is_table(tensor: Tensor, table: Callable[[int, int], Tensor]) -> bool:
    """Whether a tensor is the table of its size, as exactly as its dtype can say it."""
    if tensor.dim() != 2 or not tensor.is_floating_point():
        return False
    tolerance = max(1e-6, torch.finfo(tensor.dtype).eps)
    return torch.allclose(tensor.double(), table(*tensor.shape), rtol=0, atol=tolerance)


def _check_all_stored(head: Head, stored: Collection[str]) -> None:
    lacking = [head.root + name for name in (ENCODER, DECODER) if name not in stored]
    if lacking:
        raise ConversionError(
            f"{' and '.join(lacking)} must be stored: tie_word_embeddings is false, and then the official "
            "classes of today tie no embeddings; store a copy of each shared one, or set it to true"
        )


def _by_values(
    head: Head, stored: Collection[str], traits: set[str], read: Callable[[str], Tensor]
) -> tuple[set[str], dict[str, Shape]]:
    """The traits of a checkpoint whose stacks each read their own embeddings, and the sizes of what nothing reads."""
    traits, sizes = set(traits), {}
    if not same_bits(read, head.root + ENCODER, head.root + DECODER):
        traits.add(SEPARATE)
    if SHARED in stored and not same_bits(read, head.root + SHARED, head.root + ENCODER):
        traits.remove(SHARED)
        sizes[SHARED] = tuple(read(head.root + SHARED).shape)
    return traits, sizes


def _written(traits: Collection[str]) -> tuple[str, ...]:
    """The embeddings that the official class stores, if they are there."""
    return (ENCODER, DECODER) if OWN in traits else EMBEDDINGS if UNTIED in traits else (SHARED,)


def with_table(table: Callable[[int, int], Tensor], model: PreTrainedModel) -> PreTrainedModel:
    """An official model with its computed table: one that is stored in half precision is rounded, ours never is."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(TABLES):
                parameter.copy_(table(*parameter.shape))
    return model


def bart_settings(
    own_vocabularies: bool = False, computed: Sequence[Value] = (), not_none: Collection[str] = (), **rest: Any
) -> EncoderDecoderSettings:
    """The settings of an encoder-decoder after BART.

    Args:
        own_vocabularies: see `BartNames`.
        computed: more values, in addition to what every family of this kind has.
        not_none: see `Settings`, in addition to `initializer_range`.
        rest: other arguments of `Settings`.
    """
    return EncoderDecoderSettings(
        fields=FIELDS,
        computed=[SCALE, Matrices(own_vocabularies), NO_FORCED_END, *computed],
        training_only=("encoder_layerdrop", "decoder_layerdrop"),
        not_none=("initializer_range", *not_none),
        **rest,
    )


BART = Family(
    "bart",
    "BartForConditionalGeneration BartModel BartForSequenceClassification BartForQuestionAnswering",
    structure=STRUCTURE,
    fresh=FRESH,
    names=BartNames(),
    settings=bart_settings(computed=[HeadDropout()], reads_source=True),
    scales_in_embedding=True,
)
MBART = Family(
    "mbart",
    "MBartForConditionalGeneration MBartModel MBartForSequenceClassification MBartForQuestionAnswering",
    structure={**STRUCTURE, "norm_placement": "pre", "decoder_starts_with_last_label": True},
    fresh={**FRESH, "vocab_size": 250027, "embedding_scale": root_of_width, "decoder_start_token_id": None},
    names=BartNames(),
    settings=bart_settings(computed=[HeadDropout()], reads_source=True),
    scales_in_embedding=True,
)
MVP = Family(
    "mvp",
    "MvpForConditionalGeneration MvpModel MvpForSequenceClassification MvpForQuestionAnswering",
    structure=STRUCTURE,
    fresh={**FRESH, "vocab_size": 50267},
    names=BartNames(),
    settings=bart_settings(computed=[HeadDropout()], reads_source=True, unsupported={"use_prompt": (None, False)}),
)
PLBART = Family(
    "plbart",
    "PLBartForConditionalGeneration PLBartModel PLBartForSequenceClassification",
    structure={**STRUCTURE, "decoder_starts_with_last_label": True},
    fresh={
        **FRESH,
        "vocab_size": 50005,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "embedding_scale": root_of_width,
        "decoder_start_token_id": None,
    },
    names=BartNames(),
    settings=bart_settings(computed=[HeadDropout()], reads_source=True),
    scales_in_embedding=True,
)
BLENDERBOT = Family(
    "blenderbot",
    "BlenderbotForConditionalGeneration BlenderbotModel",
    structure={**STRUCTURE, "norm_placement": "pre", "embedding_norm": False, "position_offset": 0},
    fresh={
        **FRESH,
        "decoder_reads_source": False,
        "vocab_size": 8008,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 2,
        "decoder_layers": 24,
        "num_attention_heads": 32,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
    },
    names=BartNames(),
    settings=bart_settings(fixed={"classifier_dropout": None}),
    scales_in_embedding=True,
)
