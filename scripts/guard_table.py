"""Write the table of test files in docs/guards.md, each with the first line of its docstring.

The page's other tables name a test as `file::test_name`, without `test_` before the file's name and `.py` behind it.

Usage: python scripts/guard_table.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guards.md"
NAMED = re.compile(r"`(\w+)::(test_\w+)`")
MARKED = re.compile(r"(<!-- test files -->\n).*?(<!-- end of test files -->)", re.S)


def test_files(text: str) -> dict[str, Path]:
    """Name -> file of each test file that a page names.

    Raises:
        ValueError: no file or several files have a name, or a file has no docstring.
    """
    found = {}
    for name in sorted({short for short, _ in NAMED.findall(text)}):
        paths = sorted((ROOT / "tests").rglob(f"test_{name}.py"))
        if len(paths) != 1:
            raise ValueError(f"`{name}::` names {len(paths)} files test_{name}.py in tests/; it must be one")
        found[name] = paths[0]
    return found


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path} has no docstring; say in one line what it tests")
    return docstring.splitlines()[0]


def written(text: str) -> str:
    """The page with its table of test files."""
    lines = ["| name | file | what it tests |", "|---|---|---|"]
    for name, path in test_files(text).items():
        link = f"[`{path.relative_to(ROOT)}`](../{path.relative_to(ROOT)})"
        lines.append(f"| `{name}` | {link} | {first_line(path)} |")
    table = "\n".join(lines)
    return MARKED.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
