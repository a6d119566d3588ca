"""Draw the badges of the READMEs from pyproject.toml and the CI's workflow, so that a page fetches nothing.

Usage: python scripts/badges.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
PER_LETTER = 6.5
"""Pixels, about, of a letter of the badge's font."""


def facts() -> dict[str, tuple[str, str]]:
    """File -> label and value of each badge."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (license_name,) = re.findall(r'^license = "(.+)"$', project, re.M)
    (python,) = re.findall(r'^requires-python = ">=(.+)"$', project, re.M)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (versions,) = re.findall(r"^ +python: \[(.+)\]$", workflow, re.M)
    return {
        "badge-ci.svg": ("CI", f"Python {versions.replace(chr(34), '')}"),
        "badge-license.svg": ("license", license_name),
        "badge-python.svg": ("python", f"{python} or newer"),
    }


def badge(label: str, value: str) -> str:
    """A badge as SVG, the label on grey and the value on blue."""
    left, right = (round(len(words) * PER_LETTER) + 12 for words in (label, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {value}">\n'
        f'<rect width="{left + right}" height="20" rx="3" fill="#1f5fa8"/>\n'
        f'<path d="M3 0h{left - 3}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#555"/>\n'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">\n'
        f'<text x="{left / 2:g}" y="14">{label}</text>\n'
        f'<text x="{left + right / 2:g}" y="14">{value}</text>\n'
        "</g>\n</svg>\n"
    )


def drawn() -> dict[Path, str]:
    """Each badge's file and what it holds."""
    return {FOLDER / name: badge(*words) for name, words in facts().items()}


def main() -> None:
    for path, text in drawn().items():
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
