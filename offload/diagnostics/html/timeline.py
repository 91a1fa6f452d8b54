"""The page of one recorded step: lanes of compute and copies, and memory over time, in one self-contained file.

On top of the data path. Pure: a timeline in, HTML text out; no script, no external resource.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from offload.diagnostics.html.page import TimeAxis, box, document, legend, tick
from offload.diagnostics.timeline import Span, StepTimeline
from offload.units import format_bytes, format_seconds

__all__ = ["render"]

_WIDTH, _LEFT, _RIGHT = 1180, 86, 16
_LANE, _CHART = 38, 190  # heights
_PIXEL = 0.6  # spans that are closer and narrower are drawn as one
_LANES = ("compute", "copy out", "copy in", "disk")
_START = "the start of the recording"
_STYLE = """svg { min-width: 700px; }
thead th { border-top: 0; color: var(--faint); }
.unswapped { stroke: var(--gray); } .resident { stroke: var(--blue); } .use { stroke: var(--green); }"""


def render(step: StepTimeline) -> str:
    """Return the page of a step.

    Parameters
    ----------
    step : StepTimeline
        What to show.

    Returns
    -------
    str
        One HTML document; it loads nothing and needs no server.
    """
    kinds = [("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")]
    kinds += [("wait", "compute waits for a copy"), ("out", "copy out"), ("in", "copy in")]
    moments = [sample.at for sample in step.memory]
    axis = TimeAxis(step.seconds, _WIDTH, _LEFT, _RIGHT)
    stayed = [sample.unswapped for sample in step.memory]
    resident = [sample.resident for sample in step.memory]
    in_use = [sample.in_use for sample in step.memory]
    saved = _chart(axis, moments, {"unswapped": stayed, "resident": resident}, 0)
    memory = _chart(axis, moments, {"use": in_use}, min(in_use, default=0))
    saved_legend = legend([("unswapped", "had they stayed"), ("resident", "as it was")], lines=True)
    parts = [
        "<h1>One training step</h1>",
        *(f"<p>{escape(line)}</p>" for line in step.summary()),
        f"<section><h2>What ran when</h2>\n{_lanes(axis, step)}\n{legend(kinds)}</section>",
        f"<section><h2>Swapped tensors on the device</h2>\n{saved}\n{saved_legend}</section>",
        f"<section><h2>Memory in use: {escape(step.memory_label)}</h2>\n{memory}</section>",
        _waits(step),
        '<p class="faint">Rest the pointer on a box to read what it is. Boxes too narrow to see are one.</p>',
    ]
    return document("offload: one step", "\n".join(parts), style=_STYLE, width=1240)


def _lanes(axis: TimeAxis, step: StepTimeline) -> str:
    """Draw the lanes; waits lie in the compute lane, where they are."""
    shown = [lane for lane in _LANES if lane != "disk" or step.on("disk")]
    height = len(shown) * _LANE + 8
    parts = [axis.frame(height, "Compute and copies over the step", _START)]
    for number, lane in enumerate(shown):
        parts.append(f'<text class="strong" x="8" y="{number * _LANE + 31}">{lane}</text>')
        spans = step.on(lane) + (step.on("waiting") if lane == "compute" else [])
        parts += _boxes(axis, sorted(spans, key=lambda span: span.start), number)
    return "".join(parts) + "</svg>"


def _boxes(axis: TimeAxis, spans: Sequence[Span], lane: int) -> list[str]:
    """Draw spans; those of one kind too narrow and too near to be told apart become one box."""
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1][-1] if groups else None
        near = last is not None and axis.x(span.start) - axis.x(last.end) < _PIXEL
        narrow = axis.x(span.end) - axis.x(span.start) < _PIXEL
        if near and narrow and last is not None and last.kind == span.kind:
            groups[-1].append(span)
        else:
            groups.append([span])
    boxes = []
    for group in groups:
        first, begin, finish = group[0], group[0].start, max(span.end for span in group)
        words = first.name if len(group) == 1 else f"{len(group)} × {first.kind}, {first.name} and others"
        nbytes = sum(span.nbytes for span in group)
        moved = f", {format_bytes(nbytes)}" if nbytes else ""
        title = f"{first.kind} {words}: {format_seconds(finish - begin)}{moved}"
        x = axis.x(begin)
        width = max(axis.x(finish) - x, 0.5)
        width -= 0.5 if width > 3 else 0  # so that neighbours can be told apart
        boxes.append(box(first.kind, x, lane * _LANE + 14, width, _LANE - 12, title))
    return boxes


def _chart(axis: TimeAxis, moments: Sequence[float], curves: dict[str, list[int]], floor: int) -> str:
    """Draw bytes over time, from about `floor` up."""
    top = max((count for counts in curves.values() for count in counts), default=0)
    floor = min(floor, int(0.9 * top))  # what hardly changes shall look so
    unit, scale = ("GiB", 1 << 30) if top - floor >= 4 << 30 else ("MiB", 1 << 20)
    step = tick(max(top - floor, scale) / scale)
    lowest = math.floor(floor / scale / step)
    highest = max(math.ceil(top / scale / step), lowest + 1)

    def y(count: float) -> float:
        return 18 + (_CHART - 18) * (1 - (count / scale - lowest * step) / ((highest - lowest) * step))

    parts = [axis.frame(_CHART, f"Bytes over the step, {unit} over seconds", _START)]
    for number in range(lowest, highest + 1):
        parts.append(axis.level(y(number * step * scale), f"{number * step:g}"))
    parts.append(f'<text x="8" y="12">{unit}</text>')
    for name, counts in curves.items():
        corners = " ".join(f"{x:.1f},{y(count):.1f}" for x, count in axis.stairs(moments, counts))
        peak = format_bytes(max(counts, default=0))
        parts.append(f'<polyline class="curve {name}" points="{corners}"><title>peak {peak}</title></polyline>')
    return "".join(parts) + "</svg>"


def _waits(step: StepTimeline) -> str:
    """A table of where compute waited longest."""
    by_name: dict[str, float] = {}
    for span in step.on("waiting"):
        by_name[span.name] = by_name.get(span.name, 0.0) + span.end - span.start
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:8]
    if not longest:
        return ""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{format_seconds(seconds)}</td></tr>" for name, seconds in longest)
    head = "<thead><tr><th>where</th><th>in all</th></tr></thead>"
    return f"<section><h2>Longest waits</h2><table>{head}<tbody>{rows}</tbody></table></section>"
