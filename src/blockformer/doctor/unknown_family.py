"""Weights without a config that says what they are: the families whose names they have, and where a config lies."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockformer.files.containers import where_config_is

from .finding import ERROR, Finding
from .kin import all_known_beginnings, kin
from .prefixes import unwrapped

FEWEST = 4
"""Tensors whose names say something of the family; any three are somebody's."""


def of_no_family(names: Collection[str], config: Mapping[str, Any], folder: Path) -> list[Finding]:
    """What is known of weights whose config has no `model_type`.

    Args:
        names: of the tensors.
        config: what there is of `config.json`.
        folder: of the checkpoint.
    """
    fitting = [name for name, _ in kin(names)] if len(names) >= FEWEST else []
    plain = unwrapped([] if fitting else names, all_known_beginnings())
    fitting = fitting or ([name for name, _ in kin([*plain.names])] if len(plain.names) >= FEWEST else [])
    missing = "config.json: model_type is missing" if config else "config.json is missing"
    if not config and (folder / "config.json").exists():
        missing = "config.json cannot be read"
    if not fitting:
        said = f"{missing}, and the tensors have the names of no known family"
        fix = "put the config.json there, or name the family with --family; names of your own code: --map NAMES.json"
    else:
        said = f"{missing}, and the tensors have the names of {', '.join(fitting[:8])}"
        fix = where_config_is(folder)
        fix = 'write the "model_type" that it is, or name it with --family' if config else fix
    return [*(plain.findings if fitting else []), Finding("config", ERROR, said, fix, names=tuple(fitting))]
