"""Decoders: how their tensors are named, and most of their settings; as in Llama unless a family says otherwise.

A family is data: which official module is which of ours. Some keep several of our matrices in one, or the channels of
a head in another order; an operation says how.

Today's classes write the stack's tensors with a prefix, or without one if the model is only the stack. Some
checkpoints do the opposite, whatever their head: that is a trait of their `CheckpointVariant`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from transformers import PretrainedConfig

from blockformer.model.rotary import rotary_size

from ..rules.operations import Chain, DeinterleaveRotary, Each, Identity, Reversible, Split
from ..rules.patterns import tuple_of
from ..rules.table import Rule, RuleTable, module_rules
from ..storage import awq
from ..storage.low_bits import FIELD
from ..storage.variant import CheckpointVariant
from ..values import HeadDim, Rope, Value, Window
from .decoder_heads import DROPOUT_ENTRIES, ClassifierDropout, decoder_heads
from .further import FURTHER, PROJECTIONS, FurtherLayers
from .head import VALUE_HEAD, Head
from .names import AS_IN_CLASS, Names
from .refused import UNSUPPORTED
from .settings import Settings
from .shared import ATTENTION, LAYER, MLP, OUTER, QKV, Modules, usual_layer

COMPUTED = ("inv_freq", "cos_cached", "sin_cached")
"""Buffers of rotary positions in old files; ColossalAI also saves the ones that other programs leave out."""

ROPE, HEAD_DIM = Rope(), HeadDim()


class LowBits(Value):
    """The 4-bit weights of an AWQ checkpoint."""

    def read(self, official):
        size = awq.group_size(official.entries)
        return {} if size is None else {"linear_bits": 4, "linear_group_size": size}

    def write(self, config, head):
        return {} if config.linear_bits is None else {FIELD: awq.entries_for(config.linear_group_size)}


class Direction(Value):
    """Whether tokens see later ones too, as in a text encoder made from a decoder."""

    def read(self, official):
        return {"bidirectional": not official.entries.get("is_causal", True)}

    def write(self, config, head):
        return {"is_causal": False} if config.bidirectional else {}


@dataclass(kw_only=True, eq=False)
class DecoderSettings(Settings):
    """The settings of a decoder.

    Attributes:
        rope: how rotary parameters are written; None for a family without.
        window: how windows are written; None: by the fields for them that the official class has.
        head_dim: how the size of a head is written; None for a family that does not say it.
        reads_whole: whether the official class follows an `is_causal` of false.
    """

    rope: Value | None = ROPE
    window: Value | None = None
    head_dim: Value | None = HEAD_DIM
    reads_whole: bool = True

    always_unsupported = {**UNSUPPORTED, "add_cross_attention": (None, False)}

    @property
    def always_read(self):
        return DROPOUT_ENTRIES

    @property
    def directions(self):
        return (True, False) if self.reads_whole else (True,)

    @property
    def values(self):
        head_dim = HeadDim("head_dim" in self.known) if self.head_dim is HEAD_DIM else self.head_dim
        return [
            *filter(None, (head_dim, self.rope)),
            *(self.window or Window(self.known), ClassifierDropout()),
            *([Direction()] if self.reads_whole else []),
            *([LowBits()] if self.low_bits else []),
            *self.computed,
        ]


@dataclass(kw_only=True, eq=False)
class DecoderNames(Names[Head]):
    """The names of a decoder's tensors.

    Attributes:
        layer: official module of a layer -> ours, or several of ours that it holds side by side; None: Llama's names,
            with the norms and the gate that the family's structure has (`usual_layer`).
        outer: official module outside of the layers -> ours.
        layers: what the official names of a layer's tensors begin with.
        root, qa_root, token_head, head_bias, bare_root: see `decoder_heads`.
        split: how a module that holds several of ours does so, for a Blockformer config; None: one after the other.
        pairs: whether the official class turns neighbouring channels of a head.
        more_rules: a Blockformer config -> more rules of a layer, without its prefix.
        in_files: the same of tensors that files hold in another form: theirs -> the class's.
        ignored: see `RuleTable`; official names of the stack: of computed tensors, or of layers after the model's.
        outside: the same of tensors that lie outside of the stack.
        further: where checkpoints hold layers that predict further tokens, a value of the settings, too; None: ours has
            none of theirs.
    """

    layer: Modules | None = None
    outer: Modules = field(default_factory=lambda: OUTER)
    layers: str = LAYER
    root: str = "model."
    qa_root: str = ""
    token_head: str = "score"
    head_bias: bool = False
    bare_root: str = ""
    split: Callable[[PretrainedConfig, tuple[int, ...]], Reversible] | None = None
    pairs: bool = False
    more_rules: Callable[[PretrainedConfig], list[Rule]] = lambda config: []
    in_files: Callable[[PretrainedConfig], list[Rule]] = lambda config: []
    ignored: Collection[str] = ()
    outside: Collection[str] = ()
    further: FurtherLayers | None = None

    topology = "decoder"

    @property
    def modules(self) -> Modules:
        """Official module of a layer -> ours, or several of ours."""
        return usual_layer(self.settings.structure) if self.layer is None else self.layer

    def usual_heads(self, classes):
        return decoder_heads(
            classes,
            self.root,
            qa_root=self.qa_root,
            token_head=self.token_head,
            head_bias=self.head_bias,
            bare_root=self.bare_root,
        )

    @property
    def low_bits(self):
        plain = {ours for ours in self.modules.values() if isinstance(ours, str)}
        return not self.pairs and len(plain) == len(self.modules) and plain.issuperset(QKV)

    @property
    def own_traits(self):
        return frozenset() if self.further is None else frozenset({FURTHER})

    @property
    def inner(self):
        return (*(f"{each}." for each in self.outer), self.layers.partition(".")[0] + ".")

    # The variant: which head, whether there is a prefix.

    def variant_of(self, official, names: Collection[str] | None = None, read=None):
        """See `Names.variant_of`. Without `architectures` the tensors tell."""
        head = self.find_head(official, names)
        traits = self.shown_alternatives(head, names or ())
        if names is not None and not head.bare:
            to_class = self.spelled(CheckpointVariant(head.official, traits)).to_class
            traits |= self.traits_of_ties(head, official, set(map(to_class, names)))
            traits |= self._traits_of_further(head, official, names)
        return CheckpointVariant(head.official, traits)

    def head_by_tensors(self, official, names):
        found = self.in_class(names)
        held = [head for head in self.heads if not head.bare and head.has_tensors_in(found)]
        if held:
            return max(held, key=lambda head: len(head.rules))
        untied = official.get("tie_word_embeddings") is False
        return next(head for head in self.heads if head.bare) if untied else self.heads[0]

    def variant_for(self, config, earlier: CheckpointVariant | None = None):
        variant = super().variant_for(config, earlier)
        has_further = self.further is not None and config.num_nextn_predict_layers
        return replace(variant, traits=variant.traits | {FURTHER}) if has_further else variant

    def _traits_of_further(self, head: Head, official, names: Collection[str]) -> frozenset[str]:
        """Whether a checkpoint holds layers that predict further, of plain weights."""
        if self.further is None or not self.head_name(head) or FIELD in official:
            return frozenset()
        if not any(name.endswith(PROJECTIONS) for name in names):
            return frozenset()
        config = self.settings.official_config(official)
        return frozenset([FURTHER] if self.further.count(config, head.root, names) else [])

    def embeddings_names(self, head, traits):
        return [f"{head.root}{theirs}.weight" for theirs, ours in self.outer.items() if ours == "embed_tokens"]

    # The tensors.

    def storage(self, variant, config):
        layer = self.head(variant).root + self.layers
        rules = [] if AS_IN_CLASS in variant.traits else self.in_files(config)
        return [rule.under(layer, layer) for rule in rules]

    def layout(self, variant, config):
        head = self.head(variant)
        stack = self.stack_rules(config)
        rules = [*(rule.under(head.root, head.our_root) for rule in stack), *head.rules]
        if self.further is not None and config.num_nextn_predict_layers:
            of_a_layer = [rule for rule in stack if tuple_of(rule.target)[0].startswith(LAYER)]
            rules += self.further.rules(of_a_layer, self.layers, LAYER, config)
        if config.linear_bits is not None:
            rules = awq.kept_rules(rules, self._low_bit_weights(variant))
        computed = [f"{place}rotary_emb.{name}" for place in (self.layers + "self_attn.", "") for name in COMPUTED]
        ignored = [*(head.root + name for name in (*computed, *self.ignored)), *self.outside, *VALUE_HEAD]
        return RuleTable(rules, ignored, config.num_hidden_layers)

    def stack_rules(self, config: PretrainedConfig) -> list[Rule]:
        """The rules of the stack's tensors, without prefixes."""
        return [
            *self._module_rules(self.outer, config),
            *self._module_rules(self.modules, config, self.layers, LAYER),
            *(rule.under(self.layers, LAYER) for rule in self.more_rules(config)),
        ]

    def _module_rules(self, modules: Modules, config: PretrainedConfig, theirs: str = "", ours: str = "") -> list[Rule]:
        rules = []
        for official, names in modules.items():
            parts = (names,) if isinstance(names, str) else names
            op = self._in_pairs(config, parts, self._split(config, parts))
            rules += [rule.under(theirs, ours) for rule in module_rules({official: names}, op)]
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
        return frozenset(f"{root}{theirs}.weight" for theirs, ours in self.modules.items() if ours in linear)
