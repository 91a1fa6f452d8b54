"""The page that `offload plan --plot` writes: memory and lanes over the step, in one self-contained file.

On top of the data path. Pure: a plan in, HTML text out; no script, no external resource.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from offload.diagnostics.html.page import TimeAxis, box, document, legend, tick
from offload.plan import Copy, Plan, Timing, simulate
from offload.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["render"]

_WIDTH, _LEFT, _RIGHT = 960, 78, 16
_CHART, _LANE = 300, 34  # heights
_GIB = 1 << 30
_START = "the start of the step"
_STYLE = """svg { min-width: 640px; }
.without { stroke: var(--gray); } .with { stroke: var(--blue); }
.limit { stroke: var(--red); stroke-width: 1.5; stroke-dasharray: 6 4; }
svg text.limit-text { fill: var(--red); }
.wide { stroke: var(--card); stroke-width: .6; }
details pre { white-space: pre-wrap; font-size: 12.5px; line-height: 1.45; }"""


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
    axis = TimeAxis(end, _WIDTH, _LEFT, _RIGHT)
    link = plan.link
    facts = (
        f"Link: {format_bandwidth(link.out_bandwidth)} out, {format_bandwidth(link.in_bandwidth)} in, latency "
        f"{format_seconds(link.latency)}. Trace: {len(plan.trace.nodes)} nodes, {plan.trace.source or 'no source'}."
    )
    curves = legend([("without", "without swaps"), ("with", "with the plan"), ("limit", "limit")], lines=True)
    kinds = legend(
        [
            ("forward", "forward"),
            ("backward", "backward"),
            ("wait", "compute waits"),
            ("out", "copy out"),
            ("in", "copy in"),
        ]
    )
    parts = [
        f"<h1>offload plan: {escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in plan.summary().splitlines()),
        f"<section><h2>Memory resident while each node runs</h2>\n{_memory(axis, plan, unswapped)}\n{curves}</section>",
        f"<section><h2>What runs when</h2>\n{_lanes(axis, plan)}\n{kinds}</section>",
        f"<details><summary>Tensor by tensor</summary><pre>{escape(plan.explain())}</pre></details>",
        f"<p><small>{escape(facts)}</small></p>",
    ]
    return document(f"offload plan: {title}", "\n".join(parts), style=_STYLE)


def _memory(axis: TimeAxis, plan: Plan, unswapped: Timing) -> str:
    top = max(plan.unswapped_peak_bytes, plan.peak_bytes, plan.limit_bytes, 1) / _GIB
    step = tick(top)
    unit, scale = ("GiB", 1.0) if top >= 1 else ("MiB", 1024.0)
    if scale != 1.0:
        step = tick(top * scale) / scale
    ceiling = max(step * math.ceil(top * 1.04 / step), 1e-12)

    def y(count: float) -> float:
        return 16 + (_CHART - 16) * (1 - count / _GIB / ceiling)

    parts = [axis.frame(_CHART, f"Memory over the step, {unit} over seconds", _START)]
    for i in range(round(ceiling / step) + 1):
        parts.append(axis.level(y(i * step * _GIB), f"{i * step * scale:g}"))
    parts.append(f'<text x="8" y="11">{unit}</text>')
    for name, timing in (("without", unswapped), ("with", plan.timing)):
        moments = [*timing.ready, timing.step_seconds]
        corners = axis.stairs(moments, [*timing.resident, timing.resident[-1] if timing.resident else 0])
        points = " ".join(f"{x:.1f},{y(count):.1f}" for x, count in corners)
        peak = format_bytes(timing.peak_bytes)
        parts.append(f'<polyline class="curve {name}" points="{points}"><title>{name}: peak {peak}</title></polyline>')
    at = y(plan.limit_bytes)
    parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    text = f"limit {format_bytes(plan.limit_bytes)}"
    x = _WIDTH - _RIGHT - 4
    parts.append(f'<text class="limit-text" x="{x}" y="{at - 5:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts) + "</svg>"


def _lanes(axis: TimeAxis, plan: Plan) -> str:
    timing = plan.timing
    names = ("compute", "copy out", "copy in")
    height = len(names) * _LANE + 8
    parts = [axis.frame(height, "Compute and copies over the step", _START)]
    for lane, name in enumerate(names):
        parts.append(f'<text class="strong" x="8" y="{lane * _LANE + 27}">{name}</text>')
    for kind, begin, finish in _runs(plan):
        parts.append(_box(axis, kind, begin, finish, 0, f"{kind} {format_seconds(finish - begin)}"))
    sizes = {tensor.id: tensor for tensor in plan.trace.tensors}
    lanes: tuple[tuple[str, Sequence[Copy]], ...] = (("out", timing.copy_outs), ("in", timing.copy_ins))
    for lane, (kind, copies) in enumerate(lanes, start=1):
        for copy in copies:
            tensor = sizes[copy.id]
            name = plan.trace.nodes[tensor.produced].name
            words = f"tensor {copy.id} of {name}, {format_bytes(tensor.bytes)}: {format_seconds(copy.end - copy.start)}"
            parts.append(_box(axis, kind, copy.start, copy.end, lane, words))
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


def _box(axis: TimeAxis, kind: str, begin: float, finish: float, lane: int, words: str) -> str:
    x = axis.x(begin)
    width = max(axis.x(finish) - x, 0.4)
    return box(f"{kind} wide" if width > 4 and lane else kind, x, lane * _LANE + 12, width, _LANE - 12, words)
