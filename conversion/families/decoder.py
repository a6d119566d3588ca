"""Decoders: how their tensors are named, and most of their settings; as in Llama unless a family says otherwise.

A family is data: which official module is which of ours. Some keep several of our matrices in one, or the channels of
a head in another order; an operation says how.

Today's classes write the stack's tensors with a prefix, or without one if the model is only the stack. Some
checkpoints do the opposite, whatever their head: that is a trait of their `CheckpointVariant`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from blockformer.model.rotary import rotary_size

from ..rules.operations import Chain, DeinterleaveRotary, Each, Identity, Reversible, Split
from ..rules.patterns import tuple_of
from ..rules.table import Rule, RuleTable
from ..storage import awq
from ..storage.low_bits import FIELD, without
from ..storage.spelling import Alternative, Prefix, Spelling, Spellings
from ..storage.variant import CheckpointVariant
from ..values import HeadDim, NoWindow, Rope, Value
from .base import HEAD_ONLY, Family
from .decoder_heads import DROPOUT_ENTRIES, ClassifierDropout, decoder_heads
from .further import FURTHER, FurtherLayers
from .head import VALUE_HEAD, Head

Modules = Mapping[str, str | tuple[str, ...]]
PREFIX, NO_PREFIX = "prefix", "no prefix"
"""Traits: names with a head's prefix in a checkpoint of the class without a head, and the other way round."""
LAYER = "layers.{layer}."
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = {name: name for name in (*QKV, "self_attn.o_proj")}
MLP = {name: name for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
NORMS = {"input_layernorm": "self_attn_pre_norm", "post_attention_layernorm": "mlp_pre_norm"}
"""Official norm of a layer -> ours."""
OUTPUT_NORMS = {"post_attention_layernorm": "self_attn_output_norm", "post_feedforward_layernorm": "mlp_output_norm"}
FOUR_NORMS = {
    "input_layernorm": "self_attn_pre_norm",
    "post_attention_layernorm": "self_attn_output_norm",
    "pre_feedforward_layernorm": "mlp_pre_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
PLAIN_MLP = {name: name for name in ("mlp.up_proj", "mlp.down_proj")}
"""Without a gate."""
LAYER_NORM = {"rms_norm_eps": None, "layer_norm_eps": "norm_eps"}
"""Official field -> ours, of layer norms."""
Q_AND_K_NORM = {name: name for name in ("self_attn.q_norm", "self_attn.k_norm")}
FUSED_MLP: Modules = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj": "mlp.down_proj"}
OUTER = {"embed_tokens": "embed_tokens", "norm": "norm"}
"""Official module outside of the layers -> ours."""
FIELDS: dict[str, str | tuple[str, ...]] = {
    **{
        name: name
        for name in (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "hidden_act max_position_embeddings initializer_range use_cache tie_word_embeddings attention_dropout "
            "pad_token_id bos_token_id eos_token_id"
        ).split()
    },
    "rms_norm_eps": "norm_eps",
}
ALL_ATTENTION_BIASES = ("attention_bias", "attention_output_bias")
"""What the official `attention_bias` of some families sets."""
ALL_BIASES = (*ALL_ATTENTION_BIASES, "mlp_bias")
ROPE, HEAD_DIM, NO_WINDOW = Rope(), HeadDim(), NoWindow()

LLAMA = {"norm_type": "rms_norm", "norm_placement": "pre", "position_type": "rotary", "gated_mlp": True}
"""The structure of decoders after Llama."""
BIASES = dict.fromkeys(ALL_BIASES, True)
GPT = {"norm_type": "layer_norm", "norm_placement": "pre", "gated_mlp": False, **BIASES}
"""The structure of decoders after GPT."""
ROTARY_GPT = {**GPT, "position_type": "rotary"}


class LowBits:
    """The 4-bit weights of an AWQ checkpoint."""

    def read(self, official):
        """See `Value.read`."""
        size = awq.group_size(official.entries)
        return {} if size is None else {"linear_bits": 4, "linear_group_size": size}

    def write(self, config, head):
        """See `Value.write`."""
        return {} if config.linear_bits is None else {FIELD: awq.entries_for(config)}


class Direction:
    """Whether tokens see later ones too, as in a text encoder made from a decoder."""

    def read(self, official):
        """See `Value.read`."""
        return {"bidirectional": not official.entries.get("is_causal", True)}

    def write(self, config, head):
        """See `Value.write`."""
        return {"is_causal": False} if config.bidirectional else {}


def sinks(config: PretrainedConfig) -> list[Rule]:
    """The rule of a layer whose heads have sinks."""
    return [Rule("self_attn.sinks", "self_attn.sinks")]


class DecoderFamily(Family[Head]):
    """A decoder with the heads that Auto classes have.

    Args:
        name: the official `model_type`, which is the preset's name too.
        config_class: name of the official configuration class.
        classes: names of the official model classes, the language model first; or the heads that they are.
        structure: our fields that are the same in all of its models, except those in `fields`.
        fresh: what a fresh model has beyond its structure.
        layer: official module of a layer -> ours, or several of ours that it holds side by side.
        outer: official module outside of the layers -> ours.
        root: prefix of the official names of the stack's tensors.
        layers: what the official names of a layer's tensors begin with.
        token_head: name of the official head of tokens.
        qa_root: prefix of the stack's tensors in the official class for question answering.
        head_bias: whether the language model head may have a bias.
        split: how a module that holds several of ours does so, for a config of ours; None: one after the other.
        pairs: whether the official class turns neighbouring channels of a head.
        bare_root: prefix of the stack's tensors in the official class without a head.
        fields: official field -> ours, beyond `FIELDS`; None takes one of those away.
        rope: how rotary parameters are written; None for a family without.
        window: how windows are written.
        head_dim: how the size of a head is written; None for a family that does not say it.
        computed: more values.
        more_rules: a config of ours -> more rules of a layer, without its prefix.
        spellings: see `Family.own_spellings`.
        ignored: see `RuleTable`; official names of the stack: of computed tensors, or of layers after the model's.
        outside: the same of tensors that lie outside of the stack.
        further: where checkpoints hold layers that predict further tokens; None: ours has none of theirs.
        reads_whole: whether the official class follows an `is_causal` of false.
        settings: further arguments of `ConfigTranslation`.
    """

    topology = "decoder"

    def __init__(
        self,
        name: str,
        config_class: str,
        classes: str | Sequence[Head],
        *,
        structure: Mapping[str, Any],
        fresh: Mapping[str, Any],
        layer: Modules = {**ATTENTION, **MLP, **NORMS},  # noqa: B006 - never changed
        outer: Modules = OUTER,
        root: str = "model.",
        layers: str = LAYER,
        token_head: str = "score",
        qa_root: str = "",
        head_bias: bool = False,
        split: Callable[[PretrainedConfig, tuple[int, ...]], Reversible] | None = None,
        pairs: bool = False,
        bare_root: str = "",
        fields: Mapping[str, str | tuple[str, ...] | None] | None = None,
        rope: Value | None = ROPE,
        window: Value = NO_WINDOW,
        head_dim: Value | None = HEAD_DIM,
        computed: Sequence[Value] = (),
        more_rules: Callable[[PretrainedConfig], list[Rule]] = lambda config: [],
        spellings: Sequence[Spelling] = (),
        ignored: Collection[str] = (),
        outside: Collection[str] = (),
        further: FurtherLayers | None = None,
        reads_whole: bool = True,
        **settings,
    ):
        known = {theirs: ours for theirs, ours in {**FIELDS, **(fields or {})}.items() if ours is not None}
        varied = {each for names in known.values() for each in ((names,) if isinstance(names, str) else names)}
        if isinstance(classes, str):
            roots = {"qa_root": qa_root, "bare_root": bare_root}
            heads: Sequence[Head] = decoder_heads(classes, root, token_head=token_head, head_bias=head_bias, **roots)
        else:
            heads = classes
        plain = {ours for ours in layer.values() if isinstance(ours, str)}
        self.has_low_bits = not pairs and len(plain) == len(layer) and plain.issuperset(QKV)
        super().__init__(
            name,
            config_class,
            heads,
            structure=structure,
            fresh=fresh,
            fields=known,
            fixed={field: value for field, value in structure.items() if field not in varied},
            computed=[
                *([] if head_dim is None else [head_dim]),
                *([] if rope is None else [rope]),
                *(window, ClassifierDropout()),
                *([Direction()] if reads_whole else []),
                *([LowBits()] if self.has_low_bits else []),
                *([] if further is None else [further]),
                *computed,
            ],
            unsupported={"add_cross_attention": (None, False), **settings.pop("unsupported", {})},
            extra_fields=(*DROPOUT_ENTRIES, *settings.pop("extra_fields", ())),
            **settings,
        )
        self.directions = (True, False) if reads_whole else (True,)
        self.root, self.bare_root = root, bare_root
        self.layer, self.outer, self.layers = layer, outer, layers
        self.split, self.pairs = split, pairs
        self.more_rules, self.own_spellings = more_rules, Spellings(spellings)
        self.inner = (*(f"{each}." for each in outer), layers.partition(".")[0] + ".")
        self.ignored = (layers + "self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq", *ignored)
        self.outside, self.further = tuple(outside), further
        self.own_traits |= frozenset() if further is None else {FURTHER}

    # The variant: which head, whether there is a prefix.

    def variant_of(self, official, names: Collection[str] | None = None, read=None):
        """See `Family.variant_of`. Without `architectures` the tensors tell."""
        head = self.find_head(official, names)
        traits = self.shown_alternatives(head, names or ())
        if names is not None and not head.bare:
            todays = self.spellings(CheckpointVariant(head.official, traits)).todays
            traits |= self.traits_of_ties(head, official, set(map(todays, names)))
            traits |= self._traits_of_further(head, official, names)
        return CheckpointVariant(head.official, traits)

    def head_by_tensors(self, official, names):
        """See `Family.head_by_tensors`."""
        held = [head for head in self.heads if not head.bare and head.has_tensors_in(names)]
        if held:
            return max(held, key=lambda head: len(head.rules))
        untied = official.get("tie_word_embeddings") is False
        return next(head for head in self.heads if head.bare) if untied else self.heads[0]

    def variant_for(self, config, earlier: CheckpointVariant | None = None):
        """See `Family.variant_for`."""
        variant = super().variant_for(config)
        if earlier is not None and earlier.head == variant.head:
            fits = {PREFIX, NO_PREFIX} | ({HEAD_ONLY} if config.tie_word_embeddings else set())
            variant = CheckpointVariant(variant.head, earlier.traits & fits)
        has_further = self.further is not None and config.num_nextn_predict_layers
        return replace(variant, traits=variant.traits | {FURTHER}) if has_further else variant

    def _traits_of_further(self, head: Head, official, names: Collection[str]) -> frozenset[str]:
        """Whether a checkpoint holds layers that predict further, of plain weights."""
        if self.further is None or not self.head_name(head) or FIELD in official:
            return frozenset()
        if not any(name.endswith((".eh_proj.weight", "mtp.fc.weight")) for name in names):
            return frozenset()
        return frozenset([FURTHER] if self.further.count(self.official_config(official), head.root, names) else [])

    def alternatives(self, head):
        """See `Family.alternatives`."""
        if head.bare:
            return [[Alternative(PREFIX, Prefix(self.root, self.bare_root, self.inner), starts=(self.root,))]]
        bare = tuple(self.bare_root + name for name in self.inner)
        return [[Alternative(NO_PREFIX, Prefix(self.bare_root, head.root, self.inner), starts=bare)]]

    def embeddings_names(self, head, traits):
        """See `Family.embeddings_names`."""
        return [f"{head.root}{theirs}.weight" for theirs, ours in self.outer.items() if ours == "embed_tokens"]

    def plain_entries(self, official):
        """See `ConfigTranslation.plain_entries`."""
        return without(official) if self.has_low_bits and awq.AWQ.is_told(official) else official

    # The tensors.

    def layout(self, variant, config):
        """See `Family.layout`."""
        head = self.head(variant)
        stack = self.stack_rules(config)
        rules = [*(rule.under(head.root, head.our_root) for rule in stack), *head.rules]
        if self.further is not None and config.num_nextn_predict_layers:
            of_a_layer = [rule for rule in stack if tuple_of(rule.target)[0].startswith(LAYER)]
            rules += self.further.rules(of_a_layer, self.layers, LAYER, config)
        if config.linear_bits is not None:
            rules = awq.kept_rules(rules, self._low_bit_weights(variant))
        ignored = [*(head.root + name for name in self.ignored), *self.outside, *VALUE_HEAD]
        return RuleTable(rules, ignored, config.num_hidden_layers)

    def stack_rules(self, config: PretrainedConfig) -> list[Rule]:
        """The rules of the stack's tensors, without prefixes."""
        return [
            *self._module_rules(self.outer, config),
            *self._module_rules(self.layer, config, self.layers, LAYER),
            *(rule.under(self.layers, LAYER) for rule in self.more_rules(config)),
        ]

    def _module_rules(self, modules: Modules, config: PretrainedConfig, theirs: str = "", ours: str = "") -> list[Rule]:
        rules = []
        for official, names in modules.items():
            parts = (names,) if isinstance(names, str) else names
            op = self._in_pairs(config, parts, self._split(config, parts))
            for kind in ("weight", "bias"):
                targets = tuple(f"{ours}{part}.{kind}" for part in parts)
                rules.append(Rule(f"{theirs}{official}.{kind}", targets if len(targets) > 1 else targets[0], op))
        return rules

    def _split(self, config: PretrainedConfig, parts: tuple[str, ...]) -> Reversible:
        """How these matrices lie in one."""
        if len(parts) == 1:
            return Identity()
        heads, groups = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
        sizes = dict(zip(QKV, (heads, groups, groups), strict=True))
        rows = tuple(sizes.get(part, config.intermediate_size) for part in parts)
        return Split(0, rows) if self.split is None or QKV[0] not in parts else self.split(config, rows)

    def _in_pairs(self, config, parts: tuple[str, ...], op: Reversible) -> Reversible:
        """Queries and keys whose pairs are side by side, among these parts."""
        if not self.pairs or not {*QKV[:2]} & {*parts}:
            return op
        turn = DeinterleaveRotary(config.head_dim, rotary_size(config.rope_parameters, config.head_dim))
        turns = tuple(turn if part in QKV[:2] else Identity() for part in parts)
        return turns[0] if len(turns) == 1 else Chain(op, Each(turns))

    def _low_bit_weights(self, variant) -> frozenset[str]:
        root, linear = self.head(variant).root + self.layers, {*ATTENTION, *MLP}
        return frozenset(f"{root}{theirs}.weight" for theirs, ours in self.layer.items() if ours in linear)
