"""The house: which part of the package may import which, ground to roof, read from the sources."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from blockformer.model_classes import CONFIGS, MODELS

ROOT = Path(__file__).parents[1]
FLOORS = (
    ("on_import", "files", "model", "data"),
    ("declared_fields", "inputs", "model_classes", "size_bounds"),
    ("watched",),
    ("pruning", "reshaping", "training"),
    ("engine",),
    ("publishing",),
    ("conversion", "registering"),
    ("presets", "trust", "doctor"),
    ("api", "summary", "pictures"),
    ("", "lab", "page", "demo"),
    ("cli",),
    ("__main__",),
)
"""The rooms of each floor, the lowest first; a room is a folder or file of the package, "" the package by its name.

A room imports from lower floors and from itself. Rooms of one floor do not know each other, except `NEIGHBOURS`.
"""
NEIGHBOURS = {("page", ""), ("lab", ""), ("demo", "")}
GROUND = ("files", "model")
"""Rooms that import nothing of the package except themselves."""


def modules() -> dict[str, Path]:
    """Name -> file of each module of the package."""
    found = {}
    for folder, start in ((ROOT / "src/blockformer", ()), (ROOT / "conversion", ("conversion",))):
        for path in folder.rglob("*.py"):
            parts = [*start, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(["blockformer", *parts[: -1 if parts[-1] == "__init__" else None]])] = path
    return found


def imports_of(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that one imports anywhere, in its functions too; not those for type checkers only."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            inner = [f"{module}.{alias.name}" for alias in node.names]
            yield from (each if each in known else module for each in inner if each in known or module in known)


def graph(known: dict[str, Path]) -> dict[str, set[str]]:
    return {name: set(imports_of(name, path, known)) - {name} for name, path in known.items()}


def room(name: str) -> str:
    return [*name.split("."), ""][1]


def arrows_up(arrows: dict[str, set[str]]) -> list[str]:
    """What imports from a higher floor, or from a neighbour that it must not know."""
    floor = {each: number for number, rooms in enumerate(FLOORS) for each in rooms}
    found = []
    for name, others in arrows.items():
        for other in others:
            here, there = room(name), room(other)
            if other == "blockformer.model.release" and name == "blockformer":
                continue
            lower = floor[there] < floor[here] and here not in GROUND
            if here != there and not lower and (here, there) not in NEIGHBOURS:
                found.append(f"{name} imports {other}")
    return sorted(found)


def test_imports_run_one_way():
    arrows = graph(modules())
    assert arrows_up(arrows) == []
    tuple(TopologicalSorter(arrows).static_order())  # raises with the circle, if there is one


def test_an_arrow_back_up_and_a_circle_are_seen(tmp_path):
    known = modules()
    (tmp_path / "up.py").write_text("def f():\n    from ..conversion import plan\n    import blockformer\n")
    (tmp_path / "other.py").write_text("from .up import f\n")
    known |= {"blockformer.files.up": tmp_path / "up.py", "blockformer.conversion.plan": tmp_path / "plan.py"}
    (tmp_path / "plan.py").write_text("from blockformer.files.up import f\n")
    arrows = graph(known)
    assert arrows_up(arrows) == [
        "blockformer.files.up imports blockformer",
        "blockformer.files.up imports blockformer.conversion.plan",
    ]
    with pytest.raises(CycleError, match=r"blockformer\.files\.up"):
        tuple(TopologicalSorter(arrows).static_order())


def test_classes_by_name_are_the_public_ones():
    import blockformer

    public = {name for name in blockformer.__all__ if name.startswith("Blockformer")}
    assert public == {*MODELS, *(each.__name__ for each in CONFIGS.values())}
