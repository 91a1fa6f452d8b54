"""The page that explains running out of memory: one bar of who holds what, and the tables, in one self-contained file.

On top of the data path. Pure: words and numbers in, HTML text out; no script, no external resource.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from offload.diagnostics.html.page import box, document
from offload.units import format_bytes

__all__ = ["render"]

_WIDTH, _BAR = 960, 54
_COLORS = ("slate", "blue", "green", "amber", "violet", "pale", "red")
_STYLE = """.verdict { font-size: 17px; }
table { width: 100%; }
tr:first-child th, tr:first-child td { border-top: 0; }
th { color: var(--faint); white-space: nowrap; }
code, pre { font: 13.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre { margin: 0; }
.parts { list-style: none; margin: 8px 0 0; padding: 0; font-size: 13.5px; }
.parts li { margin: 2px 0; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 8px; vertical-align: -1px; }
.remedy { margin: 0 0 10px; } .remedy p { color: var(--faint); margin: 0; }
""" + "\n".join(
    f".p{place} {{ fill: var(--{name}); background: var(--{name}); }}" for place, name in enumerate(_COLORS)
)


def render(
    *,
    where: str,
    error: str,
    parts: Sequence[tuple[str, int]],
    memory_rows: Sequence[tuple[str, str]],
    saved_rows: Sequence[tuple[str, str, str]],
    verdict: str,
    remedies: Sequence[tuple[str, str]],
) -> str:
    """Return the page.

    Parameters
    ----------
    where, error, verdict : str
        Sentences.
    parts : sequence of (name, bytes)
        How the memory divides, in the order of the bar; the last is what is short.
    memory_rows : sequence of (name, amount)
        Of the first table.
    saved_rows : sequence of (reason, amount, whether it can move)
        Of the second one.
    remedies : sequence of (what to type or to do, why)
        Best first.

    Returns
    -------
    str
        One HTML document; it loads nothing.
    """
    shown = [(kind, name, nbytes) for kind, (name, nbytes) in enumerate(parts) if nbytes > 0]
    legend = "".join(
        f'<li><span class="key p{_color(kind, len(parts))}"></span>{format_bytes(nbytes)}: {escape(name)}</li>'
        for kind, name, nbytes in shown
    )
    memory = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in memory_rows)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in saved_rows)
    saved = f"<table>{rows}</table>" if rows else '<p class="faint">nothing</p>'
    lines = "".join(
        f'<div class="remedy"><code>{escape(line)}</code><p>{escape(why)}</p></div>' for line, why in remedies
    )
    sections = [
        ("Who holds the memory", f'{_bar(shown, len(parts))}\n<ul class="parts">{legend}</ul>'),
        ("What to do", lines),
        ("At the moment of the error", f"<table>{memory}</table>"),
        ("What autograd saved in this step", saved),
        ("The error", f"<pre>{escape(error)}</pre>"),
    ]
    body = [f"<h1>Out of memory in {escape(where)}</h1>", f'<p class="verdict">{escape(verdict)}</p>']
    body += [f"<section><h2>{title}</h2>\n{content}</section>" for title, content in sections]
    return document("offload: out of memory", "\n".join(body), style=_STYLE)


def _color(kind: int, kinds: int) -> int:
    """Which colour a part has: the last two, free and short, have the same on every device."""
    return kind if kind < kinds - 2 else 7 - (kinds - kind)


def _bar(shown: Sequence[tuple[int, str, int]], kinds: int) -> str:
    whole = sum(nbytes for _, _, nbytes in shown) or 1
    boxes, at = [], 0.0
    for kind, name, nbytes in shown:
        width = _WIDTH * nbytes / whole
        title = f"{name}: {format_bytes(nbytes)}"
        boxes.append(box(f"p{_color(kind, kinds)}", at, 0, max(width - 1, 0.5), _BAR, title))
        at += width
    label = "How the memory divides"
    return f'<svg viewBox="0 0 {_WIDTH} {_BAR}" role="img" aria-label="{label}">{"".join(boxes)}</svg>'
