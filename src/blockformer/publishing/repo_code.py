"""The code that a repo carries: which modules a config needs, and copying them beside the weights."""

import ast
import functools
import shutil
import sys
from os import PathLike
from pathlib import Path

from transformers import PretrainedConfig

CORE = Path(__file__).parents[1]
THIRD_PARTY = frozenset({"torch", "transformers"})
"""What exported code may import besides the standard library: it is there wherever the repo can be loaded at all."""


def full_auto_map(config: PretrainedConfig) -> dict[str, str]:
    """The `auto_map` entries of every Auto class that a config's topology serves, `AutoConfig` included."""
    import blockformer  # which imports this module

    entries = dict(type(config).auto_classes)
    for name in config.architectures or ():
        named = getattr(blockformer, name, None)
        auto_class = getattr(named, "_auto_class", None)
        if named is not None and auto_class:  # of two classes of an Auto class, the config's own
            entries[auto_class] = f"{named.__module__.rpartition('.')[2]}.{name}"
    return entries


def code_files(config: PretrainedConfig) -> list[Path]:
    """The modules that a repo of this config needs: those of its `auto_map` and everything they import, however deep.

    Raises:
        RuntimeError: one of them imports something that a repo does not have.
    """
    return list(_closure(CORE, frozenset(target.partition(".")[0] for target in full_auto_map(config).values())))


@functools.cache
def _closure(core: Path, entries: frozenset[str]) -> tuple[Path, ...]:
    found: dict[str, Path] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = path = core / f"{name}.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = [(node.module or "").partition(".")[0]]
            elif isinstance(node, ast.ImportFrom):
                if node.level != 1 or not node.module or "." in node.module:
                    raise RuntimeError(f"{path.name}: line {node.lineno}: only `from .name import x` works in a repo")
                waiting.append(node.module)
                continue
            else:
                continue
            for root in roots:
                if root not in THIRD_PARTY and root not in sys.stdlib_module_names:
                    raise RuntimeError(f"{path.name}: line {node.lineno}: an exported repo may not import '{root}'")
    return tuple(found[name] for name in sorted(found))


def copy_code(folder: str | PathLike[str], config: PretrainedConfig) -> list[Path]:
    """Copy the core's modules into a repo of this config and return where they went."""
    return [Path(shutil.copyfile(path, Path(folder) / path.name)) for path in code_files(config)]
