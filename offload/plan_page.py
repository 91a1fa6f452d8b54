"""The page that `offload plan --plot` writes: memory and lanes over the step, in one self-contained file.

On top of the data path. Pure: a plan in, HTML text out; no script, no external resource.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from string import Template

from offload.plan import Copy, Plan, Timing, simulate
from offload.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["render"]

_WIDTH, _LEFT, _RIGHT = 960, 78, 16
_CHART, _LANE = 300, 34  # heights
_GIB = 1 << 30

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>offload plan: $title</title>
<style>
:root { color-scheme: light dark; --page: #fafaf8; --ink: #1c2024; --faint: #5d656e; --line: #d9dce0;
  --card: #fff; --without: #8a939d; --with: #1667b7; --limit: #b3261e; --forward: #4a8f5c;
  --backward: #8a6fb5; --wait: #d9480f; --out: #b7791f; --in: #1667b7; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e6e8eb; --faint: #9ba4ae;
  --line: #343b43; --card: #1b1f24; --without: #8f99a4; --with: #6cb2f5; --limit: #ff8a80;
  --forward: #7cc48f; --backward: #b9a2e3; --wait: #ff9a5c; --out: #e3b25c; --in: #6cb2f5; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 26px 18px 36px; }
h1 { font-size: 22px; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 6px; }
p { margin: 0 0 8px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 16px; margin: 14px 0; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 640px; height: auto; }
svg text { fill: var(--faint); font-size: 12.5px; }
svg text.strong { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--line); }
.without, .with { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.without { stroke: var(--without); } .with { stroke: var(--with); }
.limit { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 6 4; }
svg text.limit-text { fill: var(--limit); }
.forward { fill: var(--forward); } .backward { fill: var(--backward); } .wait { fill: var(--wait); }
.out { fill: var(--out); } .in { fill: var(--in); }
.wide { stroke: var(--card); stroke-width: .6; }
.legend { list-style: none; margin: 6px 0 0; padding: 0; font-size: 13.5px; color: var(--faint); }
.legend li { display: inline-block; margin-right: 18px; }
.legend svg { display: inline-block; width: 18px; min-width: 0; height: 10px; margin-right: 6px; }
details pre { white-space: pre-wrap; font-size: 12.5px; line-height: 1.45; }
</style>
</head>
<body>
<main>
<h1>offload plan: $title</h1>
$summary
<section><h2>Memory resident while each node runs</h2>
$memory
<ul class="legend">$memory_legend</ul></section>
<section><h2>What runs when</h2>
$lanes
<ul class="legend">$lanes_legend</ul></section>
<details><summary>Tensor by tensor</summary><pre>$details</pre></details>
<p><small>$facts</small></p>
</main>
</body>
</html>
""")


def render(plan: Plan, title: str) -> str:
    """Return the page of a plan.

    Parameters
    ----------
    plan : Plan
        What to show.
    title : str
        Name of what was planned, such as the trace's file name.

    Returns
    -------
    str
        One HTML document; it loads nothing.
    """
    unswapped = simulate(plan.trace, (), plan.link)
    end = max(plan.timing.step_seconds, unswapped.step_seconds)
    summary = "".join(f"<p>{escape(line)}</p>" for line in plan.summary().splitlines())
    link = plan.link
    return _PAGE.substitute(
        title=escape(title),
        summary=summary,
        memory=_memory(plan, unswapped, end),
        memory_legend=_legend(("without", "without swaps"), ("with", "with the plan"), ("limit", "limit")),
        lanes=_lanes(plan, end),
        lanes_legend=_legend(
            ("forward", "forward"),
            ("backward", "backward"),
            ("wait", "compute waits"),
            ("out", "copy out"),
            ("in", "copy in"),
        ),
        details=escape(plan.explain()),
        facts=escape(
            f"Link: {format_bandwidth(link.out_bandwidth)} out, {format_bandwidth(link.in_bandwidth)} in, latency "
            f"{format_seconds(link.latency)}. Trace: {len(plan.trace.nodes)} nodes, {plan.trace.source or 'no source'}."
        ),
    )


def _memory(plan: Plan, unswapped: Timing, end: float) -> str:
    top = max(plan.unswapped_peak_bytes, plan.peak_bytes, plan.limit_bytes, 1) / _GIB
    step = _tick(top)
    unit, scale = ("GiB", 1.0) if top >= 1 else ("MiB", 1024.0)
    if scale != 1.0:
        step = _tick(top * scale) / scale
    ceiling = max(step * math.ceil(top * 1.04 / step), 1e-12)

    def y(count: float) -> float:
        return 16 + (_CHART - 16) * (1 - count / _GIB / ceiling)

    parts = [_frame(end, _CHART, f"Memory over the step, {unit} over seconds")]
    for i in range(round(ceiling / step) + 1):
        at = y(i * step * _GIB)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        label = f"{i * step * scale:g}"
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<text x="8" y="11">{unit}</text>')
    for name, timing in (("without", unswapped), ("with", plan.timing)):
        points = " ".join(f"{a:.1f},{y(b):.1f}" for a, b in _steps(timing, end))
        peak = format_bytes(timing.peak_bytes)
        parts.append(f'<polyline class="{name}" points="{points}"><title>{name}: peak {peak}</title></polyline>')
    at = y(plan.limit_bytes)
    parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    text = f"limit {format_bytes(plan.limit_bytes)}"
    x = _WIDTH - _RIGHT - 4
    parts.append(f'<text class="limit-text" x="{x}" y="{at - 5:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts) + "</svg>"


def _steps(timing: Timing, end: float) -> list[tuple[float, float]]:
    """Return the corners of the curve; nodes that share a tenth of a pixel are drawn as the largest of them."""
    columns: dict[float, int] = {}
    for at, count in zip(timing.ready, timing.resident, strict=True):
        x = round(_x(at, end), 1)
        columns[x] = max(columns.get(x, 0), count)
    corners: list[tuple[float, float]] = []
    for x, count in columns.items():
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, count))
    if corners:
        corners.append((_x(timing.step_seconds, end), corners[-1][1]))
    return corners


def _lanes(plan: Plan, end: float) -> str:
    timing = plan.timing
    names = ("compute", "copy out", "copy in")
    height = len(names) * _LANE + 8
    parts = [_frame(end, height, "Compute and copies over the step, seconds")]
    for lane, name in enumerate(names):
        parts.append(f'<text class="strong" x="8" y="{lane * _LANE + 27}">{name}</text>')
    for kind, begin, finish in _runs(plan):
        parts.append(_box(kind, begin, finish, end, 0, f"{kind} {format_seconds(finish - begin)}"))
    sizes = {tensor.id: tensor for tensor in plan.trace.tensors}
    lanes: tuple[tuple[str, Sequence[Copy]], ...] = (("out", timing.copy_outs), ("in", timing.copy_ins))
    for lane, (kind, copies) in enumerate(lanes, start=1):
        for copy in copies:
            tensor = sizes[copy.id]
            name = plan.trace.nodes[tensor.produced].name
            words = f"tensor {copy.id} of {name}, {format_bytes(tensor.bytes)}: {format_seconds(copy.end - copy.start)}"
            parts.append(_box(kind, copy.start, copy.end, end, lane, words))
    return "".join(parts) + "</svg>"


def _runs(plan: Plan) -> list[tuple[str, float, float]]:
    """Return stretches of forward, backward and waiting: nodes that follow each other without a pause are one."""
    runs: list[tuple[str, float, float]] = []
    before = 0.0
    for node, start, finish in zip(plan.trace.nodes, plan.timing.start, plan.timing.finish, strict=True):
        kind = "backward" if node.backward else "forward"
        if start > before:
            runs.append(("wait", before, start))
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1], finish)
        else:
            runs.append((kind, start, finish))
        before = finish
    return runs


def _box(kind: str, begin: float, finish: float, end: float, lane: int, words: str) -> str:
    x = _x(begin, end)
    width = max(_x(finish, end) - x, 0.4)
    y = lane * _LANE + 12
    title = escape(words)
    style = f"{kind} wide" if width > 4 and lane else kind
    return (
        f'<rect class="{style}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE - 12}">'
        f"<title>{title}</title></rect>"
    )


def _frame(end: float, height: int, label: str) -> str:
    """Return the opening of a drawing with its time axis."""
    step = _tick(end)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height + 44}" role="img" aria-label="{escape(label)}">']
    for i in range(int(end / step + 1e-9) + 1):
        at = _x(i * step, end)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="10" y2="{height}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height + 17}" text-anchor="middle">{i * step:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{height + 36}" text-anchor="middle">seconds from the start of the step</text>')
    return "".join(parts)


def _x(seconds: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (seconds / end if end else 0.0)


def _tick(span: float) -> float:
    """Return a round distance that divides `span` into about six."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / 6))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 6 >= span * 0.999)


def _legend(*entries: tuple[str, str]) -> str:
    return "".join(f"<li>{_swatch(kind)}{escape(words)}</li>" for kind, words in entries)


def _swatch(kind: str) -> str:
    if kind in ("without", "with", "limit"):
        return f'<svg viewBox="0 0 18 10" aria-hidden="true"><line class="{kind}" x1="0" x2="18" y1="5" y2="5"/></svg>'
    return f'<svg viewBox="0 0 18 10" aria-hidden="true"><rect class="{kind}" width="18" height="10"/></svg>'
