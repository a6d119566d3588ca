"""The tensors that a checkpoint should have, in each of the layouts that one family's models are stored in.

All three come from the family's own rules, run backwards from the tensors of our model: what is published, what the
official class has in memory, and what our class has.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from blockformer.conversion.families.registry import Family, family_by_name, family_of
from blockformer.conversion.families.with_experts import STACKED
from blockformer.conversion.model_tensors import expected_tensors, unread_pooler
from blockformer.conversion.plan import architecture_of, our_config
from blockformer.conversion.rules.groups import Group, Target, targets_of
from blockformer.conversion.rules.in_turn import in_turn
from blockformer.conversion.rules.operations import Shape
from blockformer.conversion.rules.table import RuleTable
from blockformer.conversion.storage.variant import CheckpointVariant
from blockformer.files.config_file import is_ours
from blockformer.files.errors import ConversionError
from blockformer.files.safetensors_io import HasHeader
from blockformer.model_classes import MODELS


@dataclass(frozen=True)
class Layouts:
    """What the tensors of a model are called, and their shapes.

    Attributes:
        config: the model's, of our class.
        released: as they are published.
        in_class: as the official class has them in memory.
        ours: as our class has them.
        tied: published name -> the published name of the tensor that it is tied to.
        optional: published names that may be missing.
        family, variant: None for a model in our own layout, whose three layouts are one.
        names_in_class: published name -> the names that the official class has for it in memory.
    """

    config: PretrainedConfig
    released: dict[str, Shape]
    in_class: dict[str, Shape]
    ours: dict[str, Shape]
    tied: dict[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    family: Family | None = None
    variant: CheckpointVariant | None = None
    names_in_class: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def family_name(self) -> str | None:
        """Of the official family; None for a model in our own layout."""
        return None if self.family is None else self.family.name

    @property
    def head(self) -> str | None:
        """The official class; None for a model in our own layout."""
        return None if self.variant is None else self.variant.head

    @property
    def known(self) -> set[str]:
        """All names of all layouts."""
        return {*self.released, *self.in_class, *self.ours}

    def groups_to_released(self, tensors: Mapping[str, HasHeader]) -> list[Group]:
        """The groups that turn tensors named as in one of the other layouts into published ones.

        Args:
            tensors: name -> header; each is in `in_class` or in `ours`, and not in `released`.

        Raises:
            ConversionError: parts of a group are missing.
        """
        if self.family is None or self.variant is None or not tensors:
            return []
        layout = self.family.names.layout(self.variant, self.config)
        storage = RuleTable(self.family.names.storage(self.variant, self.config), layers=layout.layers)
        spelled = self.family.names.spelled(self.variant)
        of_class = {name: header for name, header in tensors.items() if name in self.in_class}
        of_ours = {name: header for name, header in tensors.items() if name not in of_class}
        first = layout.plan(of_ours, reverse=True) if of_ours else []
        then = storage.plan({**of_class, **targets_of(first)}, reverse=True, rest=True)
        return [group.renamed(spelled.to_file) for group in in_turn(first, then)]


def layouts_of(
    entries: Mapping[str, Any],
    family_name: str | None,
    names: Collection[str] | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> Layouts:
    """The layouts of the model that a `config.json` describes.

    Args:
        entries: of `config.json`.
        family_name: None takes the family that `model_type` says.
        names: of the checkpoint's tensors, which show the head; None: what the official class writes.
        read: name -> tensor, for families whose variant depends on values.

    Raises:
        ConversionError: the settings are refused, or the family is unknown.
    """
    if is_ours(entries):
        return _of_ours(entries)
    family = family_of(entries) if family_name is None else family_by_name(family_name)
    variant = family.names.variant_of(entries, names, read)
    variant = replace(variant, traits=variant.traits - {STACKED})
    config = family.settings.our_config(family.config_from(entries, variant))
    our_class = family.names.head(variant).model_class
    shapes, tied, _ = expected_tensors(our_class, config)
    pooler = unread_pooler(our_class, config)
    layout = family.names.layout(variant, config)
    in_class = layout.shapes_before(shapes | pooler)
    storage = RuleTable(family.names.storage(variant, config), layers=layout.layers)
    made = storage.plan(_headers(in_class), reverse=True, rest=True)
    spelled = family.names.spelled(variant)

    def published(ours: Mapping[str, Shape]) -> Iterable[str]:
        return (spelled.to_file(name) for name in layout.shapes_before(ours))

    targets = [target for group in made for target in group.targets]
    names_in_class = {spelled.to_file(target.name): group.sources for group in made for target in group.targets}
    ties = {a: b for name, source in tied.items() for a, b in _pairs(published, shapes, name, source)}
    optional = {name: shapes[name] for name in tied} | pooler
    return Layouts(
        config,
        {spelled.to_file(target.name): target.shape for target in targets},
        in_class,
        shapes,
        ties,
        frozenset([*ties, *published(optional)]),
        family,
        variant,
        names_in_class,
    )


def all_names(entries: Mapping[str, Any], family: str | None) -> set[str]:
    """The names that a model of this config has, with the head that it names and with the usual one."""
    usual = {name: value for name, value in entries.items() if name != "architectures"}
    found: set[str] = set()
    for each in (entries, usual):
        with suppress(ConversionError):
            found |= layouts_of(each, family).known
    return found


def missing_ties(layouts: Layouts, filled: set[str]) -> dict[str, tuple[int, ...]]:
    """Tied tensors, all of which are missing."""
    return {
        source: layouts.released[source]
        for name, source in layouts.tied.items()
        if not {name, source} & filled and source in layouts.released
    }


def _of_ours(entries: Mapping[str, Any]) -> Layouts:
    config = our_config(entries)
    model_class = MODELS[architecture_of(config)]
    shapes, tied, _ = expected_tensors(model_class, config)
    pooler = unread_pooler(model_class, config)
    return Layouts(config, shapes | pooler, {}, {}, tied, frozenset([*tied, *pooler]))


def _pairs(
    published: Callable[[Mapping[str, Shape]], Iterable[str]], shapes: Mapping[str, Shape], name: str, source: str
) -> Iterable[tuple[str, str]]:
    """A tied pair by the published names, where each is one tensor there too."""
    one, other = ([*published({each: shapes[each]})] if each in shapes else [] for each in (name, source))
    return [(one[0], other[0])] if len(one) == len(other) == 1 and one != other else []


def _headers(shapes: Mapping[str, Shape]) -> dict[str, HasHeader]:
    return {name: Target(name, torch.float32, tuple(shape)) for name, shape in shapes.items()}
