"""Checkpoints of training code without a class in transformers, as records: whose model computes the same, and how.

A record knows its checkpoint by names, writes the `config.json` of a model that computes the same, and has the rules
from its tensors to that model's; most have the way back. Nothing of the training code is needed or run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import PretrainedConfig

from blockformer.conversion.rules.groups import Group, Target
from blockformer.conversion.rules.table import Rule, RuleTable
from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, shown
from blockformer.files.json_files import read_json
from blockformer.files.regular import open_regular
from blockformer.files.safetensors_io import HasHeader

from .layouts import Layouts
from .map_operations import Constant

Settings = Mapping[str, Any]
Tensors = Mapping[str, HasHeader]
CONFIG = "config.json"
LARGEST_SETTINGS = 1 << 20
"""Bytes."""


@dataclass(frozen=True)
class Model:
    """The model that computes the same.

    Attributes:
        family: the name of its official family; None for a Blockformer model.
        config: of our class.
    """

    family: str | None
    config: PretrainedConfig


@dataclass(frozen=True)
class OwnCode:
    """A kind of training code.

    Attributes:
        name: whose it is.
        shows: names of tensors that only its checkpoints have together.
        key: where the settings lie: a key of its pickled files, or a file next to the weights.
        entries: settings and headers -> the `config.json`.
        rules: the model, names of tensors -> the rules; on the way back the names are empty.
        needs: settings that must be there, positive integers.
        ignored: names that are left out: what the code computes again.
        within: the entry of that file that holds them; "" for the whole file.
        fills: endings of tensors that the code does without -> what their elements are for the same result.
        families: the official families that it can be written of; None for our models.
        back: the model -> its settings, or of a code that saves none what the user says of it; None where nothing is
            written.
        adds: the model -> tensors of a checkpoint that the code computes, and that it shows its settings by.
        file: name of the weights that are written; a folder of `torch.distributed.checkpoint` without a suffix.
    """

    name: str
    shows: tuple[str, ...]
    key: str
    entries: Callable[[Settings, Tensors], dict[str, Any]]
    rules: Callable[[Model, Collection[str]], Sequence[Rule]]
    needs: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    within: str = ""
    fills: tuple[tuple[str, float], ...] = ((".bias", 0.0),)
    families: tuple[str | None, ...] = ()
    back: Callable[[Model], dict[str, Any]] | None = None
    adds: Callable[[Model], dict[str, Tensor]] | None = None
    file: str = ""

    def has_settings(self, checkpoint: Checkpoint, extras: Settings) -> bool:
        """Whether the settings lie with these weights."""
        path = self.settings_file(checkpoint)
        return self.key in extras if path is None else path.is_file()

    def fits(self, names: Collection[str], checkpoint: Checkpoint, extras: Settings) -> bool:
        """Whether these are tensors of this code: an official GPT-2, too, has all the names of a nanoGPT."""
        is_in_pickle = self.settings_file(checkpoint) is None
        is_official = is_in_pickle and bool(checkpoint.config.get("model_type"))
        return {*self.shows} <= {*names} and (not is_official or self.has_settings(checkpoint, extras))

    def settings(self, checkpoint: Checkpoint, extras: Settings, config: Settings) -> Settings:
        """The settings next to the weights, checked.

        Args:
            checkpoint: whose they are.
            extras: what lies next to the weights in a pickled file.
            config: the `config.json`, with what the user says.

        Raises:
            ConversionError: they cannot be read, or one is missing or not a positive integer.
        """
        path = self.settings_file(checkpoint)
        if self.key == CONFIG:
            found: Any = config
        elif path is None:
            found = extras.get(self.key)
        else:
            found = _read(checkpoint, path, self.name)
        found = found.get(self.within) if self.within and isinstance(found, dict) else found
        settings = found if isinstance(found, dict) else {}
        wrong = [name for name in self.needs if type(settings.get(name)) is not int or settings[name] < 1]
        if wrong:
            raise ConversionError(
                f"this is a checkpoint of {self.name}, and its {self.key} lacks {', '.join(map(shown, wrong))}; save "
                "them with the weights, as its code does"
            )
        return settings

    def config(self, settings: Settings, tensors: Tensors) -> dict[str, Any]:
        """The `config.json`, of settings that may hold anything.

        Raises:
            ConversionError: they are not this code's, or no model here computes the same.
        """
        try:
            return self.entries(settings, tensors)
        except ConversionError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConversionError(
                f"the settings in {self.key} do not belong to {self.name}: {type(error).__name__}: {error}"
            ) from error

    def settings_file(self, checkpoint: Checkpoint) -> Path | None:
        """The file with the settings; a `*` in its name stands for the number in the weights' file name."""
        if "." not in self.key:
            return None
        file = next(iter(checkpoint.tensors.values())).file.stem if checkpoint.tensors else ""
        return checkpoint.folder / self.key.replace("*", file.rpartition("_")[2])

    def groups(self, tensors: Tensors, layouts: Layouts) -> list[Group]:
        """The groups that make the other model's tensors, also the ones that the code does not have.

        Args:
            tensors: name -> header.
            layouts: the other model's.

        Raises:
            ConversionError: the settings describe other tensors.
        """
        released = layouts.released
        groups = RuleTable(self.rules(model_of(layouts), tensors), self.ignored).plan(tensors)
        made = {target.name: target.dtype for group in groups for target in group.targets}
        dtype = next(iter(made.values()), torch.float32)
        filled = {name: self.filling(name) for name in released if name not in made}
        return groups + [
            Group((), (Target(name, dtype, released[name]),), Constant(value, (released[name],)))
            for name, value in filled.items()
            if value is not None
        ]

    def filling(self, name: str) -> float | None:
        """What the elements of a tensor are that the code does without; None for any other."""
        return next((value for ending, value in self.fills if name.endswith(ending)), None)


def model_of(layouts: Layouts) -> Model:
    """The model that layouts are of."""
    return Model(layouts.family_name, layouts.config)


def said(value: Any) -> str:
    """A setting as an error names it: texts in quotes, numbers and lists as they are, no more than a line."""
    return shown(value) if isinstance(value, str) else shown(repr(value)).strip("'\"")


def refuse(name: str, lines: Collection[str]) -> None:
    """Refuse settings for which no model here computes the same.

    Args:
        name: whose they are.
        lines: what is wrong with each.

    Raises:
        ConversionError: there are some.
    """
    if lines:
        raise ConversionError(f"no model here computes what this one of {name} does: {'; '.join(lines)}")


def _read(checkpoint: Checkpoint, path: Path, name: str) -> Any:
    if not path.is_file():
        raise ConversionError(
            f"this is a checkpoint of {name}, and {path.name} with its settings is missing; copy it next to the weights"
        )
    checkpoint.member(path.name)
    if path.suffix == ".json":
        return read_json(path)
    with open_regular(path) as file:
        text = file.read(LARGEST_SETTINGS)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path}: not YAML, or cut short; copy it again") from error
