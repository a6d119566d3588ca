"""BART (Lewis et al., 2020), mBART (Liu et al., 2020) and what Marian shares with them (`marian.py`).

The original Transformer with biases, tied heads and a bias of the logits. BART trains its positions and has a norm on
the embeddings; mBART is BART with each norm before its part.

A checkpoint of tied embeddings holds one matrix, as `shared.weight`, or also its copies in the two stacks and the head.
Without `tie_word_embeddings` the official classes of today tie nothing at all: all the matrices are stored, each stack
reads its own, and `shared.weight` is read by nobody. What of this a checkpoint does is its `Form`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..errors import ConversionError, listed
from ..rules.operations import Copies, LeadingAxis, bytes_of
from ..rules.table import Rule, RuleTable, check_tied, module_rules
from .base import Family, Form, Head, common_entries, token_or_none, unequal

SHARED, ENCODER, DECODER = EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
LM_HEAD, LOGITS_BIAS = "lm_head.weight", "final_logits_bias"
TABLES = tuple(f"{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))
VERSIONS = ("encoder.version", "decoder.version")
"""Numbers that the first BART checkpoints hold and that no class reads."""
OWN, SEPARATE, UNTIED, LEARNT = "own vocabularies", "separate", "untied", "learnt bias"
SPARE, POSITIONS = "spare", "positions"
"""Traits, beside the names of the stored embeddings and of the bias. The last two come with the sizes of the tensor."""
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
# Official part of a layer -> our attention.
ENCODER_PARTS = {"self_attn": "self_attn"}
DECODER_PARTS = {**ENCODER_PARTS, "encoder_attn": "cross_attn"}
MLP = {"fc1": "mlp.up_proj", "fc2": "mlp.down_proj"}
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "encoder_ffn_dim": "intermediate_size",
    "encoder_layers": "num_hidden_layers",
    "decoder_layers": "decoder_layers",
    "encoder_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "activation_function": "hidden_act",
    "init_std": "initializer_range",
    "use_cache": "use_cache",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "decoder_start_token_id": "decoder_start_token_id",
}
DROPOUTS = {
    "dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
}
ONE_WIDTH = {"encoder_attention_heads": "decoder_attention_heads", "encoder_ffn_dim": "decoder_ffn_dim"}
LAYER_DROP = ("encoder_layerdrop", "decoder_layerdrop")
SETTINGS: dict[str, Any] = {
    "gated_mlp": False,
    "norm_type": "layer_norm",
    "norm_bias": True,
    "norm_eps": 1e-5,
    "qk_norm": False,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "float32_down_proj": False,
    "attention_scale": None,
    "logit_scale": 1.0,
    "type_vocab_size": 0,
    "lm_head_transform": False,
    "pooler_act": None,
    "sliding_window": None,
    "add_cross_attention": False,
    "relative_bias_per_layer": False,
}


@dataclass(frozen=True)
class BartHead(Head):
    """A head of these families.

    Attributes:
        modules: official module -> ours, each with weight and bias.
    """

    modules: tuple[tuple[str, str], ...] = ()

    @property
    def writes(self) -> bool:
        """Whether it has a language model head."""
        return self.ours.endswith("ForConditionalGeneration")

    @property
    def prefix(self) -> str:
        """Of the names of the two stacks, official and ours."""
        return "" if self.ours.endswith("Model") else "model."


class BartFamily(Family[BartHead]):
    """An encoder-decoder after BART.

    Args:
        name: the official `model_type`.
        prefix: what the official classes' names begin with.
        heads: what its models are for.
        settings: our fields that this family never varies, beyond the shared ones.
        own_vocabularies: whether the two sides may have one each.
    """

    spoken = ("num_hidden_layers", "num_attention_heads", "hidden_size")

    def __init__(
        self,
        name: str,
        prefix: str,
        heads: Collection[BartHead],
        settings: Mapping[str, Any],
        own_vocabularies: bool = False,
    ):
        super().__init__(name, f"{prefix}Config", heads)
        self.settings = {**SETTINGS, **settings}
        self.own_vocabularies = own_vocabularies
        self.computes_positions = settings["position_type"] != "learned"

    # The form: which head, which matrices, whether there is a bias.

    def form(self, official, names: Collection[str] | None = None, read: Callable[[str], Tensor] | None = None):
        """See `Family.form`.

        Raises:
            ConversionError: also for embeddings that must be equal and are not, or that are not all there.
        """
        head = self._head(official, names)
        config = self.official_config(official)
        own = self.own_vocabularies and not config.share_encoder_decoder_embeddings
        tied = config.tie_word_embeddings
        traits = ({OWN, SEPARATE} if own else set()) | (set() if tied else {UNTIED})
        if names is None:
            return Form(head.official, frozenset({*traits, *self._written(traits), *([LOGITS_BIAS] * head.writes)}))
        stored = [name for name in EMBEDDINGS if head.prefix + name in names]
        traits |= {*stored, *({LOGITS_BIAS} & set(names))}
        if not own and not tied:
            lacking = [head.prefix + name for name in (ENCODER, DECODER) if name not in stored]
            if lacking:
                raise ConversionError(
                    f"{' and '.join(lacking)} must be stored: tie_word_embeddings is false, and then the official "
                    "classes of today tie no embeddings; store copies of those that were shared, or set it to true"
                )
        if read is None:
            return Form(head.official, frozenset(traits))

        def differ(first: str, second: str) -> bool:
            return not torch.equal(bytes_of(read(head.prefix + first)), bytes_of(read(head.prefix + second)))

        if not own and tied:
            check_tied(read, [(head.prefix + stored[0], head.prefix + other) for other in stored[1:]])
        elif not own:
            traits |= {SEPARATE} if differ(ENCODER, DECODER) else set()
            if SHARED in stored and differ(SHARED, ENCODER):
                traits = (traits - {SHARED}) | {_sized(SPARE, read(head.prefix + SHARED).shape)}
        sources = [DECODER] if own else stored
        if head.writes and tied and LM_HEAD in names and sources:
            same = torch.equal(bytes_of(read(LM_HEAD)), bytes_of(read(head.prefix + sources[0])))
            traits |= set() if same else {UNTIED}
        if self.computes_positions:
            traits |= {_sized(POSITIONS, read(head.prefix + t).shape) for t in TABLES if head.prefix + t in names}
        return Form(head.official, frozenset(traits))

    def _head(self, official: Mapping[str, Any], names: Collection[str] | None) -> BartHead:
        architectures = official.get("architectures") or []
        if not architectures and names is not None and not any(name.startswith("model.") for name in names):
            architectures = [next(head.official for head in self.heads if not head.prefix)]
        return self.head(super().form({"architectures": architectures}))

    def _written(self, traits: Collection[str]) -> tuple[str, ...]:
        """The embeddings that the official class stores, of those that are there."""
        return (ENCODER, DECODER) if OWN in traits else EMBEDDINGS if UNTIED in traits else (SHARED,)

    def form_for(self, config, earlier: Form | None = None):
        """See `Family.form_for`."""
        head = self.head(super().form_for(config))
        traits = set() if config.tie_word_embeddings else {UNTIED}
        traits |= {OWN} if self._has_own(config) else set()
        traits |= set() if config.share_embeddings else {SEPARATE}
        if head.writes and config.lm_head_bias:
            traits |= {LOGITS_BIAS} if config.lm_head_bias == "fixed" else {LOGITS_BIAS, LEARNT}
        if earlier is not None and earlier.head == head.official:
            meant = {OWN, SEPARATE, UNTIED, LOGITS_BIAS, LEARNT}
            width = config.hidden_size
            sizes = {_sized(SPARE, (config.vocab_size, width))}
            sizes.add(_sized(POSITIONS, (config.max_position_embeddings, width)))
            sized = {trait for trait in earlier.traits if trait.startswith((f"{SPARE} ", f"{POSITIONS} "))}
            if earlier.traits & meant == traits & meant and sized <= sizes:
                return earlier
        return Form(head.official, frozenset({*traits, *self._written(traits)}))

    def _has_own(self, config: PretrainedConfig) -> bool:
        """Whether a config of ours is written with a vocabulary for each side."""
        may = self.own_vocabularies and not config.share_embeddings
        return may and (config.decoder_vocab_size is not None or config.tie_word_embeddings)

    # The tensors.

    def rules_for(self, form):
        """See `Family.rules_for`."""
        head = self.head(form)
        prefix, traits = head.prefix, form.traits
        stored = [name for name in EMBEDDINGS if name in traits and (name != DECODER or SEPARATE not in traits)]
        rules = []
        if stored:
            rules.append(Rule(tuple(prefix + name for name in stored), prefix + ENCODER, Copies(len(stored))))
        if SEPARATE in traits:
            rules.append(Rule(prefix + DECODER, prefix + DECODER))
        for stack, parts in (("encoder", ENCODER_PARTS), ("decoder", DECODER_PARTS)):
            rules += self.stack_rules(f"{prefix}{stack}.", f"{prefix}{stack}.", parts)
        rules += module_rules(dict(head.modules))
        if head.writes:
            rules.append(Rule(LM_HEAD, LM_HEAD))
        if LOGITS_BIAS in traits:
            ours = "lm_head.bias" if LEARNT in traits else "logits_bias"
            rules.append(Rule(LOGITS_BIAS, ours, LeadingAxis()))
        ignored = [*VERSIONS, *(TABLES if self.computes_positions else ())]
        ignored += [SHARED] if any(trait.startswith(f"{SPARE} ") for trait in traits) else []
        return RuleTable(rules, ignored=[prefix + name for name in ignored])

    def stack_rules(self, theirs: str, ours: str, parts: Mapping[str, str]) -> list[Rule]:
        """The rules of a stack, whose official names begin with `theirs`; `parts` of a layer are as `DECODER_PARTS`."""
        modules = {"layernorm_embedding": "embedding_norm"} if self.settings["embedding_norm"] else {}
        if self.settings["final_norm"]:
            modules["layer_norm"] = "norm"
        layer, norm = "layers.{layer}.", f"_{self.settings['norm_placement']}_norm"
        for part, attention in parts.items():
            modules |= {f"{layer}{part}.{a}": f"{layer}{attention}.{b}" for a, b in ATTENTION.items()}
            modules[f"{layer}{part}_layer_norm"] = layer + attention + norm
        modules |= {layer + one: layer + other for one, other in MLP.items()}
        modules[f"{layer}final_layer_norm"] = f"{layer}mlp{norm}"
        rules = module_rules({theirs + one: ours + other for one, other in modules.items()})
        table = "embed_positions.weight"
        return rules if self.computes_positions else [*rules, Rule(theirs + table, ours + table)]

    def adjust(self, shapes, form, config):
        """See `Family.adjust`: nobody stores the computed positions, though the official class has them."""
        tables = {self.head(form).prefix + table for table in TABLES} if self.computes_positions else set()
        return {name: shape for name, shape in shapes.items() if name not in tables}

    def optional(self, form):
        """See `Family.optional`."""
        prefix = self.head(form).prefix
        absent = [prefix + name for name in EMBEDDINGS if name not in form.traits]
        return (*absent, *([] if LOGITS_BIAS in form.traits else [LOGITS_BIAS]))

    def ties(self, tied, form):
        """See `Family.ties`."""
        return {name: source for name, source in tied.items() if name != LM_HEAD or UNTIED not in form.traits}

    # The config.

    def unused(self, official):
        """See `Family.unused`. Layers are never dropped in training here, so that this setting is one of them."""
        return sorted({*super().unused(official), *(name for name in LAYER_DROP if official.get(name))})

    def config_from(self, official, form: Form | None = None):
        """See `Family.config_from`."""
        self.refuse_unsupported({name: value for name, value in official.items() if name != "is_encoder_decoder"})
        form = form or self.form(official)
        head = self.head(form)
        config = self.official_config(official)
        lines = [
            f"{first} is {getattr(config, first)} and {second} is {getattr(config, second)}"
            for first, second in ONE_WIDTH.items()
            if getattr(config, first) != getattr(config, second)
        ]
        if lines:
            raise ConversionError(f"config.json: both stacks must have the same sizes:{listed(lines)}")
        settings = {**self.settings, "architectures": [head.ours]}
        settings.update({ours: getattr(config, theirs) for theirs, ours in FIELDS.items()})
        settings.update({ours: float(getattr(config, theirs)) for theirs, ours in DROPOUTS.items()})
        settings["pad_token_id"] = token_or_none(settings["pad_token_id"])
        dropout = getattr(config, "classifier_dropout", None)
        settings["classifier_dropout"] = None if dropout is None else float(dropout)
        settings["num_key_value_heads"] = config.encoder_attention_heads
        settings["embedding_scale"] = config.d_model**0.5 if config.scale_embedding else None
        settings["tie_word_embeddings"] = UNTIED not in form.traits
        settings["share_embeddings"] = SEPARATE not in form.traits
        settings["decoder_vocab_size"] = config.decoder_vocab_size if OWN in form.traits else None
        settings["lm_head_bias"] = "fixed" if LOGITS_BIAS in form.traits or not head.writes else False
        settings.update(_with_labels(config))
        self.our_config(settings)
        return settings

    def differences(self, config):
        """See `Family.differences`."""
        if not self.has_topology_of(config):
            return [f"model_type must be '{self.config_class.model_type}'"]
        if config.architectures and config.architectures[0] not in {head.ours for head in self.heads}:
            return [f"architectures must be one of {', '.join(head.ours for head in self.heads)}"]
        wanted = {
            **self.settings,
            "num_key_value_heads": config.num_attention_heads,
            "head_dim": config.hidden_size // config.num_attention_heads,
        }
        if not self.own_vocabularies:
            wanted["decoder_vocab_size"] = None
            if config.tie_word_embeddings:
                wanted["share_embeddings"] = True
        if not any(head.modules for head in self.heads):
            wanted["classifier_dropout"] = None
        lines = unequal(config, wanted)
        if config.embedding_scale not in (None, config.hidden_size**0.5):
            lines.append(f"embedding_scale must be None or {config.hidden_size**0.5}, not {config.embedding_scale}")
        if config.initializer_range is None:
            lines.append("initializer_range must be a number, not None")
        if self.own_vocabularies and config.decoder_start_token_id is None:
            lines.append("decoder_start_token_id must be set")
        return lines

    def config_to(self, config):
        """See `Family.config_to`."""
        self.check_expressible(config)
        head = self.head(self.form_for(config))
        official: dict[str, Any] = {"architectures": [head.official], "model_type": self.name}
        official.update({theirs: getattr(config, ours) for theirs, ours in {**FIELDS, **DROPOUTS}.items()})
        official.update({second: official[first] for first, second in ONE_WIDTH.items()})
        official["scale_embedding"] = config.embedding_scale is not None
        official["tie_word_embeddings"] = config.tie_word_embeddings
        official["forced_eos_token_id"] = None  # ours is a generation setting, which lies in another file
        if self.own_vocabularies:
            official["share_encoder_decoder_embeddings"] = not self._has_own(config)
            official["decoder_vocab_size"] = config.decoder_vocab_size or config.vocab_size
        else:
            dropout = config.classifier_dropout
            official["classifier_dropout"] = config.hidden_dropout if dropout is None else dropout
        official.update({name: value for name, value in _with_labels(config).items() if value is not None})
        self.official_config(official)
        return official


def _with_labels(config: PretrainedConfig) -> dict[str, Any]:
    """The common entries with the names of all labels: of BART there are three where nobody says, elsewhere two."""
    entries = config.to_dict()
    labels = {name: entries[name] for name in ("id2label", "label2id") if entries.get(name) is not None}
    return {**common_entries(config), **labels}


def _sized(trait: str, shape: Collection[int]) -> str:
    """A trait that tells the sizes of a tensor that is kept, as it goes back only where they still fit."""
    return f"{trait} {'x'.join(map(str, shape))}"


def bart_heads(prefix: str) -> tuple[BartHead, ...]:
    """The heads of BART under the names that begin with a prefix."""
    both = "BlockformerEncoderDecoder"
    rows = (("classification_head.dense", "dense"), ("classification_head.out_proj", "score"))
    return (
        BartHead(f"{prefix}ForConditionalGeneration", f"{both}ForConditionalGeneration"),
        BartHead(f"{prefix}Model", f"{both}Model"),
        BartHead(f"{prefix}ForSequenceClassification", f"{both}ForSequenceClassification", rows),
        BartHead(f"{prefix}ForQuestionAnswering", f"{both}ForQuestionAnswering", (("qa_outputs", "qa_outputs"),)),
    )


_TRAINED = {"position_type": "learned", "position_offset": 2, "embedding_norm": True}
_AFTER = {"norm_placement": "post", "final_norm": False, "decoder_starts_with_last_label": False}
_BEFORE = {"norm_placement": "pre", "final_norm": True, "decoder_starts_with_last_label": True}
BART = BartFamily("bart", "Bart", bart_heads("Bart"), {**_AFTER, **_TRAINED})
MBART = BartFamily("mbart", "MBart", bart_heads("MBart"), {**_BEFORE, **_TRAINED})
