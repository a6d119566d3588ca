"""The code that a repo carries: the files of `blockformer/model/` that its topology needs, as they are."""

import ast
import functools
import shutil
import sys
from os import PathLike
from pathlib import Path

from transformers import PretrainedConfig

from ..declared_fields import of_the_package
from ..files.side_file_kinds import same_bytes
from ..model.axes import blocks_of
from ..model.release import STAMP
from ..model_classes import MODELS

MODEL = Path(__file__).parents[1] / "model"
EXTRA_CODE = {"custom_generate/generate.py": Path(__file__).with_name("custom_generate.py")}
"""Code that only some repos carry: its path there -> the file here."""
THIRD_PARTY = frozenset({"torch", "transformers"})
"""What a repo's code may import besides the standard library: it is there wherever the repo can be loaded at all."""

ABOUT_THE_FILE = frozenset(
    {"architectures", "auto_map", "transformers_version", "_name_or_path", "blocks", "other_entries", *STAMP}
)
"""Entries of `config.json` that say nothing of the model itself."""


def full_auto_map(config: PretrainedConfig) -> dict[str, str]:
    """The `auto_map` entries of every Auto class that a config's topology serves, `AutoConfig` included."""
    entries = dict(type(config).auto_classes)
    for name in config.architectures or ():
        named = MODELS.get(name)
        auto_class = getattr(named, "_auto_class", None)
        if named is not None and auto_class:  # of two classes of an Auto class, the config's own
            entries[auto_class] = f"{named.__module__.rpartition('.')[2]}.{name}"
    return entries


def code_files(config: PretrainedConfig) -> list[Path]:
    """The modules that a repo of this config needs: its `auto_map`'s and all that they import, however deep.

    Parts that only some configs name come last.

    Raises:
        RuntimeError: one of them imports something that a repo does not have.
    """
    blocks = [block for block in of_the_package() if block in blocks_of(config)]
    parts = sorted({MODEL / name for block in blocks for name in block.digests})
    return [*topology_files(type(config)), *([MODEL / "blocks.py", *parts] if parts else [])]


def topology_files(config_class: type[PretrainedConfig]) -> list[Path]:
    """The same for a config class."""
    return list(_closure(MODEL, frozenset(code.partition(".")[0] for code in config_class.auto_classes.values())))


def copy_code(folder: str | PathLike[str], config: PretrainedConfig) -> list[Path]:
    """Copy those modules into a repo's folder, and the config's blocks from outside; return where the modules are."""
    for block in blocks_of(config):
        block.write(config, Path(folder) / "config.json")
    return [Path(shutil.copyfile(source, Path(folder) / source.name)) for source in code_files(config)]


def release_code(folder: Path, config: PretrainedConfig) -> dict[str, Path]:
    """Name -> the release's file, for each code file of a repo that is the same byte for byte.

    Args:
        folder: the repo.
        config: its config, which says what code it needs.
    """
    files = {path.name: path for path in code_files(config)} | EXTRA_CODE
    return {name: path for name, path in files.items() if (folder / name).is_file() and same_bytes(folder / name, path)}


@functools.cache
def _closure(folder: Path, entries: frozenset[str]) -> tuple[Path, ...]:
    found: dict[str, Path] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = path = folder / f"{name}.py"
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
