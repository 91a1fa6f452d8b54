"""What the library's pages have in common: one self-contained document, one look, time axes and legends.

On top of the data path. Pure: text and numbers in, HTML text out; no script, no external resource.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from string import Template

_DOCUMENT = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --page: #fafaf8; --ink: #1c2024; --faint: #5d656e; --line: #d9dce0; --card: #fff;
  --red: #b3261e; --orange: #d9480f; --amber: #b7791f; --green: #4a8f5c; --blue: #1667b7; --violet: #8a6fb5;
  --slate: #58677a; --gray: #8a939d; --pale: #e4e6e9; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e6e8eb; --faint: #9ba4ae; --line: #343b43;
  --card: #1b1f24; --red: #ff8a80; --orange: #ff9a5c; --amber: #e3b25c; --green: #7cc48f; --blue: #6cb2f5;
  --violet: #b9a2e3; --slate: #8796a8; --gray: #8f99a4; --pale: #2b3138; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: ${width}px; margin: 0 auto; padding: 26px 18px 36px; }
h1 { font-size: 22px; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 6px; }
p { margin: 0 0 6px; }
.faint, footer { color: var(--faint); font-size: 13.5px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  margin: 14px 0; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 16px 4px 0; border-top: 1px solid var(--line); font-weight: normal;
  vertical-align: top; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--faint); font-size: 12.5px; }
svg text.strong { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--line); }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.legend { list-style: none; margin: 6px 0 0; padding: 0; font-size: 13.5px; color: var(--faint); }
.legend li { display: inline-block; margin-right: 18px; }
.legend svg { display: inline-block; width: 18px; min-width: 0; height: 10px; margin-right: 6px; }
.forward { fill: var(--green); } .backward { fill: var(--violet); } .optimizer { fill: var(--slate); }
.wait { fill: var(--orange); } .out, .spill { fill: var(--amber); } .in, .fill { fill: var(--blue); }
$style
</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


def document(title: str, body: str, *, style: str = "", width: int = 1000) -> str:
    """Return a whole page.

    Parameters
    ----------
    title : str
        Plain text, for the window.
    body : str
        HTML of the page's contents.
    style : str
        What this page's style sheet has beside the common one.
    width : int
        Widest that the contents get, in CSS pixels.

    Returns
    -------
    str
        One HTML document; it loads nothing and needs no server.
    """
    return _DOCUMENT.substitute(title=escape(title), body=body, style=style, width=width)


@dataclass(frozen=True)
class TimeAxis:
    """Where seconds lie in a drawing, from 0 to `end`: `width` across, with margins to the left and the right."""

    end: float
    width: int
    left: int
    right: int

    def x(self, seconds: float) -> float:
        """Where a moment lies."""
        return self.left + (self.width - self.left - self.right) * (seconds / self.end if self.end else 0.0)

    def frame(self, height: int, label: str, start: str) -> str:
        """The opening of a drawing with the axis below it; `start` says what is at 0."""
        unit, scale = ("seconds", 1.0) if self.end >= 2 else ("milliseconds", 1e3)
        step = tick(self.end * scale)
        parts = [f'<svg viewBox="0 0 {self.width} {height + 44}" role="img" aria-label="{escape(label)}">']
        for number in range(int(self.end * scale / step + 1e-9) + 1):
            at = self.x(number * step / scale)
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="10" y2="{height}"/>')
            parts.append(f'<text x="{at:.1f}" y="{height + 17}" text-anchor="middle">{number * step:g}</text>')
        middle = (self.left + self.width - self.right) / 2
        words = f"{unit} from {escape(start)}"
        parts.append(f'<text x="{middle}" y="{height + 36}" text-anchor="middle">{words}</text>')
        return "".join(parts)

    def level(self, y: float, label: str) -> str:
        """A line across, with its value at the left."""
        return (
            f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )

    def stairs(self, moments: Iterable[float], counts: Iterable[int]) -> list[tuple[float, int]]:
        """The corners (x, count) of a curve; samples that share a tenth of a pixel are drawn as the largest of them."""
        columns: dict[float, int] = {}
        for at, count in zip(moments, counts, strict=True):
            x = round(self.x(at), 1)
            columns[x] = max(columns.get(x, 0), count)
        corners: list[tuple[float, int]] = []
        for x, count in columns.items():
            if corners:
                corners.append((x, corners[-1][1]))
            corners.append((x, count))
        return corners


def box(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    """A rectangle of a kind, with what the pointer that rests on it is told."""
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}">'
        f"<title>{escape(title)}</title></rect>"
    )


def legend(entries: Sequence[tuple[str, str]], *, lines: bool = False) -> str:
    """A list of kinds and their words, with a swatch of each: a box, or a line."""
    shape = (
        '<line class="curve {}" x1="0" x2="18" y1="5" y2="5"/>'
        if lines
        else '<rect class="{}" width="18" height="10"/>'
    )
    items = (
        f'<li><svg viewBox="0 0 18 10" aria-hidden="true">{shape.format(kind)}</svg>{escape(words)}</li>'
        for kind, words in entries
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def tick(span: float) -> float:
    """Return a round distance that divides `span` into about six.

    Examples
    --------
    >>> tick(100.0), tick(0.9)
    (20.0, 0.2)
    """
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / 6))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 6 >= span * 0.999)
