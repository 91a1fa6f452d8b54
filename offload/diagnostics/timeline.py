"""One recorded step as spans on lanes and memory over time, and its conversion for Perfetto.

`step_recording` creates it, `html.timeline` draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.units import format_bytes, format_seconds

__all__ = ["LANES", "MemorySample", "RecordedTensor", "Span", "StepTimeline", "merged", "without"]

LANES = ("compute", "recompute", "waiting", "copy out", "copy in", "disk")


class Span(NamedTuple):
    """A span of time on a lane: its kind, name, start, end, bytes, and the ticket of a copy (else -1).

    `kind` is ``"forward"``, ``"backward"``, ``"optimizer"``, ``"recompute"``, ``"wait"``, ``"out"``, ``"in"``,
    ``"spill"`` or ``"fill"``; times are seconds from the start of the recording.
    """

    lane: str
    kind: str
    name: str
    start: float
    end: float
    nbytes: int = 0
    ticket: int = -1


class RecordedTensor(NamedTuple):
    """A saved storage: the module that saved it, its kind, bytes and ticket (-1: none), and its times in memory.

    `kind` is ``"kept"``, ``"swapped"``, ``"recomputed"`` or ``"cancelled"`` (a swap that did not happen); `resident`
    has start and end of each time in device memory, in seconds from the start of the recording.
    """

    name: str
    kind: str
    nbytes: int
    ticket: int
    resident: tuple[float, ...]


class MemorySample(NamedTuple):
    """Bytes at one moment: in use on the device; activations on it that can be swapped; the same without offload."""

    at: float
    in_use: int
    resident: int
    unswapped: int


@dataclass(frozen=True)
class StepTimeline:
    """The record of one training step.

    Parameters
    ----------
    device, tier : str
        The device, and the tier below it.
    memory_label : str
        Meaning of `in_use` of the samples.
    seconds : float
        Length of the recording.
    spans : tuple of Span
        Spans of all lanes; those of one lane in order.
    memory : tuple of MemorySample
        Samples in order of time.
    tensors : tuple of RecordedTensor
        The tensors that the step saved, in the order of their packs, without parameters and buffers.

    Examples
    --------
    >>> step = StepTimeline("cpu", "disk", "resident set", 1.0, (Span("copy out", "out", "fc", 0.1, 0.3, 200),), ())
    >>> step.busy_seconds("copy out"), step.moved_bytes("out")
    (0.2, 200)
    """

    device: str
    tier: str
    memory_label: str
    seconds: float
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...]
    tensors: tuple[RecordedTensor, ...] = ()

    def on(self, lane: str) -> list[Span]:
        """Return the spans of a lane."""
        return [span for span in self.spans if span.lane == lane]

    def busy_seconds(self, lane: str) -> float:
        """Return the total time in which a lane was busy."""
        total, until = 0.0, 0.0
        for span in sorted(self.on(lane), key=lambda each: each.start):
            total += max(span.end - max(span.start, until), 0.0)
            until = max(until, span.end)
        return round(total, 12)

    def moved_bytes(self, kind: str) -> int:
        """Return the bytes of all spans of a kind."""
        return sum(span.nbytes for span in self.spans if span.kind == kind)

    def summary(self) -> list[str]:
        """Return sentences that summarize the step."""
        waited = self.busy_seconds("waiting")
        share = waited / self.seconds if self.seconds else 0.0
        lines = [f"{format_seconds(self.seconds)} on {self.device}; swaps go to {self.tier}."]
        lines.append(f"Compute waited {format_seconds(waited)} for copies ({share:.1%}).")
        recomputed = self.busy_seconds("recompute")
        if recomputed:
            again = format_bytes(self.moved_bytes("recompute"))
            lines.append(f"Recomputed: {again} in {format_seconds(recomputed)}.")
        for lane, kind, words in (("copy out", "out", "Swapped out"), ("copy in", "in", "Swapped in")):
            busy = self.busy_seconds(lane)
            if busy:
                moved = self.moved_bytes(kind)
                lines.append(f"{words}: {format_bytes(moved)} in {format_seconds(busy)}, {_rate(moved, busy)}.")
        if self.memory:
            most = max(sample.resident for sample in self.memory)
            unswapped = max(sample.unswapped for sample in self.memory)
            peaks = f"{format_bytes(most)} at peak, {format_bytes(unswapped)} without offload"
            lines.append(f"Swapped activations in memory: {peaks}.")
        return lines

    def to_chrome(self) -> dict[str, Any]:
        """Return the step as trace events, for ui.perfetto.dev and chrome://tracing."""
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"offload, {self.device}"}}
        ]
        for number, lane in enumerate(LANES):
            events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": lane}})
            events.append(
                {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": number, "args": {"sort_index": number}}
            )
        for span in self.spans:
            about = {
                "name": span.name or span.kind,
                "cat": span.kind,
                "ph": "X",
                "pid": 1,
                "tid": LANES.index(span.lane),
            }
            times = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
            events.append({**about, **times, "args": {"bytes": span.nbytes} if span.nbytes else {}})
        for sample in self.memory:
            values = {self.memory_label: sample.in_use}
            events.append({"name": "memory", "ph": "C", "pid": 1, "ts": sample.at * 1e6, "args": values})
            saved = {"with offload": sample.resident, "without offload": sample.unswapped}
            events.append(
                {"name": "swapped activations in memory", "ph": "C", "pid": 1, "ts": sample.at * 1e6, "args": saved}
            )
        return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"tier": self.tier}}


def _rate(nbytes: int, seconds: float) -> str:
    return f"{format_bytes(nbytes / seconds)}/s"


def merged(spans: Sequence[Span], gap_seconds: float = 0.0) -> list[Span]:
    """Join adjacent spans of one lane that have the same kind and name and are at most `gap_seconds` apart."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.kind, last.name) == (span.kind, span.name)
            and span.start - last.end <= gap_seconds
        ):
            joined[-1] = last._replace(end=max(span.end, last.end), nbytes=last.nbytes + span.nbytes)
        else:
            joined.append(span)
    return joined


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Return the parts of `spans` outside `holes`. Both must be sorted and free of overlaps."""
    left: list[Span] = []
    first = 0
    for span in spans:
        start = span.start
        while first < len(holes) and holes[first].end <= span.start:
            first += 1
        for hole in holes[first:]:
            if hole.start >= span.end:
                break
            if hole.start > start:
                left.append(span._replace(start=start, end=hole.start))
            start = max(start, hole.end)
        if start < span.end:
            left.append(span._replace(start=start))
    return left
