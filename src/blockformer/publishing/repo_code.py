"""The code that a repo carries: which modules a config needs, and copying them beside the weights."""

import ast
import functools
import json
import re
import sys
from os import PathLike
from pathlib import Path

from transformers import PretrainedConfig

CORE = Path(__file__).parents[1] / "model"
THIRD_PARTY = frozenset({"torch", "transformers"})
"""What exported code may import besides the standard library: it is there wherever the repo can be loaded at all."""
OPTIONAL = frozenset(
    {"alibi", "awq_linear", "disentangled", "experts", "relative_bias", "relative_keys", "rotary", "sinusoidal"}
)
"""Modules that a repo carries only where its config uses what they declare and define."""


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

    Of the optional ones those that the config uses, and what these import.

    Raises:
        RuntimeError: one of them imports something that a repo does not have.
    """
    entries = frozenset(target.partition(".")[0] for target in full_auto_map(config).values())
    return list(_closure(CORE, entries, OPTIONAL - {name for name in OPTIONAL if _uses(config, name)}))


def copy_code(folder: str | PathLike[str], config: PretrainedConfig) -> list[Path]:
    """Write the modules that a repo of this config needs into its folder, and none else; return where they are.

    The fields of modules that are left out, which say nothing of this config, are taken out of its `config.json`.
    """
    sources, folder = code_files(config), Path(folder)
    left_out = OPTIONAL - {path.stem for path in sources}
    for name in left_out:  # `save_pretrained` has written all of them
        (folder / f"{name}.py").unlink(missing_ok=True)
    path = folder / "config.json"
    if path.exists():
        fields = {field for name in left_out for field in _declared(config, name)}
        settings = {name: value for name, value in json.loads(path.read_bytes()).items() if name not in fields}
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    copies = [folder / path.name for path in sources]
    for source, copy in zip(sources, copies, strict=True):
        copy.write_text(without_imports(source, left_out), encoding="utf-8")
    return copies


@functools.cache
def without_imports(path: Path, left_out: frozenset[str]) -> str:
    """A module's source without its imports of some modules, and without the base classes that came from them."""
    source = path.read_text(encoding="utf-8")
    imports, bases = _imports_and_bases(source)
    imports = [node for node in imports if isinstance(node, ast.ImportFrom) and node.module in left_out]
    names = {alias.name for node in imports for alias in node.names}
    lines = source.splitlines(keepends=True)
    for node in imports:
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            lines[number - 1] = ""
    for base in bases:
        if isinstance(base, ast.Name) and base.id in names:
            line = re.sub(rf"\b{base.id}, ?", "", lines[base.lineno - 1])
            lines[base.lineno - 1] = line if line.strip() else ""
    return "".join(lines)


def _uses(config: PretrainedConfig, name: str) -> bool:
    """Whether a field that the module `name` declares is set, or the config's positions are defined there."""
    from blockformer.model.axes import axes
    from blockformer.model.positions import ATTENTIONS, BIASES, KEY_TERMS, ROTATIONS, TABLES

    neutral = {field: axis.default for field, axis in axes(type(config)).items()}
    neutral["router_aux_loss_coef"] = 0.0  # without experts
    is_set = any(getattr(config, field) != neutral[field] for field in _declared(config, name))
    kind, tables = config.position_type, (ATTENTIONS, BIASES, KEY_TERMS, ROTATIONS, TABLES)
    return is_set or any(table[kind].__module__ == f"blockformer.model.{name}" for table in tables if kind in table)


def _declared(config: PretrainedConfig, name: str) -> set[str]:
    """The config's fields that the module `name` declares."""
    parts = (part for part in type(config).__mro__ if part.__module__ == f"blockformer.model.{name}")
    return {field for part in parts for field in vars(part).get("__annotations__", {})}


@functools.cache
def _imports_and_bases(source: str) -> tuple[list[ast.Import | ast.ImportFrom], list[ast.expr]]:
    """The imports of a module, wherever they stand in it, and the base classes of its classes."""
    nodes = list(ast.walk(ast.parse(source)))
    bases = [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)], bases


@functools.cache
def _closure(core: Path, entries: frozenset[str], unused: frozenset[str]) -> tuple[Path, ...]:
    found: dict[str, Path] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = path = core / f"{name}.py"
        for node in _imports_and_bases(path.read_text(encoding="utf-8"))[0]:
            if isinstance(node, ast.Import):
                roots = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = [(node.module or "").partition(".")[0]]
            elif isinstance(node, ast.ImportFrom):
                if node.level != 1 or not node.module or "." in node.module:
                    raise RuntimeError(f"{path.name}: line {node.lineno}: only `from .name import x` works in a repo")
                if name in OPTIONAL or node.module not in unused:
                    waiting.append(node.module)
                continue
            else:
                continue
            for root in roots:
                if root not in THIRD_PARTY and root not in sys.stdlib_module_names:
                    raise RuntimeError(f"{path.name}: line {node.lineno}: an exported repo may not import '{root}'")
    return tuple(found[name] for name in sorted(found))
