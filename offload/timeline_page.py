"""The page of one recorded step: lanes of compute and copies, and memory over time, in one self-contained file.

On top of the data path. Pure: a timeline in, HTML text out; no script, no external resource.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from string import Template

from offload.timeline import Span, StepTimeline
from offload.units import format_bytes, format_seconds

__all__ = ["render"]

_WIDTH, _LEFT, _RIGHT = 1180, 86, 16
_LANE, _CHART = 38, 190  # heights
_PIXEL = 0.6  # spans that are closer and narrower are drawn as one
_LANES = ("compute", "copy out", "copy in", "disk")

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>offload: one step</title>
<style>
:root { color-scheme: light dark; --page: #fafaf8; --ink: #1c2024; --faint: #5d656e; --line: #d9dce0; --card: #fff;
  --forward: #4a8f5c; --backward: #8a6fb5; --optimizer: #58677a; --wait: #d9480f; --out: #b7791f; --in: #1667b7;
  --spill: #b7791f; --fill: #1667b7; --unswapped: #8a939d; --resident: #1667b7; --use: #4a8f5c; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e6e8eb; --faint: #9ba4ae; --line: #343b43;
  --card: #1b1f24; --forward: #7cc48f; --backward: #b9a2e3; --optimizer: #8796a8; --wait: #ff9a5c; --out: #e3b25c;
  --in: #6cb2f5; --spill: #e3b25c; --fill: #6cb2f5; --unswapped: #8f99a4; --resident: #6cb2f5; --use: #7cc48f; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 26px 18px 36px; }
h1 { font-size: 22px; margin: 0 0 6px; }
h2 { font-size: 16px; margin: 0 0 6px; }
p { margin: 0 0 4px; }
.faint { color: var(--faint); font-size: 13.5px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  margin: 14px 0; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 700px; height: auto; }
svg text { fill: var(--faint); font-size: 12.5px; }
svg text.strong { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--line); }
.forward { fill: var(--forward); } .backward { fill: var(--backward); }
.optimizer { fill: var(--optimizer); } .wait { fill: var(--wait); }
.out { fill: var(--out); } .in { fill: var(--in); } .spill { fill: var(--spill); } .fill { fill: var(--fill); }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.unswapped { stroke: var(--unswapped); } .resident { stroke: var(--resident); } .use { stroke: var(--use); }
.legend { list-style: none; margin: 6px 0 0; padding: 0; font-size: 13.5px; color: var(--faint); }
.legend li { display: inline-block; margin-right: 18px; }
.legend svg { display: inline-block; width: 18px; min-width: 0; height: 10px; margin-right: 6px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 22px 3px 0; border-top: 1px solid var(--line); font-weight: normal; }
thead th { border-top: 0; color: var(--faint); }
</style>
</head>
<body>
<main>
<h1>One training step</h1>
$summary
<section><h2>What ran when</h2>
$lanes
<ul class="legend">$lanes_legend</ul></section>
<section><h2>Swapped tensors on the device</h2>
$saved
<ul class="legend">$saved_legend</ul></section>
<section><h2>Memory in use: $memory_label</h2>
$memory</section>
$waits
<p class="faint">Rest the pointer on a box to read what it is. Boxes too narrow to see are drawn together.</p>
</main>
</body>
</html>
""")


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
    saved = [("unswapped", "had they stayed"), ("resident", "as it was")]
    moments = [sample.at for sample in step.memory]
    return _PAGE.substitute(
        summary="".join(f"<p>{escape(line)}</p>" for line in step.summary()),
        lanes=_lanes(step),
        lanes_legend=_legend(kinds, _box_swatch),
        saved=_chart(
            step.seconds,
            moments,
            {
                "unswapped": [sample.unswapped for sample in step.memory],
                "resident": [sample.resident for sample in step.memory],
            },
            0,
        ),
        saved_legend=_legend(saved, _line_swatch),
        memory_label=escape(step.memory_label),
        memory=_chart(
            step.seconds,
            moments,
            {"use": [sample.in_use for sample in step.memory]},
            min((sample.in_use for sample in step.memory), default=0),
        ),
        waits=_waits(step),
    )


def _lanes(step: StepTimeline) -> str:
    """Draw the lanes; waits lie in the compute lane, where they are."""
    shown = [lane for lane in _LANES if lane != "disk" or step.on("disk")]
    height = len(shown) * _LANE + 8
    parts = [_frame(step.seconds, height, "Compute and copies over the step")]
    for number, lane in enumerate(shown):
        parts.append(f'<text class="strong" x="8" y="{number * _LANE + 31}">{lane}</text>')
        spans = step.on(lane) + (step.on("waiting") if lane == "compute" else [])
        parts += _boxes(sorted(spans, key=lambda span: span.start), step.seconds, number)
    return "".join(parts) + "</svg>"


def _boxes(spans: Sequence[Span], end: float, lane: int) -> list[str]:
    """Draw spans; those of one kind too narrow and too near to be told apart become one box."""
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1][-1] if groups else None
        near = last is not None and _x(span.start, end) - _x(last.end, end) < _PIXEL
        narrow = _x(span.end, end) - _x(span.start, end) < _PIXEL
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
        title = escape(f"{first.kind} {words}: {format_seconds(finish - begin)}{moved}")
        x = _x(begin, end)
        width = max(_x(finish, end) - x, 0.5)
        width -= 0.5 if width > 3 else 0  # so that neighbours can be told apart
        boxes.append(
            f'<rect class="{first.kind}" x="{x:.2f}" y="{lane * _LANE + 14}" width="{width:.2f}" height="{_LANE - 12}">'
            f"<title>{title}</title></rect>"
        )
    return boxes


def _chart(end: float, moments: Sequence[float], curves: dict[str, list[int]], floor: int) -> str:
    """Draw bytes over time, from about `floor` up."""
    top = max((count for counts in curves.values() for count in counts), default=0)
    floor = min(floor, int(0.9 * top))  # what hardly changes shall look so
    unit, scale = ("GiB", 1 << 30) if top - floor >= 4 << 30 else ("MiB", 1 << 20)
    step = _tick(max(top - floor, scale) / scale)
    lowest = math.floor(floor / scale / step)
    highest = max(math.ceil(top / scale / step), lowest + 1)

    def y(count: float) -> float:
        return 18 + (_CHART - 18) * (1 - (count / scale - lowest * step) / ((highest - lowest) * step))

    parts = [_frame(end, _CHART, f"Bytes over the step, {unit} over seconds")]
    for number in range(lowest, highest + 1):
        at = y(number * step * scale)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    parts.append(f'<text x="8" y="12">{unit}</text>')
    for name, counts in curves.items():
        corners = _corners(end, moments, counts, y)
        peak = format_bytes(max(counts, default=0))
        parts.append(f'<polyline class="curve {name}" points="{corners}"><title>peak {peak}</title></polyline>')
    return "".join(parts) + "</svg>"


def _corners(end: float, moments: Sequence[float], counts: Sequence[int], y: Callable[[float], float]) -> str:
    """The curve's corners; samples that share a tenth of a pixel are drawn as the largest of them."""
    columns: dict[float, int] = {}
    for at, count in zip(moments, counts, strict=True):
        x = round(_x(at, end), 1)
        columns[x] = max(columns.get(x, 0), count)
    corners, before = [], None
    for x, count in columns.items():
        if before is not None:
            corners.append(f"{x:.1f},{y(before):.1f}")
        corners.append(f"{x:.1f},{y(count):.1f}")
        before = count
    return " ".join(corners)


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


def _frame(end: float, height: int, label: str) -> str:
    """Return the opening of a drawing with its time axis."""
    unit, scale = ("seconds", 1.0) if end >= 2 else ("milliseconds", 1e3)
    step = _tick(end * scale)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height + 44}" role="img" aria-label="{escape(label)}">']
    for number in range(int(end * scale / step + 1e-9) + 1):
        at = _x(number * step / scale, end)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="10" y2="{height}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height + 17}" text-anchor="middle">{number * step:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    words = f"{unit} from the start of the recording"
    parts.append(f'<text x="{middle}" y="{height + 36}" text-anchor="middle">{words}</text>')
    return "".join(parts)


def _x(seconds: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (seconds / end if end else 0.0)


def _tick(span: float) -> float:
    """Return a round distance that divides `span` into about six."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / 6))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 6 >= span * 0.999)


def _legend(entries: Sequence[tuple[str, str]], swatch: Callable[[str], str]) -> str:
    return "".join(f"<li>{swatch(kind)}{escape(words)}</li>" for kind, words in entries)


def _box_swatch(kind: str) -> str:
    return f'<svg viewBox="0 0 18 10" aria-hidden="true"><rect class="{kind}" width="18" height="10"/></svg>'


def _line_swatch(kind: str) -> str:
    line = f'<line class="curve {kind}" x1="0" x2="18" y1="5" y2="5"/>'
    return f'<svg viewBox="0 0 18 10" aria-hidden="true">{line}</svg>'
