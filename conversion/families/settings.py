"""A config in both layouts, as data: official fields and ours, fixed values of ours, and computed values.

The official side is read through transformers' configuration class, so its defaults, old spellings (`rope_theta`,
`rope_scaling`, `torch_dtype`) and checks are the official ones, not a copy. The family names the class; no code of a
checkpoint is involved.
"""

import copy
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import transformers
from transformers import PretrainedConfig

from blockformer.files.config_file import NEVER_FOLLOWED, with_floats
from blockformer.files.errors import ConversionError, listed, reason_of
from blockformer.files.quantized import without_empty
from blockformer.files.quiet import quiet
from blockformer.model_classes import MODELS
from blockformer.size_bounds import check_counts

from ..rules.patterns import tuple_of
from ..storage.awq import AWQ
from ..storage.low_bits import without
from ..storage.variant import CheckpointVariant
from ..values import (
    DROPOUTS,
    ENDS,
    LAST_PLACE,
    TOKENS,
    NotExpressible,
    Official,
    Value,
    common_entries,
    token_or_none,
    within,
)
from .former import Former
from .head import Head
from .refused import MASKS, UNSUPPORTED, lines_on, usual_masks
from .unused import note_on, other_dropouts, without_effect

WITHOUT_EFFECT = ("pretraining_tp",)
"""Official settings that may be there and change nothing: into how many slices some classes cut their matmuls."""
OF_ALL = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
"""Official settings that every class takes, also one that leaves them out where nobody says anything."""
ANSWERS = "ForQuestionAnswering"
STARTS_AND_ENDS = {0: "LABEL_0", 1: "LABEL_1"}
"""The labels of a head for answers, for which official classes have a row each; ours has two rows, whatever labels."""
ABOUT_THE_FILE = ("_name_or_path", "_commit_hash", "transformers_version")
"""Entries of a config file on its origin, not on the model."""


def of_padding(topology: str, learns: bool) -> dict[str, bool]:
    """Our setting for the embedding of padding, which an official class trains or not, where our default differs."""
    return {"pad_token_learns": learns} if learns == topology.endswith("encoder") else {}


@dataclass(kw_only=True, eq=False)
class Settings:
    """The settings of a family: how an official config says them and how ours does.

    Attributes:
        fields: official field -> ours, or several of ours that it sets together, beyond `usual`. Several official
            fields for one of ours must be equal, except dropouts: they do nothing in evaluation, and the first is
            taken.
        usual: the same for many families: each holds where the official class has it, and neither `fields` say
            otherwise nor `unsupported`. None: what all of these names have (`Names.usual_fields`).
        fixed: our fields that the family never varies, beyond its structure. Fields that are named nowhere have our
            default.
        computed: values that are more than a name; later ones win.
        unsupported: official settings, beyond `UNSUPPORTED`, that ours cannot express: name -> values that do no harm.
        contradictions: the entries of an official `config.json` -> the names that ours cannot express together.
        training_only: official settings that only act in training, and that ours does not have.
        extra_fields: entries of an official `config.json` that the family reads although the official class does not
            have them, or that it reads although other families do not support them.
        not_none: our fields that the family cannot express as None.
        without_effect: our fields that change nothing in its models, so that they need not come back.
        former: what earlier releases called settings.
        family, model_type, config_class, heads, structure, pad_token_learns, scales_in_embedding: the family enters
            its own: its name, the official `model_type`, the name of the official configuration class, its heads, its
            structure, whether the official class trains the embedding of padding, and whether its embedding module
            scales.
        low_bits: whether linear layers may keep 4-bit weights, which the names say.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    computed: Sequence[Value] = ()
    unsupported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    contradictions: Callable[[Mapping[str, Any]], list[str]] | None = None
    training_only: Collection[str] = ()
    extra_fields: Collection[str] = ()
    not_none: Collection[str] = ()
    without_effect: Collection[str] = ()
    former: Former = field(default_factory=Former)
    family: str = ""
    model_type: str = ""
    config_class: str = ""
    heads: Sequence[Head] = ()
    structure: Mapping[str, Any] = field(default_factory=dict)
    low_bits: bool = False
    pad_token_learns: bool = False
    scales_in_embedding: bool | str = False

    always_unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    @functools.cached_property
    def known(self) -> frozenset[str]:
        """The settings that the official class has where nobody says anything."""
        return frozenset(self.defaults.to_dict())

    @functools.cached_property
    def meanings(self) -> dict[str, tuple[str, ...]]:
        """Official field -> ours, of all that only have another name."""
        own = {theirs: tuple_of(ours) for theirs, ours in self.fields.items()}
        taken = {*self.without_effect, *(name for names in own.values() for name in names)}
        said = {*self.known, *OF_ALL} - {*self.unsupported}
        usual = {theirs: tuple_of(ours) for theirs, ours in (self.usual or {}).items() if theirs in said}
        return {theirs: ours for theirs, ours in usual.items() if taken.isdisjoint(ours)} | own

    @functools.cached_property
    def constant(self) -> dict[str, Any]:
        """Our fields that are the same in all of its models."""
        varied = {name for names in self.meanings.values() for name in names}
        return {**{name: value for name, value in self.structure.items() if name not in varied}, **self.fixed}

    @property
    def always_read(self) -> tuple[str, ...]:
        """Entries that all families of this kind read, as if they were in `extra_fields`."""
        return ()

    @property
    def directions(self) -> tuple[bool, ...]:
        """What a decoder's `is_causal` may be."""
        return (True,)

    @property
    def values(self) -> list[Value]:
        """All values that are more than a name."""
        return [*self.computed]

    @property
    def official_class(self) -> type[PretrainedConfig]:
        """The official configuration class."""
        return getattr(transformers, self.config_class)

    def official_config(self, official: Mapping[str, Any]) -> PretrainedConfig:
        """The official configuration object of a `config.json`.

        Raises:
            ConversionError: transformers refuses it.
        """
        official = self.former.with_defaults(without_empty(official), self.model_type)
        hidden = (*ABOUT_THE_FILE, *NEVER_FOLLOWED, *self.former.fields)
        settings = self.former.renamed(official)
        settings |= {name: value for name, value in official.items() if name not in hidden}
        layers = settings.get("num_hidden_layers")
        try:
            check_counts(layers if type(layers) is int else 0, settings.get("num_labels"))  # before lists of them
            return self.official_class(**copy.deepcopy(with_floats(settings)))
        except Exception as error:
            types = settings.get("layer_types")
            if isinstance(types, list) and type(layers) is int and len(types) != layers:
                raise ConversionError(
                    f"config.json: layer_types lists {len(types)} types, and num_hidden_layers is {layers}. Write one "
                    'type for each layer of the model, or "layer_types": null if they are the usual ones of this family'
                ) from error
            reason = reason_of(error).partition(". Errors:")[0]
            reason = re.sub(r"^Class validation error for validator '\w+': (\w+: )?", "", reason)
            raise ConversionError(f"config.json: {self.config_class} refuses it: {reason}") from error

    @functools.cached_property
    def defaults(self) -> PretrainedConfig:
        """The official configuration object with its defaults; some classes then warn about their special tokens."""
        with quiet():
            return self.official_config({})

    def our_config(self, settings: Mapping[str, Any]) -> PretrainedConfig:
        """Our configuration object of the settings that `read` gives.

        Raises:
            ConversionError: our config refuses them.
        """
        wanted = {"architectures": [self.heads[0].ours], **copy.deepcopy(dict(settings))}
        try:
            return MODELS[wanted["architectures"][0]].config_class(**wanted)
        except ConversionError:
            raise
        except ValueError as error:
            fix = " Write the id that the tokenizer has, or null" if "must be a token from" in str(error) else ""
            fix = " Plain weights: dequantize (--dequantize bf16)." if wanted.get("linear_bits") else fix
            raise ConversionError(f"config.json: {error}{fix}") from error

    # From the official settings to ours.

    def read(self, official: Mapping[str, Any], variant: CheckpointVariant, head: Head) -> dict[str, Any]:
        """Our settings for an official `config.json`, of which our config may still refuse some.

        Args:
            official: the entries.
            variant: what is known of the checkpoint.
            head: its head.

        Raises:
            ConversionError: naming every official setting that ours cannot express.
        """
        plain = without(official) if self.low_bits and AWQ.is_told(official) else without_empty(official)
        defaults = self.defaults.to_dict()
        bad = self._unsupported(plain, defaults)
        if head.ours.startswith("BlockformerEncoderDecoder") and not plain.get("is_encoder_decoder", True):
            bad.append("is_encoder_decoder")
        config = self.official_config({name: value for name, value in plain.items() if name not in bad})
        settings, unequal = self._read_fields(config)
        if lines := [*lines_on(bad, plain, defaults), *unequal]:
            raise ConversionError(f"config.json: settings that cannot be converted:{listed(lines)}")
        seen = Official(config, official, variant, head)
        learns = of_padding(head.config_class.model_type, self.pad_token_learns)
        settings = {**self.constant, **learns, "architectures": [head.ours], **settings}
        if "DecoderForSequenceClassification" in head.ours and official.get("pad_token_id") == LAST_PLACE:
            settings["pad_token_id"] = LAST_PLACE
        for value in self.values:
            settings.update(value.read(seen))
        if self.scales_in_embedding and settings.get("embedding_scale") is not None:
            settings["scales_in_embedding"] = self.scales_in_embedding
        settings.update(common_entries(config, self.defaults.num_labels))
        return settings

    def _unsupported(self, official: Mapping[str, Any], defaults: Collection[str]) -> list[str]:
        """The names of entries whose values this family cannot express."""
        masks = usual_masks(self.heads, self.directions, defaults, official)
        known = {**self.always_unsupported, **self.unsupported, **masks}
        read = {*self.extra_fields, *self.always_read, *self.former.fields}
        bad = [
            name
            for name, value in official.items()
            if name in known and name not in read and not any(value == one for one in known[name])
        ]
        return bad if self.contradictions is None else [*bad, *self.contradictions(official)]

    def _read_fields(self, official: PretrainedConfig) -> tuple[dict[str, Any], list[str]]:
        """Our settings for `meanings`, and a line for each two official ones that must be equal and are not.

        Of several dropouts the first is taken: they change nothing in evaluation.
        """
        settings: dict[str, Any] = {}
        origin: dict[str, str] = {}
        lines = []
        for theirs, names in self.meanings.items():
            value = getattr(official, theirs, None) if theirs in TOKENS else getattr(official, theirs)
            if theirs == "pad_token_id":
                value = token_or_none(value)
            elif theirs in ENDS and value == getattr(self.defaults, theirs, None):
                value = within(value, getattr(official, "vocab_size", None))
            for name in names:
                if name in DROPOUTS:
                    value = float(value) if type(value) is int else value or 0.0
                if settings.setdefault(name, value) != value and name not in DROPOUTS:
                    values = f"{origin[name]} is {settings[name]} and {theirs} is {value}"
                    lines.append(f"{values}: Blockformer has one {name} for both, so run this model with transformers")
                origin.setdefault(name, theirs)
        return settings, lines

    # From ours to the official ones.

    def write(self, config: PretrainedConfig, head: Head) -> tuple[dict[str, Any], list[NotExpressible]]:
        """The official entries for a Blockformer config with this head, and what they cannot say of it."""
        official: dict[str, Any] = {"architectures": [head.official], "model_type": self.model_type}
        official.update({theirs: getattr(config, names[0]) for theirs, names in self.meanings.items()})
        lacking = [NotExpressible(name, "set") for name in self.not_none if getattr(config, name) is None]
        if config.pruned_heads and "pruned_heads" not in (*self.extra_fields, *self.always_read):
            fix = "None (blockformer.restore_heads has zeros in their place, the same function)"
            lacking.append(NotExpressible("pruned_heads", fix, config.pruned_heads))
        for value in self.values:
            try:
                official.update(value.write(config, head))
            except NotExpressible as error:
                lacking.append(error)
        official.update(common_entries(config, self.defaults.num_labels))
        if head.ours.endswith(ANSWERS) and config.num_labels not in (len(STARTS_AND_ENDS), self.defaults.num_labels):
            official |= {"id2label": STARTS_AND_ENDS, "label2id": {name: n for n, name in STARTS_AND_ENDS.items()}}
        return official, lacking

    def written_as(self, config: PretrainedConfig) -> PretrainedConfig:
        """A config of the same function, as far as the way back is one to it and not to this one."""
        return config

    # Entries that change nothing.

    def unused(self, official: Mapping[str, Any]) -> list[str]:
        """Entries of an official `config.json` that change nothing, since the official class makes nothing of them.

        A second dropout for one of our fields is one of them where it differs from the first, which is taken; so are
        settings that only act in training.
        """
        known = {*self.defaults.to_dict(), *ABOUT_THE_FILE, *NEVER_FOLLOWED}
        known |= {*self.always_unsupported, *self.unsupported, *self.extra_fields, *self.always_read}
        known |= {"architectures", "torch_dtype", "dtype", "rope_theta", "rope_scaling", "rope_parameters", "head_dim"}
        known |= {*WITHOUT_EFFECT, *MASKS, *self.former.fields, *transformers.GenerationConfig().to_dict()}
        of_training = (name for name in self.training_only if official.get(name))
        strange = without_effect(self.official_config, official, [name for name in official if name not in known])
        return sorted({*strange, *of_training, *other_dropouts(self.meanings, self.defaults, official)})

    def unused_note(self, official: Mapping[str, Any], only_misspelt: bool = False) -> list[str]:
        """A note on entries that change nothing, with the official field whose name is nearly theirs; or no note."""
        return note_on(self.unused(official), self.defaults.to_dict(), self.family, only_misspelt)
