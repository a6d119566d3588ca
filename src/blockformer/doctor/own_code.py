"""Checkpoints of training code without a class in transformers, as records: whose model computes the same, and how.

A record knows its checkpoint by names, writes the `config.json` of a family's model that computes the same, and has the
rules from its tensors to that model's. Nothing of the training code is needed or run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockformer.conversion.rules.groups import Group, Target
from blockformer.conversion.rules.operations import Shape
from blockformer.conversion.rules.table import Rule, RuleTable
from blockformer.files.errors import ConversionError, shown
from blockformer.files.safetensors_io import HasHeader

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class OwnCode:
    """A kind of training code.

    Attributes:
        name: whose it is.
        as_: the official class that computes the same.
        shows: names of tensors that only its checkpoints have together.
        key: the key of the settings in its pickled files.
        needs: settings that must be there, positive integers.
        entries: settings and headers -> the `config.json`.
        rules: the config -> the rules.
        ignored: names that are left out: what the code computes again.
    """

    name: str
    as_: str
    shows: tuple[str, ...]
    key: str
    needs: tuple[str, ...]
    entries: Callable[[Settings, Mapping[str, HasHeader]], dict[str, Any]]
    rules: Callable[[Mapping[str, Any]], Sequence[Rule]]
    ignored: tuple[str, ...] = ()

    def settings(self, extras: Mapping[str, Any]) -> Settings:
        """The settings next to the weights, checked.

        Raises:
            ConversionError: one is missing, or not a positive integer.
        """
        found = extras.get(self.key)
        settings = found if isinstance(found, dict) else {}
        wrong = [name for name in self.needs if type(settings.get(name)) is not int or settings[name] < 1]
        if wrong:
            raise ConversionError(
                f"this is a checkpoint of {self.name}, and its {self.key} lacks {', '.join(map(shown, wrong))}; save "
                "them with the weights, as its code does"
            )
        return settings

    def groups(
        self, tensors: Mapping[str, HasHeader], config: Mapping[str, Any], released: Mapping[str, Shape]
    ) -> list[Group]:
        """The groups that make the official model's tensors; biases that the code leaves out are zero.

        Args:
            tensors: name -> header.
            config: see `entries`.
            released: name -> shape of the official model's.

        Raises:
            ConversionError: the settings describe other tensors.
        """
        groups = RuleTable(self.rules(config), self.ignored).plan(tensors)
        made = {target.name: target.dtype for group in groups for target in group.targets}
        dtype = next(iter(made.values()), torch.float32)
        absent = (name for name in released if name not in made and name.endswith(".bias"))
        return groups + [Group((), (Target(name, dtype, released[name]),), Zeros(released[name])) for name in absent]


@dataclass(frozen=True)
class Zeros:
    """A tensor of zeros: a bias that a model does without."""

    shape: Shape

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros(self.shape)]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [self.shape]
