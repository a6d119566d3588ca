"""A report as one HTML file: no server, no network, no script; for the keyboard, for light and dark."""

from __future__ import annotations

import html
import json

from ..pictures.document import document, themed
from .plots import draw_runs
from .table import Group, table

_STYLE = """
body { margin: 0 auto; max-width: 1080px; padding: 20px; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 36px; }
svg { max-width: 100%; height: auto; }
table { font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--light); white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(5), td:nth-child(5) { text-align: left; }
.better { color: var(--strong-blue); font-weight: 600; }
.worse { font-weight: 600; }
.note { color: var(--grey); }
details { border: 1px solid var(--light); border-radius: 8px; padding: 6px 12px; margin: 8px 0; }
pre { overflow-x: auto; font-size: .8rem; }
"""


def page(name: str, groups: list[Group], pictures: dict[str, str], notes: list[str]) -> str:
    """The whole page.

    Args:
        name: of the experiment.
        groups: what was compared.
        pictures: heading -> SVG.
        notes: sentences below the table.
    """
    sections = "".join(
        f"<section><h2>{html.escape(heading)}</h2>{_scrolled(themed(svg), heading)}</section>\n"
        for heading, svg in pictures.items()
    )
    body = f"""<h1>{html.escape(name)}</h1>
<main>
{_scrolled(_table(groups), "The table")}
{"".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)}
{sections}<section><h2>Every run</h2>
{"".join(map(_details, groups))}</section>
</main>"""
    return document(name, _STYLE, body)


def _scrolled(content: str, name: str) -> str:
    """What may be wider than the screen; the keyboard scrolls it."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(name)}">{content}</div>'


def _table(groups: list[Group]) -> str:
    title, *lines = table(groups)
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in title)
    body = []
    for group, (name, *cells) in zip(groups, lines, strict=True):
        kind = f' class="{group.reading}"' if group.reading in ("better", "worse") else ""
        rest = "".join(f"<td{kind if cell == group.reading else ''}>{html.escape(cell)}</td>" for cell in cells)
        body.append(f'<tr><th scope="row">{html.escape(name)}</th>{rest}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _details(group: Group) -> str:
    """A config's curves, in a picture and in numbers, and its settings."""
    picture = draw_runs(group)
    lines = [
        f"<tr><td>{row['seed']}</td><td>{tokens:,}</td><td>{loss:.4f}</td></tr>"
        for row in group.rows
        for tokens, loss in row["curve"]["held_out"]
    ]
    head = "".join(f'<th scope="col">{word}</th>' for word in ("seed", "tokens", "held-out loss (nats per token)"))
    settings = json.dumps(group.first["settings"], sort_keys=True)
    ends = "".join(
        f"<p>seed {row['seed']}: {html.escape(row['diverged'])}</p>" for row in group.rows if row["diverged"]
    )
    return (
        f"<details><summary>{html.escape(group.name)}</summary>"
        f"<p>What it changes of the base: <code>{html.escape(settings)}</code></p>{ends}"
        f"{_scrolled(themed(picture), 'Curves of ' + group.name) if picture else ''}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        f"<details><summary>Every field of its config</summary>"
        f"<pre>{html.escape(json.dumps(group.first['config'], indent=1))}</pre></details></details>\n"
    )
