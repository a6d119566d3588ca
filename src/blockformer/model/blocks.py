"""Blocks from outside: classes in a file of their author's, each one more value of an axis.

In a repo such a file stands among these as it is, and `ENTRY` imports it before the model.
"""

import hashlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

BLOCKS: dict[str, dict[str, type]] = {"attention_type": {}, "mlp_type": {}, "norm_type": {}}  # axis -> value -> class
SOURCES: dict[str, bytes] = {}  # the files that they stand in
ENTRY = "with_blocks"


def block(axis: str, value: str, **fields):
    """Enter the class below under a value of an axis, with fields of its own, each declared by `axes.axis`."""

    def enter(cls: type) -> type:
        file = sys.modules[cls.__module__].__file__
        SOURCES[_file_of(cls)] = Path(file).read_bytes()  # type: ignore[arg-type]
        declared = {name: field.metadata["axis"] for name, field in fields.items()}
        cls.fields = {name: each._replace(optional=each.default is None) for name, each in declared.items()}  # type: ignore[attr-defined]
        BLOCKS.setdefault(axis, {})[value] = cls
        return cls

    return enter


def own_block(config, axis: str) -> type | None:
    """The class from outside that a config names for an axis, if it does."""
    return _found(vars(config), axis)


def own_fields(settings: Mapping) -> dict:
    """The fields of the blocks that some settings name."""
    return {name: each for cls in _classes(settings) for name, each in cls.fields.items()}


def digests(config) -> dict[str, str]:
    """The files of a config's blocks and their SHA-256."""
    return {
        name: hashlib.sha256(SOURCES[name]).hexdigest() for name in sorted({*map(_file_of, _classes(vars(config)))})
    }


def entry(files, modules, source: str) -> str:
    """The code of `ENTRY`: these blocks, then the model's `modules` and what the first one's `source` imports.

    All stand there by name: older loaders follow no import of an import.
    """
    others = sorted({*re.findall(r"^ *from \.(\w+) import", source, re.MULTILINE)} - {*modules})
    lines = [f"from .{name} import __doc__ as _  # noqa: F401" for name in (*map(_stem, files), *others)]
    lines += [f"from .{name} import *  # noqa: F403" for name in modules]
    return "\n".join(['"""The blocks of this repo and its model. Written by Blockformer."""', "", *lines, ""])


def write_blocks(config, folder: Path) -> None:
    """Write the files of a config's blocks into a repo, as they are, and `ENTRY`."""
    for name in (files := digests(config)):
        (folder / name).write_bytes(SOURCES[name])
    if files:
        modules = sorted({code.partition(".")[0] for code in config.auto_classes.values()})
        source = Path(sys.modules[type(config).__module__].__file__).read_text("utf-8")  # type: ignore[arg-type]
        (folder / f"{ENTRY}.py").write_text(entry(files, modules, source), "utf-8")


def _found(settings: Mapping, axis: str) -> type | None:
    value = settings.get(axis)
    return BLOCKS[axis].get(value) if isinstance(value, str) else None


def _classes(settings: Mapping) -> list:
    return [cls for axis in BLOCKS if (cls := _found(settings, axis)) is not None]


def _file_of(cls: type) -> str:
    return f"{cls.__module__.rpartition('.')[2]}.py"


def _stem(file: str) -> str:
    return file.removesuffix(".py")
