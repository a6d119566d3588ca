"""A checkpoint of unknown code by a file of names: the model that it becomes, and the groups that make it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockformer.conversion.model_tensors import with_sources
from blockformer.conversion.rules.groups import Group
from blockformer.files.errors import ConversionError
from blockformer.files.quiet import quiet
from blockformer.files.safetensors_io import HasHeader, torch_name

from .finding import WARNING, Finding
from .layouts import Layouts, layouts_of
from .name_map import NameMap
from .prefixes import unwrapped


@dataclass
class Mapped:
    """What a file of names makes of a checkpoint.

    Attributes:
        config: the `config.json` that is written.
        layouts: of the model.
        groups: what makes its tensors, which read them by their names in the file.
        findings, changes: see `Diagnosis`.
    """

    config: dict[str, Any]
    layouts: Layouts
    groups: list[Group]
    findings: list[Finding]
    changes: list[str]


def mapped(
    name_map: NameMap,
    tensors: Mapping[str, HasHeader],
    names: Mapping[str, str],
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    family: str | None,
) -> Mapped:
    """The model that a file of names makes of tensors.

    Args:
        name_map: the file.
        tensors: name in the checkpoint -> header.
        names: name as it was renamed -> name in the checkpoint, of the tensors that are not dropped.
        config: the checkpoint's `config.json`, which counts where the file of names has no `model_type`.
        settings: entries of the config that the user sets.
        family: the family that the user names.

    Raises:
        ConversionError: one error that lists everything that does not fit.
    """
    is_said = bool(name_map.config.get("model_type")) or family is not None
    entries = {**({} if is_said else config), **name_map.config, **settings}
    layouts, refused = None, None
    try:
        with quiet():
            layouts = layouts_of(entries, family)
    except ConversionError as error:
        refused = str(error)
    plain = unwrapped([*names], name_map.beginnings)
    own = {**{name: names[old] for name, old in plain.names.items()}, **{name: names[name] for name in plain.lora}}
    headers = {name: tensors[old] for name, old in own.items()}
    if layouts is None:
        groups = name_map.groups(headers, {}, (), None, refused)
        raise AssertionError(f"{refused}, {len(groups)} groups")  # refused, so `groups` has raised an error
    groups = name_map.groups(headers, layouts.released, layouts.optional, layouts.config)
    if layouts.head is not None:
        entries |= {"architectures": [layouts.head]}
    if groups:
        entries.setdefault("dtype", torch_name(groups[0].targets[0].dtype))
    head = layouts.head or type(layouts.config).__name__
    said = f"these are weights of code that no library knows; {name_map.path} makes a {head} of them"
    finding = Finding("own-code", WARNING, said, "--mend writes it; --check FILE compares its logits with yours", True)
    changes = [*plain.changes, f"written as {head}, by {name_map.path}"]
    return Mapped(entries, layouts, with_sources(groups, own), [*plain.findings, finding], changes)
