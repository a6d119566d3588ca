"""Hooks of MkDocs: links out of `docs/`, and formulas without a network.

The pages are read on GitHub too, where `../src/blockformer/model/layer.py` and ```` ```math ```` work as they are. The
site brings each linked file along, so that its links work offline: code as text, Markdown as a page of its own.
"""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
MATH = re.compile(r"^( *)```math\n(.*?)^ *```$", re.M | re.S)
FENCED = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.M | re.S)
SOURCES = "source"
"""The folder of the site that holds the linked files of the repository."""


def place_of(path: str) -> str:
    """The path in the site's sources of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SOURCES}/{path}" if path.endswith(".md") else f"{SOURCES}/{path}.txt"


def linked(text: str, path: str) -> list[str]:
    """The files of the repository, outside `docs/`, that a Markdown file at `path` links to."""
    targets = [posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2])) for found in LINK.finditer(text)]
    return [each for each in targets if not each.startswith("docs/") and (ROOT / each).is_file()]


def rewritten(text: str, path: str, repository: str) -> str:
    """A Markdown file at `path` with its links as the site needs them. A folder is linked in the repository."""
    base = posixpath.dirname(path)
    here = posixpath.dirname(place_of(path))

    def link(found: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(base, found[2]))
        if re.match(r"[a-z]+:", found[2]) or not (ROOT / target).exists():
            return found[0]
        if (ROOT / target).is_dir():
            return f"{found[1]}{repository}/tree/main/{target}{found[3]}"
        return found[1] + posixpath.relpath(place_of(target), here) + found[3]

    parts = FENCED.split(text)
    return "".join(part if index % 2 else LINK.sub(link, part) for index, part in enumerate(parts))


def formula(found: re.Match) -> str:
    """A fence of LaTeX as MathML, which browsers show without a script."""
    import latex2mathml.converter

    return latex2mathml.converter.convert(" ".join(found[2].split()), display="block")


def on_files(files, config):
    """Add what the pages link to outside of `docs/`, and what those files link to."""
    from mkdocs.structure.files import File, InclusionLevel

    waiting = [(ROOT / "docs" / file.src_uri, f"docs/{file.src_uri}") for file in files.documentation_pages()]
    added = set()
    while waiting:
        real, path = waiting.pop()
        for target in linked(real.read_text(encoding="utf-8"), path):
            if target in added:
                continue
            added.add(target)
            file = File.generated(
                config, place_of(target), abs_src_path=str(ROOT / target), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(file)
            if target.endswith(".md"):
                waiting.append((ROOT / target, target))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links and formulas as the site needs them."""
    uri = page.file.src_uri
    path = uri.removeprefix(f"{SOURCES}/") if uri.startswith(f"{SOURCES}/") else f"docs/{uri}"
    return MATH.sub(formula, rewritten(markdown, path, config["extra"]["repository"]))
