"""The page that `offload demo` writes: memory curves and the table, in one self-contained file.

On top of the data path. Pure: results in, HTML text out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from offload.diagnostics.html.page import document

__all__ = ["render"]

Curve = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 900, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 26, 44

_STYLE = """.lead { font-size: 17px; margin-bottom: 18px; }
pre { margin: 6px 0 0; white-space: pre-wrap; font-size: 12.5px; line-height: 1.4; }
table { width: 100%; }
td { white-space: pre; }
thead th { border-top: 0; font-weight: 600; }
tbody th { color: var(--faint); min-width: 190px; }
th.sub { padding-left: 16px; }
.key { display: inline-block; width: 22px; height: 0; margin-right: 7px; vertical-align: middle; }
svg .peak { font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
circle.dot { stroke: var(--card); stroke-width: 1.5; }
""" + "\n".join(
    f".s{place} {{ stroke: var(--{name}); }} .key.s{place} {{ border-top: 3px solid var(--{name}); }} "
    f"svg .peak.s{place}, .dot.s{place} {{ fill: var(--{name}); }}"
    for place, name in enumerate(("orange", "blue", "green"))
)


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
    heads = "".join(f'<th><span class="key s{place}"></span>{escape(name)}</th>' for place, name in enumerate(names))
    cells = "\n".join(_table_row(label, cells) for label, cells in rows)
    parts = [
        "<h1>offload demo</h1>",
        f'<p class="lead">{escape(_lead(results, equal=equal))}</p>',
        f"<section><table><thead><tr><th></th>{heads}</tr></thead>\n<tbody>\n{cells}\n</tbody></table></section>",
        *charts,
        *(_report(result) for result in results if result["report"]),
        "<footer>" + "\n".join(f"<p>{escape(fact)}</p>" for fact in notes) + "</footer>",
    ]
    return document("offload demo", "\n".join(parts), style=_STYLE, width=940)


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
