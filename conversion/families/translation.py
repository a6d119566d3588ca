"""A config in both layouts, as data: official fields and ours, fixed values of ours, and computed values.

`config_from` reads it, `config_to` writes it, and `differences` follows from both: whatever a round trip out and in
does not preserve, a family cannot express. So a field that a family does not name must have its default.

The official side is read through transformers' configuration class, so its defaults, old spellings (`rope_theta`,
`rope_scaling`, `torch_dtype`) and checks are the official ones, not a copy. The family names the class; no code of a
checkpoint is involved.
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PretrainedConfig

from blockformer.declared_fields import axes_of
from blockformer.files.config_file import NEVER_FOLLOWED, with_floats
from blockformer.files.errors import ConversionError, listed, shown
from blockformer.files.quantized import FIELDS, REMEDY, without_empty
from blockformer.files.quiet import quiet
from blockformer.model.axes import did_you_mean
from blockformer.model_classes import MODELS
from blockformer.size_bounds import check_counts

from ..storage.variant import CheckpointVariant
from ..values import DROPOUTS, TOKENS, NotExpressible, Official, Value, common_entries, token_or_none
from .head import Head
from .unused import other_dropouts, without_effect

# Official settings that change what a model computes and that no family here has: name -> values that mean "not used".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "is_encoder_decoder": (None, False),
    "cross_attention_hidden_size": (None,),
    "per_layer_config": (None, {}),
    "token_classification_bias": (None, True),
    "pruned_heads": (None, {}),
}
MASKS = ("is_causal", "sliding_window", "attention_chunk_size")
"""Official settings that the masks and caches of transformers follow in every class, also in one that lacks them."""
_NO_WINDOW = "this family has no windows, but the official cache would forget what lies before one; set it to null"
_NOT_FOLLOWED = "the official class computes as if it were not there, so run this model with its own code"
BOTH_WAYS = "use_bidirectional_attention"
"""An official setting that only some classes read."""
REMEDIES = {
    "is_encoder_decoder": "generate follows it; it must be true for an encoder-decoder and false for other models",
    "is_causal": "the official class then looks the other way; remove it if the model was not trained like that",
    "sliding_window": _NO_WINDOW,
    "attention_chunk_size": _NO_WINDOW,
    **dict.fromkeys(("no_bias", "logit_scale", "expansion_ratio"), _NOT_FOLLOWED),
    **dict.fromkeys(FIELDS, REMEDY),
    BOTH_WAYS: "ours looks back only in this family, so run this model with transformers or "
    "sentence-transformers; set it to false only for a model that was trained so",
    "slow_but_exact": "with pretraining_tp above 1 the official class leaves out two biases; set it to false",
}
"""Official setting -> why it cannot be converted and what to do, where its name does not say that."""
BY_ITS_OWN_CODE = (
    "the official class does not follow it, only code of the source's own; for a model that was trained to look both "
    "ways write is_causal: false in its place"
)
WITHOUT_EFFECT = ("pretraining_tp",)
"""Official settings that may be there and change nothing: into how many slices some classes cut their products."""
ABOUT_THE_FILE = ("_name_or_path", "_commit_hash", "transformers_version")
"""Entries of a config file on its origin, not on the model."""
NOT_COMPUTED = frozenset(
    ("blocks", "other_entries", "use_cache", "initializer_range", "classifier_dropout", "nextn_loss_weight")
)
"""Our fields that need not come back: nothing that a trained model computes depends on them."""
OF_LANGUAGE_MODELS = frozenset(("lm_head_transform", "lm_head_bias", "logit_scale", "tie_word_embeddings"))
"""Our fields that need not come back where there is no language model head."""

Formerly = Mapping[str, str] | Callable[[Mapping[str, Any]], Any]
"""Earlier value of an official field -> today's, or what makes today's of all entries."""


@dataclass(frozen=True)
class Preset:
    """The settings of a fresh model.

    Attributes:
        topology: "decoder", "encoder" or "encoder_decoder".
        settings: ours; a function makes a value of the others.
    """

    topology: str
    settings: Mapping[str, Any]


class ConfigTranslation(ABC):
    """The half of a family that is about configs.

    Args:
        name: the official `model_type`; another name for a model that shares it.
        config_class: name of the official configuration class in transformers.
        heads: what its models are for; the first is taken where a config does not say.
        structure: our fields that are the same in all of its models.
        fresh: what a fresh model has beyond them; None: there is no preset.
        fields: official field -> ours, or several of ours that it sets together. Several official fields of one field
            of ours must be equal, except dropouts: they do nothing in evaluation, and the first is taken.
        fixed: our fields that the family never varies; None: its structure. Fields that are named nowhere have our
            default.
        computed: values that are more than a name; later ones win.
        unsupported: official settings, beyond `UNSUPPORTED`, that ours cannot express: name -> values that do no harm.
        contradictions: the entries of an official `config.json` -> names of those that ours cannot express together.
        training_only: official settings that only act in training, and that ours does not have.
        extra_fields: entries of an official `config.json` that the family reads although the official class does not
            have them, or that it reads although other families do not support them.
        not_none: our fields that the family cannot express as None.
        without_effect: our fields that change nothing in its models, so that they need not come back.
        former_names: earlier names of official classes -> today's.
        former_fields: earlier names of official fields -> today's, perhaps with earlier values -> today's, or with a
            function that makes today's value of all entries.
        former_types: earlier `model_type` -> what its config meant by entries that it leaves out.
        refused: official classes of this `model_type` that no class of ours can be, with the reason.
    """

    topology = ""
    """What its presets are."""
    directions: tuple[bool, ...] = (True,)
    """What a decoder's `is_causal` may be."""

    def __init__(
        self,
        name: str,
        config_class: str,
        heads: Collection[Head],
        *,
        structure: Mapping[str, Any] | None = None,
        fresh: Mapping[str, Any] | None = None,
        fields: Mapping[str, str | tuple[str, ...]] | None = None,
        fixed: Mapping[str, Any] | None = None,
        computed: Sequence[Value] = (),
        unsupported: Mapping[str, tuple[Any, ...]] | None = None,
        contradictions: Callable[[Mapping[str, Any]], list[str]] | None = None,
        training_only: Collection[str] = (),
        extra_fields: Collection[str] = (),
        not_none: Collection[str] = (),
        without_effect: Collection[str] = (),
        former_names: Mapping[str, str] | None = None,
        former_fields: Mapping[str, str | tuple[str, Formerly]] | None = None,
        former_types: Mapping[str, Mapping[str, Any]] | None = None,
        refused: Mapping[str, str] | None = None,
    ):
        self.name = name
        self.config_class_name = config_class
        self.heads = tuple(heads)
        self.fields = {theirs: (ours,) if isinstance(ours, str) else ours for theirs, ours in (fields or {}).items()}
        self.structure = dict(structure or {})
        self.preset = None if fresh is None else Preset(self.topology, {**self.structure, **fresh})
        self.fixed = dict(self.structure if fixed is None else fixed)
        self.computed = tuple(computed)
        self.unsupported = {**UNSUPPORTED, **(unsupported or {})}
        self.contradictions, self.training_only = contradictions, tuple(training_only)
        self.former_fields: dict[str, tuple[str, Formerly]] = {
            name: (today, {}) if isinstance(today, str) else today for name, today in (former_fields or {}).items()
        }
        self.former_types = dict(former_types or {})
        self.extra_fields = (*extra_fields, *self.former_fields)
        self.not_none = tuple(not_none)
        self.without_effect = frozenset(without_effect)
        self.former_names = dict(former_names or {})
        self.refused = dict(refused or {})

    # What `Family` knows of checkpoints.

    @abstractmethod
    def variant_of(self, official: Mapping[str, Any]) -> CheckpointVariant:
        """See `Family.variant_of`."""

    @abstractmethod
    def variant_for(self, config: PretrainedConfig) -> CheckpointVariant:
        """See `Family.variant_for`."""

    def config_from(self, official: Mapping[str, Any], variant: CheckpointVariant | None = None) -> dict[str, Any]:
        """Our settings for an official `config.json`, `architectures` among them.

        Args:
            official: the entries.
            variant: what is known of the checkpoint; None takes only what `official` says.

        Raises:
            ConversionError: naming every official setting that ours cannot express.
        """
        settings = self._settings_from(official, variant or self.variant_of(official))
        self.our_config(settings)
        return settings

    def _settings_from(self, official: Mapping[str, Any], variant: CheckpointVariant) -> dict[str, Any]:
        """The same, of which our config may still refuse some."""
        head, plain = self.head(variant), self.plain_entries(official)
        bad = self._unsupported(plain)
        if head.ours.startswith("BlockformerEncoderDecoder") and not plain.get("is_encoder_decoder", True):
            bad.append("is_encoder_decoder")
        config = self.official_config({name: value for name, value in plain.items() if name not in bad})
        fields, unequal = self._read_fields(config)
        remedies = REMEDIES if BOTH_WAYS in self.defaults.to_dict() else {**REMEDIES, BOTH_WAYS: BY_ITS_OWN_CODE}
        told = [f"{name} is {shown(plain[name])}" + (f": {remedies[name]}" if name in remedies else "") for name in bad]
        if lines := [*told, *unequal]:
            raise ConversionError(f"config.json: settings that cannot be converted:{listed(lines)}")
        read = Official(config, official, variant, head)
        settings = {**self.fixed, "architectures": [head.ours], **fields}
        for value in self.computed:
            settings.update(value.read(read))
        settings.update(common_entries(config, self.defaults.num_labels))
        return settings

    def _read_fields(self, official: PretrainedConfig) -> tuple[dict[str, Any], list[str]]:
        """Our settings for `fields`, and a line for each two official ones that must be equal and are not.

        Of several dropouts the first is taken: they change nothing in evaluation.
        """
        settings: dict[str, Any] = {}
        origin: dict[str, str] = {}
        lines = []
        for theirs, names in self.fields.items():
            value = getattr(official, theirs, None) if theirs in TOKENS else getattr(official, theirs)
            if theirs == "pad_token_id":
                value = token_or_none(value)
            for name in names:
                if name in DROPOUTS:
                    value = float(value) if type(value) is int else value or 0.0
                if settings.setdefault(name, value) != value and name not in DROPOUTS:
                    values = f"{origin[name]} is {settings[name]} and {theirs} is {value}"
                    lines.append(f"{values}: ours has one {name} for both, so run this model with transformers")
                origin.setdefault(name, theirs)
        return settings, lines

    def config_to(self, config: PretrainedConfig) -> dict[str, Any]:
        """The official `config.json` for a config of ours.

        Raises:
            ConversionError: naming every field of ours that the family cannot express.
        """
        lines = self.differences(config)
        if lines:
            raise ConversionError(f"the family '{self.name}' cannot express this config:{listed(lines)}")
        return self._written(config)[0]

    def _written(self, config: PretrainedConfig) -> tuple[dict[str, Any], list[NotExpressible]]:
        """The official entries for a config of ours, and what they cannot say of it."""
        head = self.head(self.variant_for(config))
        official: dict[str, Any] = {"architectures": [head.official], "model_type": self.model_type}
        official.update({theirs: getattr(config, names[0]) for theirs, names in self.fields.items()})
        lacking = [NotExpressible(name, "set") for name in self.not_none if getattr(config, name) is None]
        if config.pruned_heads and "pruned_heads" not in self.extra_fields:
            fix = "None (blockformer.restore_heads has zeros in their place, the same function)"
            lacking.append(NotExpressible("pruned_heads", fix, config.pruned_heads))
        for value in self.computed:
            try:
                official.update(value.write(config, head))
            except NotExpressible as error:
                lacking.append(error)
        official.update(common_entries(config, self.defaults.num_labels))
        return official, lacking

    def differences(self, config: PretrainedConfig) -> list[str]:
        """The fields of a config of ours that this family cannot express, with what it would need; empty: none.

        They are the fields that are not the same after `config_to` and `config_from`.
        """
        if not self.has_topology_of(config):
            kinds = dict.fromkeys(head.config_class.model_type for head in self.heads)
            return [f"model_type must be {' or '.join(map(repr, kinds))}"]
        head = self.head_for(config)
        if head is None:
            return [f"architectures must be one of {', '.join(dict.fromkeys(head.ours for head in self.heads))}"]
        official, lacking = self._written(config)
        lines = {error.field: str(error) for error in lacking}
        try:
            with quiet():
                returned = type(config)(**self._settings_from(official, self.variant_for(config)))
            again = {name: getattr(returned, name) for name in axes_of(returned)}
        except ValueError as error:
            if not lines:  # else it follows from them
                lines[""] = str(error).removeprefix("config.json: ")
            again = self.fixed
        free = NOT_COMPUTED | self.without_effect | (frozenset() if head.writes_text else OF_LANGUAGE_MODELS)
        for name in axes_of(config):
            value = getattr(config, name)
            if again.get(name, value) != value and name not in lines and (name in self.fixed or name not in free):
                lines[name] = f"{name} must be {again[name]!r}, not {value!r}"
        return list(lines.values())

    @functools.cached_property
    def defaults(self) -> PretrainedConfig:
        """The official configuration object where nobody says anything; of some classes it warns of its own tokens."""
        with quiet():
            return self.official_config({})

    def plain_entries(self, official: Mapping[str, Any]) -> Mapping[str, Any]:
        """The entries, except for a quantization that ours keeps."""
        return official

    def official_config(self, official: Mapping[str, Any]) -> PretrainedConfig:
        """The official configuration object of a `config.json`.

        Raises:
            ConversionError: transformers refuses it.
        """
        left_out = self.former_types.get(str(official.get("model_type")))
        official = without_empty(official)
        official = official if left_out is None else {**left_out, **official, "model_type": self.model_type}
        hidden = (*ABOUT_THE_FILE, *NEVER_FOLLOWED, *self.former_fields)
        settings = self._formerly(official) | {name: value for name, value in official.items() if name not in hidden}
        layers = settings.get("num_hidden_layers")
        try:
            check_counts(layers if type(layers) is int else 0, settings.get("num_labels"))  # before lists of them
            return self.official_config_class(**copy.deepcopy(with_floats(settings)))
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConversionError(f"config.json: {self.config_class_name} refuses it: {reason}") from error

    def _formerly(self, official: Mapping[str, Any]) -> dict[str, Any]:
        """The entries under an earlier name, under today's."""
        entries: dict[str, Any] = {}
        for name, (today, values) in self.former_fields.items():
            if name in official:
                value = official[name]
                if callable(values):
                    value = values(official)
                elif isinstance(value, str):
                    value = values.get(value, value)
                entries[today] = value
        return entries

    def our_config(self, settings: Mapping[str, Any]) -> PretrainedConfig:
        """Our configuration object of the settings that `config_from` gives.

        Raises:
            ConversionError: our config refuses them.
        """
        wanted = {"architectures": [self.our_model_class_name], **copy.deepcopy(dict(settings))}
        try:
            return MODELS[wanted["architectures"][0]].config_class(**wanted)
        except ConversionError:
            raise
        except ValueError as error:
            raise ConversionError(f"config.json: {error}") from error

    def _unsupported(self, official: Mapping[str, Any]) -> list[str]:
        """The names of entries whose values this family cannot express."""
        known = {**self.unsupported, **self._usual_masks(official)}
        bad = [
            name
            for name, value in official.items()
            if name in known and name not in self.extra_fields and not any(value == one for one in known[name])
        ]
        return bad if self.contradictions is None else [*bad, *self.contradictions(official)]

    def _usual_masks(self, official: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """Which values of `MASKS` leave the masks and caches of an official class as they are: name -> values.

        In an encoder-decoder no value of `is_causal` does so, since it turns one of the two stacks round.
        """
        stacks = {head.ours.partition("For")[0].removesuffix("Model") for head in self.heads}
        both = "BlockformerEncoderDecoder" in stacks
        is_encoder = not both and "BlockformerEncoder" in stacks and official.get("is_decoder") is not True
        directions = () if both else (None, False) if is_encoder else self.directions
        has_window = is_encoder or "sliding_window" in self.defaults.to_dict()
        window = {} if has_window else {"sliding_window": (None,)}
        reads_it = is_encoder or both or BOTH_WAYS in self.defaults.to_dict()
        own_code = {} if reads_it else {BOTH_WAYS: (None, False)}
        return {"is_causal": directions, "attention_chunk_size": (None,), **window, **own_code}

    def unused(self, official: Mapping[str, Any]) -> list[str]:
        """Entries of an official `config.json` that change nothing, since the official class makes nothing of them.

        A second dropout of one field of ours is one of them where it differs from the first, which is taken; so are
        settings that only act in training.
        """
        known = {*self.defaults.to_dict(), *ABOUT_THE_FILE, *NEVER_FOLLOWED, *self.unsupported}
        known |= {"architectures", "torch_dtype", "dtype", "rope_theta", "rope_scaling", "rope_parameters", "head_dim"}
        known |= {*WITHOUT_EFFECT, *MASKS, *self.extra_fields, *transformers.GenerationConfig().to_dict()}
        of_training = (name for name in self.training_only if official.get(name))
        strange = without_effect(self.official_config, official, [name for name in official if name not in known])
        return sorted({*strange, *of_training, *other_dropouts(self.fields, self.defaults, official)})

    def unused_note(self, official: Mapping[str, Any], only_misspelt: bool = False) -> list[str]:
        """A note on entries that change nothing, with the official field whose name is nearly theirs; or no note."""
        known = self.defaults.to_dict()
        told = []
        for name in self.unused(official):
            hint = "" if name in known else did_you_mean(name, known, cutoff=0.85).replace(" Did", "did")
            if hint or not only_misspelt:
                told.append(shown(name) + (f" ({hint})" if hint else ""))
        return [f"config.json: settings that {self.name} does not use: {', '.join(told)}"] if told else []

    def head_for(self, config: PretrainedConfig) -> Any | None:
        """The head that a config of ours is for; the first of its topology where it does not say."""
        heads = [head for head in self.heads if head.config_class.model_type == config.model_type]
        if config.architectures:
            heads = [head for head in heads if head.ours == config.architectures[0]]
        return heads[0] if heads else None

    def has_topology_of(self, config: PretrainedConfig) -> bool:
        """Whether one of the heads is for configs of this `model_type`."""
        return any(head.config_class.model_type == config.model_type for head in self.heads)

    def head(self, variant: CheckpointVariant) -> Any:
        """The head that a variant names."""
        return next(head for head in self.heads if head.official == variant.head)

    @property
    def model_type(self) -> str:
        """The official `model_type`."""
        return self.name

    @property
    def model_class_name(self) -> str:
        """The official class of the first head."""
        return self.heads[0].official

    @property
    def our_model_class_name(self) -> str:
        """Our class of the first head."""
        return self.heads[0].ours

    @property
    def official_config_class(self) -> type[PretrainedConfig]:
        """The official configuration class."""
        return getattr(transformers, self.config_class_name)
