"""What BERT-like encoders share: rules, and the different spellings of names in their checkpoints.

A checkpoint may leave out its encoder's prefix or have one where the official class has none, may call the weights of
norms `gamma` and `beta`, and may store the bias of its language model head once or twice. Which of this it does is its
`CheckpointVariant`; the rules use the names of today's official classes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError

from ..rules.operations import Copies, Split
from ..rules.table import Rule, RuleTable, module_rules
from ..storage.modules import ModulesInFiles
from ..storage.spelling import Alternative, Ending, Prefix
from ..storage.variant import CheckpointVariant
from ..values import NOT_PRUNED, PRUNED_HEADS, RELATIVE, SIDE, EncoderPositions, Pooler, Value
from .architectures import unknown_class
from .encoder_heads import LM, NSP, EncoderHead, LanguageModelNames, encoder_heads
from .names import Names
from .oracle import Oracle
from .settings import Settings
from .shared import FIELDS

OLD_NORMS = Ending({"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"})
EMBEDDING_NORM = {"embeddings.LayerNorm": "embedding_norm"}
HEADS_OF_ROWS = ("classifier.", "pre_classifier.", "qa_outputs.")


@dataclass(kw_only=True, eq=False)
class EncoderSettings(Settings):
    """The settings of an encoder after BERT.

    Attributes:
        positions: what reads the position type.
        pooler_act: activation of the pooler.
    """

    positions: Value = EncoderPositions()
    pooler_act: str = "tanh"

    @property
    def values(self):
        has_side = any(getattr(head, "is_decoder", False) for head in self.heads)
        sides, pruned = [SIDE] if has_side else [], [PRUNED_HEADS] if self._is_berts else []
        return [self.positions, Pooler(self.pooler_act), *sides, *pruned, *self.computed]

    @property
    def always_read(self):
        return ("position_embedding_type", "pruned_heads") if self._is_berts else ()

    @property
    def _is_berts(self) -> bool:
        """Whether its config has what transformers 4 had in BERT's."""
        return isinstance(self.positions, EncoderPositions)


def not_runnable(family: str, config: PretrainedConfig) -> str | None:
    """See `Oracle.not_runnable`."""
    if config.pruned_heads:
        return NOT_PRUNED
    if config.position_type not in RELATIVE:
        return None
    return f"transformers has dropped position_embedding_type '{config.position_type}'"


@dataclass(kw_only=True, eq=False)
class EncoderNames(Names[EncoderHead]):
    """The names of an encoder after BERT.

    Attributes:
        root: prefix of the encoder's tensors in models with a head.
        embeddings: official module of the embeddings -> ours.
        layer: prefix of a layer's tensors, with `{layer}`; "" where its modules say the number themselves.
        modules: official module of a layer -> ours, each with weight and bias.
        fused: official module of a layer -> ours that lie in it, one below the other.
        stack: the other official modules of the stack -> ours, each with weight and bias.
        relative_key: official name, in a layer, of the table of relative keys; "" for a family without.
        language_model: the names of that head.
        pooler: official name of the pooler's dense layer.
        next_sentence: official name of the head for the next sentence.
        in_files: how checkpoints name modules, where the official class has other names.
        former_root: a prefix that checkpoints have where `root` would stand, in models without a head too.
        ignored: more tensors of the encoder that the official class does not read.
        ignored_heads: the same of heads.
    """

    root: str
    embeddings: Mapping[str, str]
    layer: str
    modules: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stack: Mapping[str, str] = field(default_factory=lambda: EMBEDDING_NORM)
    relative_key: str = ""
    language_model: LanguageModelNames
    pooler: str = "pooler.dense"
    next_sentence: str = "cls.seq_relationship"
    in_files: ModulesInFiles | None = None
    former_root: str = ""
    ignored: Sequence[str] = ()
    ignored_heads: Sequence[str] = ()

    topology = "encoder"
    usual_fields = {**FIELDS, "classifier_dropout": "classifier_dropout"}
    oracle = Oracle(not_runnable=not_runnable, position_shift=lambda config: config.position_offset)

    def usual_heads(self, classes):
        return encoder_heads(classes)

    @property
    def own_traits(self):
        return frozenset({"decoder", "relative", "untied", "pooler", "both biases", "second bias"})

    @property
    def inner(self):
        layers = [self.layer] if self.layer else [*self.modules]
        names = [*self.embeddings, *layers, *self.stack, "pooler."]
        names += [self.in_files.layer, *self.in_files.stack] if self.in_files is not None else []
        return tuple(dict.fromkeys(f"{name.partition('.')[0]}." for name in names))

    # The variant: which head, which names.

    def variant_of(self, official, names: Collection[str] | None = None, read=None):
        """See `Names.variant_of`. A head that the tensors hold beyond what `architectures` says is taken too."""
        head = self.find_head(official, names)
        traits = {"decoder"} if head.is_decoder else set()
        if official.get("position_embedding_type") in RELATIVE:
            traits.add("relative")
        if official.get("tie_word_embeddings", True) is False:
            traits.add("untied")
        if names is None:
            return CheckpointVariant(
                head.official, frozenset(traits | ({"pooler"} if head.pooler != "unused" else set()))
            )
        traits |= self.shown_alternatives(head, names)
        variant = CheckpointVariant(head.official, frozenset(traits))
        found = set(map(self.spelled(variant).to_class, names))
        traits |= self.traits_of_ties(head, official, found)
        if f"{self.root_of(head)}{self.pooler}.weight" in found:
            traits.add("pooler")
        if self.language_model.copy and self.language_model.copy in found:
            # Where nothing is tied, the official class adds the second one and never looks at the first.
            both = self.language_model.bias in found and "untied" not in traits
            traits.add("both biases" if both else "second bias")
        return CheckpointVariant(head.official, frozenset(traits))

    def find_head(self, official, names):
        """See `Names.find_head`; a decoder has its own heads, and a head's model may be named with its stack."""
        is_decoder = official.get("is_decoder", False) is True
        known = [head for head in self.heads if head.is_decoder == is_decoder]
        if not known:
            raise ConversionError(
                f"config.json: is_decoder is true, and '{self.family}' is only converted as an encoder"
            )
        named = self.named(official)
        self.check_class(named)
        chosen = [head for head in known if head.official in named]
        with_head = [head for head in chosen if not head.bare]
        if named and (len(chosen) != len(named) or len(with_head) > 1):
            fitting = self._head_by_tensors(known, [], names) if names else None
            kind = f"'{self.family}' with is_decoder {'true' if is_decoder else 'false'}"
            raise unknown_class(official, known, fitting, kind)
        chosen = with_head or chosen
        if chosen and names is not None:
            chosen = [self._stored_head(chosen[0], known, official, names)]
        found = self._head_by_tensors(known, chosen, names or ())
        if found is None:
            raise ConversionError(
                "config.json: architectures is missing, and the tensors do not show what the head is for; "
                f"set it to one of {', '.join(head.official for head in known)}"
            )
        return found

    def _head_by_tensors(
        self, known: Sequence[EncoderHead], chosen: Sequence[EncoderHead], names: Collection[str]
    ) -> EncoderHead | None:
        """The head that was chosen, with what the tensors hold beyond it; None where they do not show its kind."""
        lm = self.language_model
        modules = {LM: lm.dense or lm.weight.partition(".")[0], NSP: self.next_sentence}
        held = {part for part, module in modules.items() if any(name.startswith(module + ".") for name in names)}
        if chosen and (chosen[0].modules or not held):
            return chosen[0]
        found = self.in_class(names)
        own = [head for head in known if head.modules and head.has_tensors_in(found)]
        if not chosen and (own or any(name.startswith(HEADS_OF_ROWS) for name in names)):
            return own[0] if len(own) == 1 else None
        parts = frozenset(held) | (chosen[0].parts if chosen else frozenset())
        plain = [head for head in known if head.parts == parts and not head.modules]
        return plain[0] if plain else (chosen or known)[0]

    def _stored_head(
        self, head: EncoderHead, known: Sequence[EncoderHead], official: Mapping[str, Any], names: Collection[str]
    ) -> EncoderHead:
        """The head without the parts of which the tensors hold nothing: in the end only the stack."""

        def has(*own: str) -> bool:
            starts = tuple(filter(None, own))
            return not starts or any(name.startswith(starts) for name in names)

        lm, parts = self.language_model, set(head.parts)
        is_tied = not lm.dense and self.settings.official_config(official).tie_word_embeddings
        if not is_tied and not has(lm.dense, lm.norm, lm.weight, lm.bias, lm.copy):
            parts.discard(LM)
        if not has(self.next_sentence):
            parts.discard(NSP)
        if parts == head.parts and has(*head.modules, *head.tensors, head.own_pooler):
            return head
        return next((each for each in known if each.parts == parts and not each.modules), head)

    def variant_for(self, config, earlier: CheckpointVariant | None = None):
        head = self.known_head(config)
        traits = {"decoder"} if head.is_decoder else set()
        if config.pooler_act is not None and not head.own_pooler:
            traits.add("pooler")
        if config.position_type in RELATIVE:
            traits.add("relative")
        if not config.tie_word_embeddings:
            traits.add("untied")
        shared = {"relative", "untied"} | (set() if head.own_pooler or head.is_decoder else {"pooler"})
        if earlier is not None and earlier.head == head.official and earlier.traits & shared == traits & shared:
            return earlier
        if not config.tie_word_embeddings and self.language_model.copy:
            traits.add("both biases")
        return CheckpointVariant(head.official, frozenset(traits))

    def head(self, variant):
        sides = [head for head in self.heads if head.official == variant.head]
        return next(head for head in sides if head.is_decoder == ("decoder" in variant.traits))

    def root_of(self, head):
        return "" if head.bare else self.root

    def alternatives(self, head):
        former = self.former_root
        before = [Alternative("former prefix", Prefix(former, self.root_of(head), self.inner), starts=(former,))]
        old_norms = Alternative("gamma and beta", OLD_NORMS, ends=tuple(OLD_NORMS.in_class))
        return [[old_norms], [*(before if former else []), *self.prefixes(head)]]

    def prefixes(self, head):
        """See `Names.prefixes`. A head's own pooler has no prefix and shows none."""
        own = f"{head.own_pooler.partition('.')[0]}."
        usual = super().prefixes(head)
        return [replace(each, starts=tuple(name for name in each.starts if name != own)) for each in usual]

    def head_name(self, head):
        return self.language_model.weight if LM in head.parts else ""

    def embeddings_names(self, head, traits):
        root = self.root_of(head)
        return [f"{root}{theirs}.weight" for theirs, ours in self.embeddings.items() if ours == "embed_tokens"]

    # The tensors.

    def storage(self, variant, config):
        if (files := self.in_files) is None:
            return []
        root = self.root_of(self.head(variant))
        rules = [rule.under(root, root) for rule in module_rules(files.stack)]
        for theirs, modules in files.modules.items():
            own = self._module_rules(theirs, modules, config)
            rules += [rule.under(root + files.layer, root + self.layer) for rule in own]
        return [*rules, *module_rules(files.head)]

    def layout(self, variant, config):
        head = self.head(variant)
        ignored = ["embeddings.position_ids", "embeddings.token_type_ids", *self.ignored]
        rules = module_rules(self.stack)
        for theirs, ours in self.embeddings.items():
            is_idle = "relative" in variant.traits or config.position_type == "rotary"
            if theirs == "embeddings.position_embeddings" and is_idle:
                ignored.append(f"{theirs}.weight")
            else:
                rules.append(Rule(f"{theirs}.weight", f"{ours}.weight"))
        layer = module_rules(self.modules_of(config))
        for theirs, parts in self.fused.items():
            layer += self._module_rules(theirs, parts, config)
        if self.relative_key:
            layer.append(Rule(self.relative_key, "self_attn.relative_keys.embedding.weight"))
        rules += [rule.under(self.layer, "layers.{layer}.") for rule in layer]
        if head.own_pooler or head.is_decoder:
            ignored += [f"{self.pooler}.weight", f"{self.pooler}.bias"]
        else:
            rules += module_rules({self.pooler: "pooler.dense"})
        root = self.root_of(head)
        rules, ignored = [rule.under(root, head.our_root) for rule in rules], [root + name for name in ignored]
        if head.own_pooler:
            rules += module_rules({head.own_pooler: head.our_root + "pooler.dense"})
        rules += head.rules
        if LM in head.parts:
            rules += self._language_model_rules(variant, ignored)
        if NSP in head.parts:
            rules += module_rules({self.next_sentence: "next_sentence_score"})
        return RuleTable(rules, ignored=[*ignored, *self.ignored_heads])

    def modules_of(self, config: PretrainedConfig) -> Mapping[str, str]:
        """`modules`, for a Blockformer config."""
        return self.modules

    def _module_rules(self, theirs: str, parts: str | tuple[str, ...], config: PretrainedConfig) -> list[Rule]:
        """The rules of a module that holds one other, or several one below the other."""
        if isinstance(parts, str):
            return module_rules({theirs: parts})
        heads = config.num_attention_heads * config.head_dim
        rows = tuple(heads if part.startswith("self_attn.") else config.intermediate_size for part in parts)
        return module_rules({theirs: parts}, Split(0, rows))

    def _language_model_rules(self, variant: CheckpointVariant, ignored: list[str]) -> list[Rule]:
        names = self.language_model
        transform = {names.dense: "lm_head_transform.dense", names.norm: "lm_head_transform.norm"}
        rules = module_rules(transform) if names.dense else []
        rules.append(Rule(names.weight, "lm_head.weight"))
        if "both biases" in variant.traits:
            rules.append(Rule((names.bias, names.copy), "lm_head.bias", Copies(2)))
        elif "second bias" in variant.traits:
            ignored.append(names.bias)
            rules.append(Rule(names.copy, "lm_head.bias"))
        else:
            rules.append(Rule(names.bias, "lm_head.bias"))
        return rules

    def reads_ignored(self, name):
        return name.endswith(("position_ids", "embeddings.token_type_ids"))

    def check_ignored(self, name, tensor: Tensor):
        count = torch.arange(tensor.numel()).to(tensor.dtype)
        if name.endswith("position_ids") and not torch.equal(tensor.flatten(), count):
            return "does not count 0, 1, 2, ..., so the positions differ from the official class's"
        if name.endswith("embeddings.token_type_ids") and tensor.any():
            return "is not zero everywhere, so the token types differ from the official class's default"
        return None

    def class_arguments(self, variant):
        head = self.head(variant)
        has_choice = head.bare and any(other.pooler == "usual" for other in self.heads)
        return {"add_pooling_layer": "pooler" in variant.traits and not head.is_decoder} if has_choice else {}
