"""The page that explains running out of memory: one bar of who holds what, and the tables, in one self-contained file.

On top of the data path. Pure: words and numbers in, HTML text out; no script, no external resource.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template

from offload.units import format_bytes

__all__ = ["render"]

_WIDTH, _BAR = 960, 54

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>offload: out of memory</title>
<style>
:root { color-scheme: light dark; --page: #fafaf8; --ink: #1c2024; --faint: #5d656e; --line: #d9dce0; --card: #fff;
  --p0: #58677a; --p1: #1667b7; --p2: #4a8f5c; --p3: #b7791f; --p4: #8a6fb5; --p5: #e4e6e9; --p6: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e6e8eb; --faint: #9ba4ae; --line: #343b43;
  --card: #1b1f24; --p0: #8796a8; --p1: #6cb2f5; --p2: #7cc48f; --p3: #e3b25c; --p4: #b9a2e3; --p5: #2b3138;
  --p6: #ff8a80; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 26px 18px 36px; }
h1 { font-size: 22px; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 6px; }
p { margin: 0 0 8px; }
.verdict { font-size: 17px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  margin: 14px 0; overflow-x: auto; }
svg { display: block; width: 100%; height: auto; }
.legend { list-style: none; margin: 8px 0 0; padding: 0; font-size: 13.5px; }
.legend li { margin: 2px 0; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 8px; vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-top: 1px solid var(--line); font-weight: normal;
  vertical-align: top; }
tr:first-child th, tr:first-child td { border-top: 0; }
th { color: var(--faint); white-space: nowrap; }
code, pre { font: 13.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.remedy { margin: 0 0 10px; } .remedy p { color: var(--faint); margin: 0; }
.faint { color: var(--faint); }
$colors
</style>
</head>
<body>
<main>
<h1>Out of memory in $where</h1>
<p class="verdict">$verdict</p>
<section><h2>Who holds the memory</h2>
$bar
<ul class="legend">$legend</ul></section>
<section><h2>What to do</h2>
$remedies</section>
<section><h2>At the moment of the error</h2>
<table>$memory</table></section>
<section><h2>What autograd saved in this step</h2>
$saved</section>
<section><h2>The error</h2>
<pre>$error</pre></section>
</main>
</body>
</html>
""")


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
    return _PAGE.substitute(
        where=escape(where),
        error=escape(error),
        verdict=escape(verdict),
        colors="\n".join(f".p{place} {{ fill: var(--p{place}); background: var(--p{place}); }}" for place in range(7)),
        bar=_bar(shown, len(parts)),
        legend=legend,
        memory=memory,
        saved=f"<table>{rows}</table>" if rows else "<p class='faint'>nothing</p>",
        remedies="".join(
            f'<div class="remedy"><code>{escape(line)}</code><p>{escape(why)}</p></div>' for line, why in remedies
        ),
    )


def _color(kind: int, kinds: int) -> int:
    """Which colour a part has: the last two, free and short, have the same on every device."""
    return kind if kind < kinds - 2 else 7 - (kinds - kind)


def _bar(shown: Sequence[tuple[int, str, int]], kinds: int) -> str:
    whole = sum(nbytes for _, _, nbytes in shown) or 1
    boxes, at = [], 0.0
    for kind, name, nbytes in shown:
        width = _WIDTH * nbytes / whole
        title = escape(f"{name}: {format_bytes(nbytes)}")
        boxes.append(
            f'<rect class="p{_color(kind, kinds)}" x="{at:.2f}" y="0" width="{max(width - 1, 0.5):.2f}" '
            f'height="{_BAR}"><title>{title}</title></rect>'
        )
        at += width
    label = "How the memory divides"
    return f'<svg viewBox="0 0 {_WIDTH} {_BAR}" role="img" aria-label="{label}">{"".join(boxes)}</svg>'
