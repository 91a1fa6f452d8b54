"""The charts of all pages: bytes over time, boxes on lanes, and a bar divided into parts.

Pages give it data in seconds and bytes. Only this module uses pixels, ticks and SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from offload.diagnostics.html.labels import Area, Labels
from offload.units import format_bytes, format_seconds

__all__ = [
    "COLORS",
    "STEP_KINDS",
    "STYLE",
    "Box",
    "Kind",
    "Part",
    "Series",
    "bar_chart",
    "lane_chart",
    "memory_chart",
    "pair_chart",
]

COLORS = ("red", "orange", "amber", "green", "blue", "violet", "pink", "slate", "gray", "pale")
STYLE = """svg { display: block; width: 100%; min-width: 640px; height: auto; }
svg text { fill: var(--faint); font-size: 12.5px; }
svg text.strong { fill: var(--ink); font-weight: 600; }
svg text.mark { fill: var(--color); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.grid { stroke: var(--line); }
.curve { fill: none; stroke: var(--color); stroke-width: 1.8; stroke-linejoin: round; }
.limit { stroke: var(--color); stroke-width: 1.5; stroke-dasharray: 6 4; }
.dot { fill: var(--color); stroke: var(--card); stroke-width: 1.5; }
.box { fill: var(--color); background: var(--color); }
.bar { display: flex; height: 54px; gap: 1px; }
.legend { list-style: none; margin: 8px 0 0; padding: 0; font-size: 13.5px; color: var(--faint); }
.legend li { display: inline-block; margin-right: 18px; font-variant-numeric: tabular-nums; }
.legend.tall li { display: block; margin: 2px 0; color: var(--ink); }
.key { display: inline-block; width: 14px; height: 10px; margin-right: 7px; background: var(--color); }
.key.thin { height: 3px; width: 18px; vertical-align: middle; }
.key.dashed { height: 0; width: 18px; vertical-align: middle; background: none; border-top: 2px dashed var(--color); }
""" + "\n".join(f".{name} {{ --color: var(--{name}); }}" for name in COLORS)

_WIDTH, _LEFT, _RIGHT = 1066, 80, 20
_TOP, _CHART = 28, 250  # top and bottom of a memory chart's area
_LANE = 36
_PAIR_WIDTH = 560
_PIXEL = 0.6  # boxes that are closer and narrower are drawn as one
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class Kind(NamedTuple):
    """A kind of boxes: its name in the legend, and one of `COLORS`."""

    name: str
    color: str


STEP_KINDS = {
    "forward": Kind("forward", "green"),
    "backward": Kind("backward", "violet"),
    "optimizer": Kind("optimizer", "slate"),
    "recompute": Kind("recomputation", "pink"),
    "wait": Kind("compute waits for a copy", "orange"),
    "out": Kind("copy out", "amber"),
    "in": Kind("copy in", "blue"),
    "spill": Kind("write to disk", "amber"),
    "fill": Kind("read from disk", "blue"),
}


class Box(NamedTuple):
    """A box on a lane: its kind, name, start and end in seconds, and bytes."""

    kind: Kind
    name: str
    start: float
    end: float
    nbytes: int = 0


class Part(NamedTuple):
    """A part of a bar: its name, one of `COLORS`, and bytes."""

    name: str
    color: str
    nbytes: int


@dataclass(frozen=True)
class Series:
    """Bytes over time.

    Parameters
    ----------
    name : str
        Name in the legend.
    color : str
        One of `COLORS`.
    points : sequence of (seconds, bytes)
        In order of time; each value holds until the next point.
    """

    name: str
    color: str
    points: Sequence[tuple[float, float]]


def memory_chart(
    label: str,
    series: Sequence[Series],
    *,
    seconds: float,
    origin: str,
    limit_bytes: int | None = None,
    from_zero: bool = True,
) -> str:
    """Draw bytes over time, each curve's peak marked.

    Parameters
    ----------
    label : str
        Description for screen readers.
    series : sequence of Series
        The curves.
    seconds : float
        Length of the time axis.
    origin : str
        What is at 0, such as "the start of the step".
    limit_bytes : int, optional
        Where to draw a horizontal line, labelled as the limit.
    from_zero : bool, default True
        Whether the byte axis begins at 0; otherwise near the lowest value.

    Returns
    -------
    str
        HTML: the drawing and its legend.
    """
    across = _TimeAxis(seconds, origin)
    values = [count for each in series for _, count in each.points]
    highest = max([*values, limit_bytes or 0])
    # If memory hardly changes, the curve must not exaggerate it.
    up = _ByteAxis(0.0 if from_zero else min([*values, 0.9 * highest]), highest)
    labels = Labels(Area(_LEFT, 2, _WIDTH - _RIGHT, _CHART))
    parts = [*across.frame(_CHART, label), *up.frame()]
    for each in series:
        corners = [(x, up.y(count)) for x, count in across.stairs(each.points)]
        labels.avoid_curve(corners)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        peak = format_bytes(max((count for _, count in each.points), default=0))
        title = f"<title>{escape(each.name)}: peak {peak}</title>"
        parts.append(f'<polyline class="curve {each.color}" points="{points}">{title}</polyline>')
    keys = [(f"thin {each.color}", each.name) for each in series]
    if limit_bytes is not None:
        ends = [(_WIDTH - _RIGHT, up.y(limit_bytes)), (_LEFT, up.y(limit_bytes))]
        labels.avoid_curve(ends)
        points = " ".join(f"{x},{y:.1f}" for x, y in ends)
        parts.append(f'<polyline class="limit red" points="{points}"/>')
        parts.append(_label(labels, f"limit {up.words(limit_bytes)}", "red", ends))
        keys.append(("dashed red", f"limit {format_bytes(limit_bytes)}"))
    return "".join([*parts, *_peaks(across, up, series, labels), "</svg>"]) + _legend(keys)


def lane_chart(label: str, lanes: Mapping[str, Sequence[Box]], *, seconds: float, origin: str) -> str:
    """Draw what ran when: one lane per resource, one box per use.

    Parameters
    ----------
    label : str
        Description for screen readers.
    lanes : mapping of str to sequence of Box
        Boxes by name of the lane, from the top; the boxes of a lane in order of time.
    seconds : float
        Length of the time axis.
    origin : str
        What is at 0, such as "the start of the step".

    Returns
    -------
    str
        HTML: the drawing and its legend.
    """
    axis = _TimeAxis(seconds, origin)
    parts = axis.frame(len(lanes) * _LANE + 8, label)
    for number, (name, boxes) in enumerate(lanes.items()):
        parts.append(f'<text class="strong" x="2" y="{number * _LANE + 29}">{escape(name)}</text>')
        parts += [_rectangle(axis, group, number * _LANE + 12) for group in _visible(axis, boxes)]
    kinds = dict.fromkeys(box.kind for boxes in lanes.values() for box in boxes)
    return "".join([*parts, "</svg>"]) + _legend([(kind.color, kind.name) for kind in kinds])


def bar_chart(label: str, parts: Sequence[Part]) -> str:
    """Draw a number of bytes divided into parts: one bar, and a list of the parts.

    Parameters
    ----------
    label : str
        Description for screen readers.
    parts : sequence of Part
        From the left; parts of 0 bytes are not drawn.

    Returns
    -------
    str
        HTML: the drawing and its legend.
    """
    shown = [(part, f"{format_bytes(part.nbytes)}: {part.name}") for part in parts if part.nbytes > 0]
    boxes = "".join(
        f'<span class="box {part.color}" style="flex-grow: {part.nbytes}" title="{escape(words)}"></span>'
        for part, words in shown
    )
    keys = _legend([(part.color, words) for part, words in shown], tall=True)
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{boxes}</div>{keys}'


def pair_chart(label: str, pairs: Sequence[tuple[str, tuple[int, str], tuple[int, str]]]) -> str:
    """Draw two bars for each name, with their texts: a value in bytes, and the same without offload.

    It uses the colour of the surrounding text. The bars' CSS classes are ``with`` and ``without``.
    """
    longest = max(max(own[0], other[0]) for _, own, other in pairs)
    parts, y = [], 0
    for name, *values in pairs:
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        for kind, (nbytes, words) in zip(("with", "without"), values, strict=True):
            width = (_PAIR_WIDTH - 290) * nbytes / longest
            parts.append(f'<rect class="{kind}" x="90" y="{y + 4}" width="{width:.1f}" height="12"></rect>')
            parts.append(f'<text x="{96 + width:.1f}" y="{y + 14}">{escape(words)}</text>')
            y += 16
        y += 8
    return f'<svg viewBox="0 0 {_PAIR_WIDTH} {y}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _peaks(across: _TimeAxis, up: _ByteAxis, series: Sequence[Series], labels: Labels) -> Iterator[str]:
    peaks = [(each.color, max(each.points, key=lambda point: point[1])) for each in series if each.points]
    marks = [(color, across.x(at), up.y(count), up.words(count)) for color, (at, count) in peaks]
    for color, x, y, _ in marks:
        labels.avoid(Area.around(x, y, 5, 5))
        yield f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    for color, x, y, words in marks:
        yield _label(labels, words, color, [(x, y)])


def _label(labels: Labels, words: str, color: str, anchors: Sequence[tuple[float, float]]) -> str:
    area = labels.place(words, anchors)
    x, y = (area.left + area.right) / 2, area.bottom - 4
    return f'<text class="mark {color}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{words}</text>'


def _legend(keys: Sequence[tuple[str, str]], *, tall: bool = False) -> str:
    items = (f'<li><span class="key {kind}"></span>{escape(words)}</li>' for kind, words in keys)
    return f'<ul class="legend{" tall" if tall else ""}">{"".join(items)}</ul>'


def _tick(span: float) -> float:
    """Return a round distance that divides `span` into about six.

    Examples
    --------
    >>> _tick(100.0), _tick(0.9)
    (20.0, 0.2)
    """
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / 6))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 6 >= span * 0.999)


@dataclass(frozen=True)
class _TimeAxis:
    """Converts times to horizontal positions."""

    seconds: float
    origin: str

    def x(self, at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (at / self.seconds if self.seconds else 0.0)

    def frame(self, height: int, label: str) -> list[str]:
        """Return the start of a drawing with this axis at its bottom."""
        units = (("seconds", 1.0), ("milliseconds", 1e3), ("microseconds", 1e6))
        unit, scale = next((each for each in units if self.seconds * each[1] >= 2), units[0])
        step = _tick(self.seconds * scale)
        parts = [f'<svg viewBox="0 0 {_WIDTH} {height + 44}" role="img" aria-label="{escape(label)}">']
        for number in range(int(self.seconds * scale / step + 1e-9) + 1):
            x = self.x(number * step / scale)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height}"/>')
            parts.append(f'<text x="{x:.1f}" y="{height + 17}" text-anchor="middle">{number * step:g}</text>')
        middle, words = (_LEFT + _WIDTH - _RIGHT) / 2, f"{unit} from {escape(self.origin)}"
        parts.append(f'<text x="{middle}" y="{height + 36}" text-anchor="middle">{words}</text>')
        return parts

    def stairs(self, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the corners (x, bytes) of a curve. Of points within a tenth of a pixel, the largest is used."""
        columns: dict[float, float] = {}
        for at, count in points:
            x = round(self.x(at), 1)
            columns[x] = max(columns.get(x, 0.0), count)
        corners: list[tuple[float, float]] = []
        for x, count in columns.items():
            corners += [(x, corners[-1][1])] if corners else []
            corners.append((x, count))
        return corners


class _ByteAxis:
    """Converts bytes to vertical positions, in a unit that makes the numbers short."""

    def __init__(self, lowest: float, highest: float) -> None:
        span = highest - lowest
        self.unit, self.scale = next((each for each in _UNITS if span >= 2 * each[1]), ("B", 1))
        self.step = max(_tick(1.04 * span / self.scale), 0.0 if self.scale > 1 else 1.0)
        self.first = math.floor(lowest / self.scale / self.step)
        self.last = max(math.ceil((highest + 0.04 * span) / self.scale / self.step), self.first + 1)

    def y(self, count: float) -> float:
        share = (count / self.scale / self.step - self.first) / (self.last - self.first)
        return _CHART - (_CHART - _TOP) * share

    def words(self, count: float) -> str:
        return f"{count / self.scale:.{3 if count < 1000 * self.scale else 4}g} {self.unit}"

    def frame(self) -> Iterator[str]:
        yield f'<text x="{_LEFT - 8}" y="{_TOP - 14}" text-anchor="end">{self.unit}</text>'
        for number in range(self.first, self.last + 1):
            y = self.y(number * self.step * self.scale)
            yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number * self.step:g}</text>'


def _visible(axis: _TimeAxis, boxes: Sequence[Box]) -> list[list[Box]]:
    """Group boxes of one kind that are too narrow and too close to be distinguished."""
    groups: list[list[Box]] = []
    for box in boxes:
        last = groups[-1][-1] if groups else None
        narrow = axis.x(box.end) - axis.x(box.start) < _PIXEL
        if last is not None and narrow and last.kind == box.kind and axis.x(box.start) - axis.x(last.end) < _PIXEL:
            groups[-1].append(box)
        else:
            groups.append([box])
    return groups


def _rectangle(axis: _TimeAxis, group: Sequence[Box], top: int) -> str:
    first, begin, end = group[0], group[0].start, max(box.end for box in group)
    words = first.name if len(group) == 1 else f"{first.name} and {len(group) - 1} more"
    nbytes = sum(box.nbytes for box in group)
    amount = f", {format_bytes(nbytes)}" if nbytes else ""
    title = escape(f"{first.kind.name}: {words}, {format_seconds(end - begin)}{amount}")
    x = axis.x(begin)
    width = max(axis.x(end) - x, 0.5)
    width -= 0.5 if width > 6 else 0  # so that adjacent boxes can be distinguished
    shape = f'x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_LANE - 12}"'
    return f'<rect class="box {first.kind.color}" {shape}><title>{title}</title></rect>'
