"""The interactive chart of all pages: lanes of boxes, and memory over time as tensors and curves.

Its input is data in seconds and bytes. It returns the data as HTML that contains JSON. The scripts in `assets`, which
`page.document` adds to each page, draw the chart in the browser.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

from offload.units import format_bytes

__all__ = [
    "COLORS",
    "STEP_KINDS",
    "TENSOR_KINDS",
    "Box",
    "Kind",
    "Part",
    "Series",
    "Tensor",
    "bar_chart",
    "chart",
    "cost_chart",
]

COLORS = ("red", "orange", "amber", "green", "blue", "violet", "pink", "slate", "gray", "pale")

_RESOLUTION = 8192  # boxes narrower than this fraction of the axis, and closer points of a curve, are joined
_STACKED_MAX = 300  # TENSORS_MAX of assets/stack.js
_LIMIT_SHARE = 2  # a limit is drawn if it is at most this many times the peak


class Kind(NamedTuple):
    """A kind of boxes or tensors: its name in the legend, and one of `COLORS`."""

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
TENSOR_KINDS = {
    "kept": Kind("kept", "slate"),
    "swapped": Kind("swapped", "blue"),
    "recomputed": Kind("recomputed", "pink"),
    "cancelled": Kind("swap cancelled: needed again too soon", "amber"),
}


class Box(NamedTuple):
    """A box on a lane: its kind, name, start and end, bytes, and the id of its tensor (-1: none)."""

    kind: Kind
    name: str
    start: float
    end: float
    nbytes: int = 0
    tensor: int = -1


class Tensor(NamedTuple):
    """A tensor of the stack: its kind, name, bytes, id, and start and end of each time in memory, in seconds."""

    kind: Kind
    name: str
    nbytes: int
    id: int
    resident: tuple[float, ...]


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

    @property
    def peak(self) -> float:
        """The largest value."""
        return max((count for _, count in self.points), default=0)


def chart(
    label: str,
    *,
    seconds: float,
    origin: str,
    lanes: Mapping[str, Sequence[Box]] | None = None,
    series: Sequence[Series] = (),
    tensors: Sequence[Tensor] = (),
    rest: Series | None = None,
    limit_bytes: int | None = None,
    from_zero: bool = True,
) -> str:
    """Return a chart of what runs when, and of memory over the same time.

    Parameters
    ----------
    label : str
        Description for screen readers.
    seconds : float
        Length of the time axis.
    origin : str
        Meaning of time 0, such as "the start of the step".
    lanes : mapping of str to sequence of Box, optional
        Boxes by name of the lane, from the top; the boxes of a lane in order of time.
    series : sequence of Series, optional
        Curves.
    tensors : sequence of Tensor, optional
        The tensors of which the memory is stacked; the largest ones are drawn individually, the others as one.
    rest : Series, optional
        All of the memory. The part that does not belong to tensors is filled and has this name.
    limit_bytes : int, optional
        Position of a horizontal line. A limit of more than twice the peak is only named in the legend.
    from_zero : bool, default True
        Whether the byte axis begins at 0; otherwise near the lowest value.

    Returns
    -------
    str
        HTML: the data, which the scripts of the page draw, and the legend.
    """
    data = _Data("seconds", seconds, f"from {origin}")
    data.add_lanes(lanes or {})
    data.spec["tensors"] = [data.tensor(each) for each in tensors]
    data.spec["curves"] = [data.curve(each) for each in series]
    data.spec |= {"rest": data.curve(rest) if rest else None, "limit": limit_bytes, "from_zero": from_zero}
    keys = [(f"thin {each.color}", f"{each.name}, peak {format_bytes(each.peak)}") for each in series]
    if limit_bytes is not None:
        peak = max((each.peak for each in (*series, *([rest] if rest else []))), default=0)
        above = ", above this picture" if limit_bytes > _LIMIT_SHARE * peak else ""
        keys.append(("dashed red", f"limit {format_bytes(limit_bytes)}{above}"))
    keys += [(kind.color, kind.name) for kind in dict.fromkeys(each.kind for each in tensors)]
    keys += [("gray", "smaller tensors")] if len(tensors) > _STACKED_MAX else []
    keys += [(rest.color, rest.name)] if rest else []
    kinds = dict.fromkeys(box.kind for boxes in (lanes or {}).values() for box in boxes)
    return _figure(label, data, _legend([(kind.color, kind.name) for kind in kinds]) + _legend(keys))


def bar_chart(label: str, parts: Sequence[Part]) -> str:
    """Return a chart of a number of bytes divided into parts: one bar, and a list of the parts.

    Parameters
    ----------
    label : str
        Description for screen readers.
    parts : sequence of Part
        The parts from the left; parts of 0 bytes are omitted.

    Returns
    -------
    str
        HTML: the data, which the scripts of the page draw, and the list.
    """
    shown = [part for part in parts if part.nbytes > 0]
    boxes, start = [], 0
    for part in shown:
        boxes.append(Box(Kind(part.name, part.color), part.name, start, start + part.nbytes, part.nbytes))
        start += part.nbytes
    data = _Data("bytes", start, "")
    data.add_lanes({"memory": boxes})
    keys = [(part.color, f"{format_bytes(part.nbytes)}: {part.name}") for part in shown]
    return _figure(label, data, _legend(keys, tall=True))


def cost_chart(label: str, series: Sequence[Series], *, limit_bytes: int) -> str:
    """Return a chart of the step time over the memory.

    Parameters
    ----------
    label : str
        Description for screen readers.
    series : sequence of Series
        Curves of points (bytes, seconds), from the fewest bytes; each value holds until the next point.
    limit_bytes : int
        Position of a vertical line.

    Returns
    -------
    str
        HTML: the data, which the scripts of the page draw, and the legend.
    """
    end = 1.05 * max((at for each in series for at, _ in each.points), default=0)
    is_near = limit_bytes <= end
    data = _Data("bytes", end, "memory")
    longer = [replace(each, points=[*each.points, (end, each.points[-1][1])]) for each in series if each.points]
    data.spec |= {"up": "seconds", "from_zero": False, "mark": limit_bytes if is_near else None}
    data.spec["curves"] = [data.curve(each) for each in longer]
    words = f"limit {format_bytes(limit_bytes)}{'' if is_near else ', right of this picture'}"
    return _figure(
        label, data, _legend([*((f"thin {each.color}", each.name) for each in series), ("dashed red", words)])
    )


class _Data:
    """The data for the scripts: rows of numbers. Names and kinds are indices into `names` and `kinds`."""

    def __init__(self, unit: str, end: float, title: str) -> None:
        self._end = end
        self._digits = max(7 - math.floor(math.log10(end)), 0) if end > 0 else 0
        self._names: dict[str, int] = {}
        self._kinds: dict[Kind, int] = {}
        self.spec: dict[str, object] = {"unit": unit, "up": "bytes", "end": end, "title": title}
        self.spec |= {"lanes": [], "tensors": [], "curves": [], "rest": None, "from_zero": True}
        self.spec |= {"limit": None, "mark": None}  # positions of a horizontal and a vertical line

    def add_lanes(self, lanes: Mapping[str, Sequence[Box]]) -> None:
        self.spec["lanes"] = [(name, list(map(self._box, self._visible(boxes)))) for name, boxes in lanes.items()]

    def tensor(self, each: Tensor) -> list[object]:
        times = [round(at, self._digits) for at in each.resident]
        return [self._kind(each.kind), self._name(each.name), each.nbytes, each.id, *times]

    def curve(self, each: Series) -> dict[str, object]:
        """Return a curve. Of points that are too close to be distinguished, it has the largest and the last."""
        points: list[tuple[float, float]] = []
        column, largest = -1, 0
        for at, count in each.points:
            here = int(at / self._end * _RESOLUTION) if self._end else 0
            if here != column:
                column, largest = here, len(points)
            elif count >= points[largest][1]:
                del points[largest:]
            else:
                del points[largest + 1 :]
            points.append((at, count))
        x, y = [round(at, self._digits) for at, _ in points], [count for _, count in points]
        return {"name": each.name, "color": each.color, "x": x, "y": y}

    def json(self) -> str:
        text = json.dumps({**self.spec, "names": [*self._names], "kinds": [*self._kinds]}, separators=(",", ":"))
        return text.replace("<", "\\u003c")  # so that no name ends the script element

    def _box(self, box: Box) -> list[object]:
        start, end = round(box.start, self._digits), round(box.end, self._digits)
        return [self._kind(box.kind), self._name(box.name), start, end, box.nbytes, box.tensor]

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _kind(self, kind: Kind) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))

    def _visible(self, boxes: Sequence[Box]) -> list[Box]:
        """Join boxes of one kind that are too narrow and too close to be distinguished."""
        least = self._end / _RESOLUTION
        found: list[Box] = []
        counts: list[int] = []
        for box in boxes:
            last = found[-1] if found else None
            is_near = last is not None and last.kind == box.kind and box.start - last.end < least
            if last is not None and is_near and box.end - box.start < least and last.end - last.start < least:
                joined = last._replace(end=max(last.end, box.end), nbytes=last.nbytes + box.nbytes, tensor=-1)
                found[-1] = joined
                counts[-1] += 1
            else:
                found.append(box)
                counts.append(0)
        rows = zip(found, counts, strict=True)
        return [box._replace(name=f"{box.name} and {more} more") if more else box for box, more in rows]


def _figure(label: str, data: _Data, legend: str) -> str:
    script = f'<script type="application/json">{data.json()}</script>'
    about = f'class="chart" tabindex="0" role="group" aria-label="{escape(label)}"'
    return f"<figure {about}>{script}<figcaption>{legend}</figcaption></figure>"


def _legend(keys: Sequence[tuple[str, str]], *, tall: bool = False) -> str:
    items = "".join(f'<li><span class="key {kind}"></span>{escape(words)}</li>' for kind, words in keys)
    return f'<ul class="legend{" tall" if tall else ""}">{items}</ul>' if keys else ""
