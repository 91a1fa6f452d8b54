"""The page that `offload demo` writes: memory curves and the table, in one self-contained file.

On top of the data path. Pure: results in, HTML text out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from string import Template
from typing import Any

__all__ = ["render"]

Curve = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 900, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 26, 44

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>offload demo</title>
<style>
:root { color-scheme: light dark; --page: #fbfbfa; --ink: #1d2126; --faint: #626a73;
  --line: #dcdfe3; --card: #ffffff; --c0: #c4472b; --c1: #1667b7; --c2: #6f7f1f; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e7e9ec; --faint: #9aa3ad;
  --line: #333a42; --card: #1c2025; --c0: #f28a6d; --c1: #6cb2f5; --c2: #b9c75c; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 940px; margin: 0 auto; padding: 28px 20px 40px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0 0 6px; }
.lead { font-size: 17px; margin-bottom: 18px; }
pre { margin: 6px 0 0; white-space: pre-wrap; font-size: 12.5px; line-height: 1.4; }
.faint, footer { color: var(--faint); font-size: 13.5px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 18px; margin: 0 0 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td { white-space: pre; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-top: 1px solid var(--line);
  font-weight: normal; }
thead th { border-top: 0; font-weight: 600; }
tbody th { color: var(--faint); }
tbody th { min-width: 190px; }
th.sub { padding-left: 16px; }
.key { display: inline-block; width: 22px; height: 0; margin-right: 7px; vertical-align: middle; }
.legend { margin: 0 0 4px; padding: 0; list-style: none; font-size: 13.5px; }
.legend li { display: inline-block; margin-right: 20px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--faint); font-size: 12.5px; }
.grid { stroke: var(--line); stroke-width: 1; }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); }
.key.s0 { border-top: 3px solid var(--c0); } .key.s1 { border-top: 3px solid var(--c1); }
.key.s2 { border-top: 3px solid var(--c2); }
svg .peak { font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.peak.s0 { fill: var(--c0); } .peak.s1 { fill: var(--c1); } .peak.s2 { fill: var(--c2); }
.dot { stroke: var(--card); stroke-width: 1.5; }
.dot.s0 { fill: var(--c0); } .dot.s1 { fill: var(--c1); } .dot.s2 { fill: var(--c2); }
</style>
</head>
<body>
<main>
<h1>offload demo</h1>
<p class="lead">$lead</p>
<section><table><thead><tr><th></th>$names</tr></thead>
<tbody>
$rows
</tbody></table></section>
$charts
$reports
<footer>$facts</footer>
</main>
</body>
</html>
""")


def render(
    rows: Sequence[tuple[str, Sequence[str]]],
    results: Sequence[dict[str, Any]],
    *,
    equal: bool,
    notes: Sequence[str],
) -> str:
    """Lay out the page.

    Parameters
    ----------
    rows : sequence of (label, cells)
        The table, one cell a contestant.
    results : sequence of dict
        What the contestants' processes handed back, the baseline first.
    equal : bool
        Whether all losses and gradients agree to the last bit.
    notes : sequence of str
        One sentence each, for the foot of the page: the setting, and what the figures leave out.

    Returns
    -------
    str
        A complete HTML document that refers to nothing outside itself.
    """
    first = results[0]
    names = [result["name"] for result in results]
    memory = "memory allocated on the GPU" if first["gpu"] else "resident set over the loaded model"
    step_memory = memory
    if first["last_step_is_heap"]:
        step_memory = (
            "bytes in use on the heap over the loaded model. What is freed stays with the process "
            "for the next step, which is why the resident set below is flat"
        )
    last_steps = [_from_zero(result["last_step_curve"]) for result in results]
    charts = [
        _chart("One step", f"The last step of each run: {step_memory}.", names, last_steps),
        _chart("The whole run", f"All steps: {memory}.", names, [r["curve"] for r in results]),
    ]
    return _PAGE.substitute(
        lead=escape(_lead(results, equal=equal)),
        names="".join(f'<th><span class="key s{place}"></span>{escape(name)}</th>' for place, name in enumerate(names)),
        rows="\n".join(_table_row(label, cells) for label, cells in rows),
        charts="\n".join(charts),
        facts="\n".join(f"<p>{escape(fact)}</p>" for fact in notes),
        reports="".join(_report(result) for result in results if result["report"]),
    )


def _lead(results: Sequence[dict[str, Any]], *, equal: bool) -> str:
    """Say in a sentence what came out."""
    first = results[0]
    parts = []
    for other in results[1:]:
        memory = other["peak_bytes"] / max(first["peak_bytes"], 1)
        seconds = other["step_seconds_median"] / first["step_seconds_median"]
        parts.append(f"{other['name']}: {memory:.2f}× the memory, {seconds:.2f}× the step time")
    if not parts:
        return f"The {first['name']} run alone."
    bits = "equal to the last bit" if equal else "NOT EQUAL"
    return f"{'; '.join(parts)} of the {first['name']} run. Losses and gradients: {bits}."


def _table_row(label: str, cells: Sequence[str]) -> str:
    kind = ' class="sub"' if label.startswith(" ") else ""
    body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f"<tr><th{kind}>{escape(label.strip())}</th>{body}</tr>"


def _report(result: dict[str, Any]) -> str:
    text = escape(result["report"]["text"])
    return f"<section><h2>What the engine reports</h2><pre>{text}</pre></section>"


def _chart(title: str, caption: str, names: Sequence[str], curves: Sequence[Curve]) -> str:
    """Draw one chart: a titled card with a legend and an SVG."""
    legend = "".join(f'<li><span class="key s{place}"></span>{escape(name)}</li>' for place, name in enumerate(names))
    return (
        f'<section><h2>{escape(title)}</h2><p class="faint">{escape(caption)}</p>'
        f'<ul class="legend">{legend}</ul>{_svg(caption, curves)}</section>'
    )


def _svg(caption: str, curves: Sequence[Curve]) -> str:
    """Draw bytes over seconds, with gridlines, units and every curve's highest point marked."""
    seconds_max = max((at for curve in curves for at, _ in curve), default=1.0) or 1.0
    bytes_max = max((used for curve in curves for _, used in curve), default=1.0)
    unit, scale = ("GiB", 2**30) if bytes_max >= 8 * 2**30 else ("MiB", 2**20)
    across = _ticks(seconds_max, 8)
    up = _ticks(max(bytes_max / scale, 1e-3) * 1.06, 5)
    top = up[-1]

    def x(seconds: float) -> float:
        return _LEFT + seconds / seconds_max * (_WIDTH - _LEFT - _RIGHT)

    def y(amount: float) -> float:
        share = min(max(amount / scale / top, 0.0), 1.0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    floor = _HEIGHT - _BOTTOM
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(caption)}">']
    for tick in up:
        at = y(tick * scale)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<text x="{_LEFT - 7}" y="{_TOP - 12}" text-anchor="end">{unit}</text>')
    for tick in (tick for tick in across if tick <= seconds_max):
        at = x(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {floor}v5"/>')
        parts.append(f'<text x="{at:.1f}" y="{floor + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">seconds</text>')
    for place, curve in enumerate(curves):
        points = "L".join(f"{x(at):.1f} {y(used):.1f}" for at, used in curve)
        parts.append(f'<path class="curve s{place}" d="M{points}"/>' if curve else "")
    for place, curve in enumerate(curves):
        if curve:
            at, used = max(curve, key=lambda point: point[1])
            anchor = "end" if at > 0.85 * seconds_max else "middle"
            parts.append(f'<circle class="dot s{place}" cx="{x(at):.1f}" cy="{y(used):.1f}" r="4"/>')
            parts.append(
                f'<text class="peak s{place}" x="{x(at):.1f}" y="{y(used) - 8:.1f}" '
                f'text-anchor="{anchor}">{used / scale:.0f} {unit}</text>'
            )
    return "".join([*parts, "</svg>"])


def _ticks(highest: float, count: int) -> list[float]:
    """Choose round numbers from 0 to the first at or above `highest`, about `count` of them."""
    power = 10.0 ** math.floor(math.log10(highest / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= highest)
    return [step * place for place in range(math.ceil(highest / step - 1e-9) + 1)]


def _from_zero(curve: Curve) -> Curve:
    """Shift a curve so that its first point is at 0 seconds."""
    return [(at - curve[0][0], used) for at, used in curve]
