"""An HTML file with pictures in it: no server and no network, for light and for dark."""

import base64
import hashlib
import html

from .canvas import PALETTE

_STYLE = """
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
summary { cursor: pointer; }
:focus-visible { outline: 3px solid var(--strong-blue); outline-offset: 2px; }
"""


def document(title: str, style: str, body: str, script: str = "") -> str:
    """A whole file.

    Nothing is fetched from anywhere, and no script or style runs but these.

    Args:
        title: plain text.
        style: CSS in addition to the common one; the colors of the palette are there as variables.
        body: HTML.
        script: JavaScript that runs at the end.
    """
    light, dark = ("".join(f"--{name}:{pair[side]};" for name, pair in PALETTE.items()) for side in (0, 1))
    style = f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}{_STYLE}{style}"
    scripts = f"script-src {_hash(script)}; " if script else ""
    policy = f"default-src 'none'; {scripts}style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def _hash(code: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


def themed(svg: str) -> str:
    """A picture in the colors of a document, which follow the reader's choice of light or dark."""
    for name, (light, _) in PALETTE.items():
        svg = svg.replace(f'"{light}"', f'"var(--{name})"')
    return svg
