"""What was moved, what was not and why.

Beside the data path: sessions count here, and people read it as a table or as a dictionary.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from offload.units import format_bytes, format_seconds

LATE_SECONDS = 1e-3


@dataclass
class Count:
    """So many tensors, of so many bytes in all."""

    tensors: int = 0
    nbytes: int = 0

    def minus(self, other: Count) -> Count:
        """What this counts beyond `other`."""
        return Count(self.tensors - other.tensors, self.nbytes - other.nbytes)

    def to_dict(self) -> dict[str, int]:
        """As plain numbers."""
        return {"tensors": self.tensors, "bytes": self.nbytes}


@dataclass(frozen=True)
class StepRecord:
    """One step that was measured, from the beginning of forward to the end of backward."""

    profiled: bool  # a signature's first step, which moves everything and waits for it
    predicted_seconds: float | None
    seconds: float
    paused_seconds: float  # of it: within the engine, waiting included

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return dict(vars(self))


STEP_RECORDS_MAX = 256


class Counts(defaultdict[str, Count]):
    """What a session's hooks met: by reason for what stayed, and what moved."""

    def __init__(self) -> None:
        super().__init__(Count)
        self.swapped = Count()
        self.duplicates = Count()
        self.prefetched = 0
        self.prefetches_without_memory = 0
        self.steps = 0
        self.profiled_steps = 0
        self.borrowed_steps = 0
        self.bare_steps = 0
        self.steps_measured: deque[StepRecord] = deque(maxlen=STEP_RECORDS_MAX)
        self._swapped_before = Count()
        self._kept_before: dict[str, Count] = {}

    def begin_round(self) -> None:
        """A forward pass begins: what follows is `in_round`."""
        self._swapped_before = replace(self.swapped)
        self._kept_before = {reason: replace(count) for reason, count in self.items()}

    def in_round(self) -> tuple[Count, dict[str, Count]]:
        """What has moved since the last forward pass began, and by reason what has stayed."""
        kept = {reason: count.minus(self._kept_before.get(reason, Count())) for reason, count in self.items()}
        return self.swapped.minus(self._swapped_before), kept


@dataclass
class Feed:
    """What a loader gave, and how long the step waited for it."""

    batches: int = 0
    late_batches: int = 0  # those the step waited for, `LATE_SECONDS` or more
    empty_batches: int = 0
    host_wait_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    copied_bytes: int = 0
    passes_without_batches: int = 0

    @property
    def wait_seconds(self) -> float:
        """In the loader, and on the device for a copy that had not arrived."""
        return self.host_wait_seconds + self.device_wait_seconds

    @classmethod
    def total(cls, feeds: Iterable[Feed]) -> Feed:
        """The sum of what several loaders counted."""
        result = cls()
        for feed in feeds:
            for about in fields(cls):
                setattr(result, about.name, getattr(result, about.name) + getattr(feed, about.name))
        return result

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers; seconds and bytes."""
        return {**asdict(self), "wait_seconds": self.wait_seconds}

    def notes(self) -> Iterator[str]:
        """What a user should hear of."""
        if self.empty_batches:
            yield (
                f"{self.empty_batches} of {self.batches} batches had no rows: the device had nothing to compute; "
                "give a batch size of at least one row for each device"
            )
        if self.passes_without_batches:
            yield (
                "a pass over the data gave no batch at all: with drop_last, the batch size must not exceed the rows "
                "that this process gets"
            )


@dataclass(frozen=True)
class Report:
    """What a session has done so far.

    `to_dict` is for machines, `str` for people. Byte counts add up over all steps, peaks are the highest moment of any.
    """

    steps: int
    device: str
    tier: str
    allocator: str
    swapped: Count
    kept: dict[str, Count]
    deduplicated: Count
    peak_saved_bytes: int
    peak_saved_bytes_unswapped: int
    store: dict[str, float]
    misses: int
    prefetched: int
    profiled_steps: int = 0
    borrowed_steps: int = 0
    bare_steps: int = 0
    predicted_step_seconds: float | None = None
    measured_step_seconds: float | None = None
    planned_peak_bytes: int | None = None
    steps_measured: tuple[StepRecord, ...] = ()
    notes: tuple[str, ...] = field(default=())
    feed: Feed = field(default_factory=Feed)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and strings; seconds, bytes, bytes per second."""
        store = self.store
        return {
            "steps": self.steps,
            "device": self.device,
            "tier": self.tier,
            "allocator": self.allocator,
            "swapped": self.swapped.to_dict(),
            "kept": {reason: count.to_dict() for reason, count in self.kept.items()},
            "deduplicated": self.deduplicated.to_dict(),
            "peak_saved_bytes": self.peak_saved_bytes,
            "peak_saved_bytes_unswapped": self.peak_saved_bytes_unswapped,
            "copy_out": _direction(store, "out"),
            "copy_in": _direction(store, "in"),
            "stall_seconds": store["stall_seconds"],
            "misses": self.misses,
            "prefetched": self.prefetched,
            "cancelled": store["cancelled"],
            "failed": store["failed"],
            "spilled_bytes": store["spilled_bytes"],
            "spill_file_bytes": store["spill_file_bytes"],
            "host_bytes_held": store["pool_held_bytes"],
            "host_bytes_wasted": store["pool_used_bytes"] - store["pool_requested_bytes"],
            "feed": self.feed.to_dict(),
            "profiled_steps": self.profiled_steps,
            "borrowed_steps": self.borrowed_steps,
            "bare_steps": self.bare_steps,
            "predicted_step_seconds": self.predicted_step_seconds,
            "measured_step_seconds": self.measured_step_seconds,
            "planned_peak_bytes": self.planned_peak_bytes,
            "steps_measured": [record.to_dict() for record in self.steps_measured],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        about = self.to_dict()
        rows = [
            ("steps", f"{self.steps} on {self.device}, {self.tier}"),
            ("swapped", _words(self.swapped)),
            *[(f"kept: {reason}", _words(count)) for reason, count in sorted(self.kept.items())],
            ("saved twice, copied once", _words(self.deduplicated)),
            (
                "peak of what could move",
                f"{format_bytes(self.peak_saved_bytes)} instead of {format_bytes(self.peak_saved_bytes_unswapped)}",
            ),
            *self._promise(),
            ("copy-out", _rate(about["copy_out"])),
            ("copy-in", _rate(about["copy_in"])),
            ("stalled", f"{self.store['stall_seconds']:.3f} s in all"),
            ("asked back", f"{self.prefetched} ahead of need, {self.misses} on demand"),
            ("taken back before leaving", f"{about['cancelled']}"),
            ("spill file", format_bytes(about["spill_file_bytes"])),
            ("host memory held", format_bytes(about["host_bytes_held"])),
            ("allocator", self.allocator),
        ]
        if self.feed.batches:
            waited = f"{self.feed.wait_seconds:.3f} s in all"
            late = f"{self.feed.late_batches} of {self.feed.batches} batches {LATE_SECONDS * 1e3:.0f} ms or more"
            rows.append(("waited for data", f"{waited}; {late}"))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _promise(self) -> list[tuple[str, str]]:
        if self.predicted_step_seconds is None or self.planned_peak_bytes is None:
            return []
        measured = "not measured yet"
        if self.measured_step_seconds is not None:
            measured = f"{format_seconds(self.measured_step_seconds)} measured"
        return [
            ("forward and backward", f"{format_seconds(self.predicted_step_seconds)} predicted, {measured}"),
            ("peak planned", format_bytes(self.planned_peak_bytes)),
            ("steps profiled", f"{self.profiled_steps}; on the plan of a larger shape: {self.borrowed_steps}"),
        ]


def _direction(store: dict[str, float], name: str) -> dict[str, float]:
    nbytes, seconds = store[f"{name}_bytes"], store[f"{name}_seconds"]
    return {
        "bytes": nbytes,
        "seconds": seconds,
        "copies": store[f"{name}_copies"],
        "bytes_per_second": nbytes / seconds if seconds > 0 else 0.0,
    }


def _words(count: Count) -> str:
    return f"{count.tensors} tensors, {format_bytes(count.nbytes)}" if count.tensors else "none"


def _rate(direction: dict[str, float]) -> str:
    if not direction["bytes"]:
        return "none"
    rate = format_bytes(round(direction["bytes_per_second"]))
    return f"{format_bytes(round(direction['bytes']))} at {rate}/s"
