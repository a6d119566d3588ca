"""The building blocks of a family: heads, forms, and config values that need more than a renaming."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import ConversionError
from ..rules.operations import Shape
from ..rules.table import Rule, module_rules

RELEASED = frozenset(dir(transformers))
"""What the installed release of transformers has; making the list takes it a third of a second."""
DROPOUTS = ("hidden_dropout", "attention_dropout", "activation_dropout")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
"""Fields that some official classes leave out."""
LANGUAGE_MODELS = ("ForCausalLM", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration")
# Of every configuration class: nothing that a model computes with, but part of what a user set.
COMMON_FIELDS = ("problem_type", "output_hidden_states", "return_dict", "chunk_size_feed_forward")


@dataclass(frozen=True)
class Head:
    """What a model is for.

    Attributes:
        official: name of the official class in transformers.
        ours: name of ours in `blockformer`.
        root: prefix of the official names of the stack's tensors; our names have "model." unless it is the stack alone.
        modules: official module -> ours, each with weight and bias, beyond the stack's.
        tensors: official tensor -> ours, beyond those.
    """

    official: str
    ours: str
    root: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)

    @property
    def bare(self) -> bool:
        """Whether it is the stack alone: then no name of a tensor has a prefix, in both layouts."""
        return self.ours.endswith("Model")

    @property
    def our_root(self) -> str:
        """Prefix of our names of the stack's tensors."""
        return "" if self.bare else "model."

    @property
    def writes_text(self) -> bool:
        """Whether it is a language model."""
        return self.ours.endswith(LANGUAGE_MODELS)

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """Our class."""
        import blockformer

        return getattr(blockformer, self.ours)

    @property
    def config_class(self) -> type[PretrainedConfig]:
        """The configuration class of ours."""
        return self.model_class.config_class

    @property
    def rules(self) -> list[Rule]:
        """The rules of its own tensors."""
        return [*module_rules(self.modules), *(Rule(theirs, ours) for theirs, ours in self.tensors.items())]

    def has_tensors_in(self, names: Collection[str]) -> bool:
        """Whether all of its own tensors are among these."""
        return all(rule.source in names for rule in self.rules)


@dataclass(frozen=True)
class Form:
    """How one checkpoint of a family is written, as far as `config.json` does not say it.

    Attributes:
        head: name of the official class that its tensors make.
        traits: which of several spellings its names have, and which optional tensors are there; the family's own words.
        sizes: shapes of tensors that are kept beside the weights, which go back only where they still fit.
    """

    head: str
    traits: frozenset[str] = frozenset()
    sizes: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True)
class Official:
    """What a value is read from.

    Attributes:
        config: the official configuration object, complete with its defaults.
        entries: `config.json` as it is stored.
        form: the form of the checkpoint.
        head: its head.
    """

    config: PretrainedConfig
    entries: Mapping[str, Any]
    form: Form
    head: Any


class Value(Protocol):
    """Fields of ours that do not simply have another name in an official config, in both directions."""

    def read(self, official: Official) -> dict[str, Any]:
        """Our fields. Raises `ConversionError` where ours cannot express it."""

    def write(self, config: PretrainedConfig, head: Any) -> dict[str, Any]:
        """The official entries. Raises `NotExpressible` where they cannot say it."""


class NotExpressible(ConversionError):
    """A field of ours whose value a family cannot write.

    Args:
        name: the field.
        wanted: what it must be.
        value: what it is.
    """

    def __init__(self, name: str, wanted: str, value: Any = None):
        super().__init__(f"{name} must be {wanted}, not {value!r}")
        self.field = name


@dataclass(frozen=True)
class Computed:
    """A value of two functions."""

    reader: Callable[[Official], dict[str, Any]] = lambda official: {}
    writer: Callable[[PretrainedConfig, Any], dict[str, Any]] = lambda config, head: {}

    def read(self, official: Official) -> dict[str, Any]:
        """See `Value.read`."""
        return self.reader(official)

    def write(self, config: PretrainedConfig, head: Any) -> dict[str, Any]:
        """See `Value.write`."""
        return self.writer(config, head)


def constants(**entries: Any) -> Computed:
    """Official entries that are written and never read."""
    return Computed(writer=lambda config, head: entries)


class HeadDim:
    """The size of a head, which official configs may leave out.

    Args:
        always: whether it is written also where it is `hidden_size / num_attention_heads`.
    """

    def __init__(self, always: bool = True):
        self.always = always

    def read(self, official):
        """See `Value.read`."""
        config = official.config
        return {"head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads}

    def write(self, config, head):
        """See `Value.write`."""
        usual = config.head_dim * config.num_attention_heads == config.hidden_size
        return {"head_dim": config.head_dim} if self.always or not usual else {}


def _write_pruned(config, head):
    pruned = config.pruned_heads or {}
    return {"pruned_heads": {str(layer): heads for layer, heads in pruned.items()}} if pruned else {}


PRUNED_HEADS = Computed(lambda official: {"pruned_heads": official.entries.get("pruned_heads") or None}, _write_pruned)
"""Heads that a checkpoint is without. Official classes of transformers 4 read the entry."""
NOT_PRUNED = "transformers has no layers of fewer heads (pruned_heads) since version 5"


class NoWindow:
    """No layer has a window; the family has no such setting."""

    def read(self, official):
        """See `Value.read`."""
        layer_types = getattr(official.config, "layer_types", None)
        if layer_types is not None and set(layer_types) != {"full_attention"}:
            raise ConversionError("config.json: layer_types is set, which this family does not have; drop it")
        return {"sliding_window": None, "layer_types": ["full_attention"] * official.config.num_hidden_layers}

    def write(self, config, head):
        """See `Value.write`."""
        return {}


class WindowEverywhere:
    """A window in every layer or in none."""

    def read(self, official):
        """See `Value.read`."""
        window = official.config.sliding_window
        layer_type = "full_attention" if window is None else "sliding_attention"
        layer_types = getattr(official.config, "layer_types", None)
        if layer_types is not None and set(layer_types) != {layer_type}:
            raise ConversionError(
                f"config.json: layer_types must be {layer_type} in every layer when sliding_window is {window}; "
                "layers of both kinds are another family's"
            )
        return {"sliding_window": window, "layer_types": [layer_type] * official.config.num_hidden_layers}

    def write(self, config, head):
        """See `Value.write`."""
        return {"sliding_window": config.sliding_window}


class WindowByLayer:
    """A window in some of the layers.

    Args:
        by_flag: whether the official classes also need `use_sliding_window`, and where full layers end.
    """

    def __init__(self, by_flag: bool = True):
        self.by_flag = by_flag

    def read(self, official):
        """See `Value.read`."""
        config = official.config
        slides = "sliding_attention" in config.layer_types
        if slides and config.sliding_window is None:
            raise ConversionError(
                "config.json: layer_types names sliding_attention, but sliding_window is null or use_sliding_window "
                "is false; mend one of them"
            )
        return {"sliding_window": config.sliding_window if slides else None, "layer_types": list(config.layer_types)}

    def write(self, config, head):
        """See `Value.write`."""
        entries = {"sliding_window": config.sliding_window, "layer_types": list(config.layer_types)}
        if not self.by_flag:  # these classes make a mask for a window in any case, and want its length
            return {name: value for name, value in entries.items() if value is not None}
        layers = config.num_hidden_layers
        full = next((i for i, kind in enumerate(config.layer_types) if kind != "full_attention"), layers)
        return entries | {"use_sliding_window": config.sliding_window is not None, "max_window_layers": full}


class InnerSize:
    """The inner width of the feed-forward network, where None, or nothing at all, is four times the width.

    Args:
        name: the official field, if there is one.
    """

    def __init__(self, name: str | None = None):
        self.name = name

    def read(self, official):
        """See `Value.read`."""
        said = None if self.name is None else getattr(official.config, self.name)
        return {"intermediate_size": 4 * official.config.hidden_size if said is None else said}

    def write(self, config, head):
        """See `Value.write`."""
        plain = config.intermediate_size == 4 * config.hidden_size
        return {} if self.name is None else {self.name: None if plain else config.intermediate_size}


def invert_power(factor: float, power: float) -> float:
    """The roundest number whose `power` is a factor: what a config most likely said."""
    exact = factor ** (1 / power)
    rounded = (round(exact, digits) for digits in range(17))
    found = next((each for each in rounded if each > 0 and each**power == factor), exact)
    return int(found) if found == int(found) else found


@dataclass(frozen=True)
class Factor:
    """A factor that is a number there, and None here where it is 1."""

    theirs: str
    ours: str

    def read(self, official):
        """See `Value.read`."""
        factor = getattr(official.config, self.theirs)
        return {self.ours: None if factor == 1 else float(factor)}

    def write(self, config, head):
        """See `Value.write`."""
        factor = getattr(config, self.ours)
        return {self.theirs: 1.0 if factor is None else factor}


@dataclass(frozen=True)
class Flag:
    """A field of ours of which an official flag chooses the value.

    Args:
        theirs: the flag.
        ours: our field.
        values: our value where the flag is false, and where it is true.
    """

    theirs: str
    ours: str
    values: tuple[Any, Any]

    def read(self, official):
        """See `Value.read`."""
        return {self.ours: self.values[bool(getattr(official.config, self.theirs))]}

    def write(self, config, head):
        """See `Value.write`."""
        return {self.theirs: getattr(config, self.ours) == self.values[1]}


def common_entries(config: PretrainedConfig, default_labels: int) -> dict[str, Any]:
    """What a config says in the same words in both layouts: `COMMON_FIELDS`, names of labels, the dtype.

    Args:
        config: of either layout.
        default_labels: how many labels the official class has where nobody says it; ours has two.
    """
    entries = config.to_dict()
    found = {name: entries[name] for name in (*COMMON_FIELDS, "dtype") if entries.get(name) is not None}
    names = entries.get("id2label")
    usual = names is None or {int(number): name for number, name in names.items()} == {0: "LABEL_0", 1: "LABEL_1"}
    if names is not None and not (usual and default_labels == 2):
        found |= {"id2label": names, "label2id": entries["label2id"]}
    return found


def token_or_none(token: Any) -> Any:
    """A token id, None for the -1 of old files, which means that there is none."""
    return None if isinstance(token, int) and token < 0 else token
