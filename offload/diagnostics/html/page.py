"""The common parts of all pages: the document with its style, sections and tables.

Pages are self-contained: they contain their style and scripts, and their security policy forbids to load anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from string import Template

from offload.diagnostics.html.chart import COLORS

__all__ = ["document", "paragraphs", "section", "table"]

_DOCUMENT = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --page: #fafaf8; --ink: #1c2024; --faint: #5d656e; --line: #d9dce0; --card: #fff;
  --red: #b3261e; --orange: #d9480f; --amber: #b7791f; --green: #4a8f5c; --blue: #1667b7; --violet: #8a6fb5;
  --pink: #c2347f; --slate: #58677a; --gray: #8a939d; --pale: #e4e6e9; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e6e8eb; --faint: #9ba4ae; --line: #343b43;
  --card: #1b1f24; --red: #ff8a80; --orange: #ff9a5c; --amber: #e3b25c; --green: #7cc48f; --blue: #6cb2f5;
  --violet: #b9a2e3; --pink: #f08cc0; --slate: #8796a8; --gray: #8f99a4; --pale: #3b434c; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 26px 18px 36px; }
h1 { font-size: 22px; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 6px; }
p { margin: 0 0 6px; }
.lead { font-size: 17px; }
.faint, footer { color: var(--faint); font-size: 13.5px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  margin: 14px 0; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 16px 4px 0; border-top: 1px solid var(--line); font-weight: normal;
  vertical-align: top; white-space: pre-wrap; }
th { color: var(--faint); }
thead th { font-weight: 600; color: var(--ink); }
tr:first-child th, tr:first-child td { border-top: 0; }
thead + tbody tr:first-child > * { border-top: 1px solid var(--line); }
code, pre { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 0; }
dl { margin: 0; } dt { margin: 0; } dd { margin: 0 0 10px; color: var(--faint); }
$style
</style>
</head>
<body>
<main>
<noscript><p class="faint">The charts of this page need JavaScript.</p></noscript>
$body
</main>
$scripts
</body>
</html>
""")


_ASSETS = Path(__file__).parent / "assets"


def document(title: str, *parts: str) -> str:
    """Return a whole page.

    Parameters
    ----------
    title : str
        Title of the window, in plain text.
    *parts : str
        HTML of the page's contents, from the top.

    Returns
    -------
    str
        One HTML document; it loads nothing and needs no server.
    """
    return _DOCUMENT.substitute(title=escape(title), body="\n".join(parts), style=_style(), scripts=_scripts())


@cache
def _style() -> str:
    colors = "\n".join(f".{name} {{ --color: var(--{name}); }}" for name in COLORS)
    return "\n".join([_asset("uplot/uPlot.min.css"), _asset("chart.css"), colors])


@cache
def _scripts() -> str:
    """Return uPlot, with its licence, and the chart's own scripts."""
    library = f"/*!\n{_asset('uplot/LICENSE')}\n*/\n{_asset('uplot/uPlot.iife.min.js')}"
    own = (_asset(name) for name in ("stack.js", "chart.js", "pointer.js"))
    return "\n".join(f"<script>\n{script}\n</script>" for script in (library, *own))


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def section(heading: str, *parts: str) -> str:
    """Return a card of the page: a heading in plain text, and HTML below it."""
    return "\n".join([f"<section><h2>{escape(heading)}</h2>", *parts, "</section>"])


def paragraphs(*lines: str, kind: str = "") -> str:
    """Return plain text as paragraphs, each of the style `kind`: ``"lead"``, ``"faint"`` or the usual one."""
    opening = f'<p class="{kind}">' if kind else "<p>"
    return "".join(f"{opening}{escape(line)}</p>" for line in lines)


def table(rows: Sequence[Sequence[str]], *, head: Sequence[str] = ()) -> str:
    """Return a table of plain text.

    Parameters
    ----------
    rows : sequence of sequence of str
        Cells; the first of a row is its name. Leading spaces in it indent the row.
    head : sequence of str, optional
        Names of the columns.

    Returns
    -------
    str
        HTML.
    """
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = (
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    )
    opening = f"<thead><tr>{names}</tr></thead>" if head else ""
    return f"<table>{opening}<tbody>{''.join(lines)}</tbody></table>"
