"""What was moved, what was not and why.

Beside the data path: sessions count here, and people read it as a table or as a dictionary.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from offload import report_page
from offload.units import format_bytes
from offload.verdict import Verdict

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
        self.prefetched_late = 0
        self.unmeasured_steps = 0
        self.loaded_late = 0
        self._follows = False
        self._misses_before = 0
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

    def attribute_misses(self, misses: int, follows: bool | None = None) -> None:
        """Of all `misses` so far, those since the last call were late if the round follows a schedule.

        `follows` tells it of the round that now begins; None: the same round goes on.
        """
        if self._follows:
            self.loaded_late += misses - self._misses_before
        self._misses_before = misses
        self._follows = self._follows if follows is None else follows

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
    """What a session has done so far: `str` for people, in a notebook as a page, `to_dict` for machines.

    It begins with a verdict on planned steps. What follows counts over all steps since `enable`, the profiled ones too.

    Attributes
    ----------
    verdict : Verdict
        What a planned step needs and takes, and without offload.
    steps : int
        Forward passes in training mode.
    device : str
        Where the model is, such as ``"cuda:0"``.
    tier : str
        Where swapped tensors go.
    allocator : str
        Which malloc serves the process and what that means (CPU); torch's own (CUDA).
    swapped : Count
        Storages swapped out, and their bytes.
    kept : dict of str to Count
        Saved tensors that stayed, by reason, and their bytes.
    deduplicated : Count
        Saved tensors whose storage was being swapped already, and their bytes.
    store : dict of str to float
        The swap store's own counters: bytes, seconds, numbers of copies.
    misses : int
        Storages that were loaded when backward asked for them, in all steps; in a profiled step all are.
    prefetched : int
        Storages that began to come back ahead of need.
    loaded_late : int
        Of scheduled steps: storages that backward asked for before they had begun to come back.
    prefetched_late : int
        Of measured steps: prefetched storages that backward had to wait for.
    unmeasured_steps : int
        Scheduled steps that were not measured: on a CUDA device and by hand all but the first few.
    profiled_steps : int
        Steps that were profiled, which is slow: the first one of each shape.
    borrowed_steps : int
        Steps that followed the plan of a larger shape.
    bare_steps : int
        Steps without hooks, because the plan swaps nothing.
    steps_measured : tuple of StepRecord
        The last measured steps, the profiled ones too, oldest first.
    notes : tuple of str
        What a user should know.
    feed : Feed
        What `offload.Prefetcher` gave.
    """

    verdict: Verdict
    steps: int
    device: str
    tier: str
    allocator: str
    swapped: Count
    kept: dict[str, Count]
    deduplicated: Count
    store: dict[str, float]
    misses: int
    prefetched: int
    loaded_late: int = 0
    prefetched_late: int = 0
    unmeasured_steps: int = 0
    profiled_steps: int = 0
    borrowed_steps: int = 0
    bare_steps: int = 0
    steps_measured: tuple[StepRecord, ...] = ()
    notes: tuple[str, ...] = field(default=())
    feed: Feed = field(default_factory=Feed)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and strings; seconds, bytes, bytes per second."""
        store = self.store
        return {
            "verdict": self.verdict.to_dict(),
            "steps": self.steps,
            "device": self.device,
            "tier": self.tier,
            "allocator": self.allocator,
            "swapped": self.swapped.to_dict(),
            "kept": {reason: count.to_dict() for reason, count in self.kept.items()},
            "deduplicated": self.deduplicated.to_dict(),
            "copy_out": _direction(store, "out"),
            "copy_in": _direction(store, "in"),
            "stall_seconds": store["stall_seconds"],
            "misses": self.misses,
            "prefetched": self.prefetched,
            "loaded_late": self.loaded_late,
            "prefetched_late": self.prefetched_late,
            "unmeasured_steps": self.unmeasured_steps,
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
            "steps_measured": [record.to_dict() for record in self.steps_measured],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([str(self.verdict), "", *lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        """The same for a notebook: the verdict with bars, the details folded; it loads nothing."""
        return report_page.render(self.verdict, self.rows(), self.notes)

    def rows(self) -> list[tuple[str, str]]:
        """The details: name and words."""
        about = self.to_dict()
        in_time = f"{self.prefetched - self.prefetched_late}" + (" as far as measured" if self.unmeasured_steps else "")
        rows = [
            *self._measured(),
            ("steps", f"{self.steps} on {self.device}, {self.tier}"),
            *self._profiled(),
            ("swapped", _words(self.swapped)),
            *[(f"kept: {reason}", _words(count)) for reason, count in sorted(self.kept.items())],
            ("saved twice, copied once", _words(self.deduplicated)),
            ("copy-out", _rate(about["copy_out"])),
            ("copy-in", _rate(about["copy_in"])),
            ("stalled", f"{self.store['stall_seconds']:.3f} s in all"),
            ("prefetched in time", f"{in_time}; loaded late: {self.loaded_late + self.prefetched_late}"),
            ("swaps cancelled", f"{about['cancelled']}" + (": needed again too soon" if about["cancelled"] else "")),
            ("spill file", format_bytes(about["spill_file_bytes"])),
            ("host memory held", format_bytes(about["host_bytes_held"])),
            ("allocator", self.allocator),
        ]
        if self.feed.batches:
            waited = f"{self.feed.wait_seconds:.3f} s in all"
            late = f"{self.feed.late_batches} of {self.feed.batches} batches {LATE_SECONDS * 1e3:.0f} ms or more"
            rows.append(("waited for data", f"{waited}; {late}"))
        return rows

    def _measured(self) -> Iterator[tuple[str, str]]:
        """How the figures of the verdict are known."""
        count = self.verdict.steps_measured
        if count:
            of = "step" if self.verdict.kind == "by hand" else "planned step"
            which = f"one {of}" if count == 1 else f"median of {count} {of}s"
            yield "time measured", f"{which}: forward and backward, without the optimizer"
            yield "time without offload", "estimated: the computation of these steps, without copies and waits"

    def _profiled(self) -> Iterator[tuple[str, str]]:
        if self.profiled_steps or self.borrowed_steps:
            reused = f"steps that reuse a larger shape's plan: {self.borrowed_steps}"
            yield "slow profiling steps", f"{self.profiled_steps}; {reused}"


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
