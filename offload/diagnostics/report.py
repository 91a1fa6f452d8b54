"""The report: which tensors were swapped, which were kept and why, as a table or as a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from offload.diagnostics.html import inline
from offload.diagnostics.html import report as report_page
from offload.diagnostics.verdict import Verdict
from offload.optimizer_state.counts import GradientCounts, StateCounts
from offload.optimizer_state.in_backward import BackwardCounts
from offload.parameters.mover import ParameterCounts
from offload.plan import Plan
from offload.runtime.counters import Count, StepRecord
from offload.units import format_bandwidth, format_bytes, format_seconds

LATE_SECONDS = 1e-3
RATED_BYTES = 600 * 10**12  # usual endurance rating of a 1 TB drive; programs cannot read a drive's own rating


@dataclass
class Feed:
    """Counters of a `contrib.Prefetcher`: the batches that it returned, and how long steps waited for them."""

    batches: int = 0
    late_batches: int = 0  # batches for which a step waited `LATE_SECONDS` or more
    empty_batches: int = 0
    host_wait_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    copied_bytes: int = 0
    passes_without_batches: int = 0

    @property
    def wait_seconds(self) -> float:
        """Time spent in the loader, and waiting on the device for copies that had not ended."""
        return self.host_wait_seconds + self.device_wait_seconds

    @classmethod
    def total(cls, feeds: Iterable[Feed]) -> Feed:
        """Return the sum of the counters of several loaders."""
        result = cls()
        for feed in feeds:
            for about in fields(cls):
                setattr(result, about.name, getattr(result, about.name) + getattr(feed, about.name))
        return result

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as numbers, in seconds and bytes."""
        return {**asdict(self), "wait_seconds": self.wait_seconds}

    def notes(self) -> Iterator[str]:
        """Yield notes for the user."""
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
class DiskWrites:
    """Bytes written to disk so far, and what they mean for a drive.

    Attributes
    ----------
    nbytes : int
        Bytes of saved tensors, optimizer state and parameters that were written.
    steps : int
        Forward passes since `enable`.
    seconds : float
        Seconds since `enable`.
    """

    nbytes: int
    steps: int
    seconds: float

    @property
    def days_to_rating(self) -> float | None:
        """Number of days after which `RATED_BYTES` are written at this rate; None if nothing is written."""
        return RATED_BYTES * self.seconds / self.nbytes / 86400 if self.nbytes else None

    def to_dict(self) -> dict[str, Any]:
        """Return bytes, bytes per step, and the number of days after which `RATED_BYTES` are written."""
        per_step = self.nbytes / max(self.steps, 1)
        return {"bytes": self.nbytes, "bytes_per_step": per_step, "days_to_600_tb": self.days_to_rating}

    def __str__(self) -> str:
        per_step = format_bytes(round(self.nbytes / max(self.steps, 1)))
        days = self.days_to_rating or 0.0
        rating = "600 TB (a usual endurance rating of a 1 TB drive)"
        return f"{per_step} per step; at this rate {rating} are written in {days:,.0f} days"


@dataclass(frozen=True)
class Report:
    """What offload did in a session so far. `str` returns a table, `to_dict` a dictionary; a notebook shows a page.

    The verdict describes planned steps only. The other figures cover all steps since `enable`, with profiled steps.

    Attributes
    ----------
    verdict : Verdict
        Memory and time of a planned step, and the same without offload.
    steps : int
        Forward passes in training mode.
    device : str
        Device of the model, such as ``"cuda:0"``.
    tier : str
        The memory or file to which tensors are swapped.
    allocator : str
        CPU: the malloc of the process and its effect. CUDA: torch's allocator.
    swapped : Count
        Storages swapped out, and their bytes.
    kept : dict of str to Count
        Saved tensors that stayed on the device, and their bytes, by reason.
    deduplicated : Count
        Saved tensors whose storage was already swapped, and their bytes.
    store : dict of str to float
        Counters of the swap store: bytes, seconds, numbers of copies.
    misses : int
        Storages that were not prefetched but loaded on demand, in all steps. A profiled step loads all on demand.
    prefetched : int
        Storages whose copy-in was started before backward needed them.
    loaded_late : int
        In steps that follow a schedule: storages that backward needed before their copy-in was started.
    prefetched_late : int
        In measured steps: prefetched storages for which backward had to wait.
    unmeasured_steps : int
        Steps that followed a schedule and were not measured. The first steps of a plan are measured. Later, on a CUDA
        device none is, on the CPU one in 16, and with `n_tensors` one in 64.
    profiled_steps : int
        Profiled steps, which are slow: the first one of each shape, and those that are profiled again because they
        may need more memory.
    trial_steps : int
        Trial steps of recomputation, which are slow: at most one for each profile of a shape.
    reference_steps : int
        Steps that show how long a step takes without swapping: every tensor is kept, or computation waits while a copy
        runs, which is slow.
    recomputed : Count
        Storages that were dropped and recomputed in backward, and their bytes.
    recompute_seconds : float
        Time of the recomputation, in seconds.
    regions : tuple of str
        Compiled submodules that run again in backward, by torch's checkpoint, so that their tensors are not saved.
    borrowed_steps : int
        Steps that followed the plan of a larger shape.
    bare_steps : int
        Steps without hooks, because the plan swaps nothing.
    settled_steps : int
        Steps that followed the plan that a search has ended with. Includes steps without hooks, excludes reference
        steps.
    steps_measured : tuple of StepRecord
        The last measured steps, including profiled ones, oldest first.
    notes : tuple of str
        Notes for the user.
    feed : Feed
        Counters of all `offload.contrib.Prefetcher` objects.
    plan : Plan or None
        The plan of the steps that the verdict describes, if there is one. Not included in `to_dict`.
    optimizer_state : tuple of StateCounts
        For each optimizer: counters of its state that was moved; empty if no optimizer state may be moved.
    step_in_backward : tuple of BackwardCounts
        For each optimizer: counters of its updates in backward; empty without `step_in_backward=True`.
    gradients : tuple of GradientCounts
        For each optimizer: counters of the gradients that were moved; empty without `gradients=True`.
    moved_parameters : ParameterCounts or None
        Counters of parameters that were moved; None without `parameters`.
    disk : DiskWrites
        Bytes that steps write to disk.
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
    trial_steps: int = 0
    reference_steps: int = 0
    recomputed: Count = field(default_factory=Count)
    recompute_seconds: float = 0.0
    regions: tuple[str, ...] = ()
    borrowed_steps: int = 0
    bare_steps: int = 0
    settled_steps: int = 0
    steps_measured: tuple[StepRecord, ...] = ()
    notes: tuple[str, ...] = field(default=())
    feed: Feed = field(default_factory=Feed)
    plan: Plan | None = field(default=None, repr=False)
    optimizer_state: tuple[StateCounts, ...] = ()
    step_in_backward: tuple[BackwardCounts, ...] = ()
    gradients: tuple[GradientCounts, ...] = ()
    moved_parameters: ParameterCounts | None = None
    disk: DiskWrites = field(default_factory=lambda: DiskWrites(0, 0, 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings, in seconds, bytes, and bytes per second."""
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
            "trial_steps": self.trial_steps,
            "reference_steps": self.reference_steps,
            "recomputed": {**self.recomputed.to_dict(), "seconds": self.recompute_seconds},
            "regions": list(self.regions),
            "borrowed_steps": self.borrowed_steps,
            "bare_steps": self.bare_steps,
            "settled_steps": self.settled_steps,
            "steps_measured": [record.to_dict() for record in self.steps_measured],
            "optimizer_state": [counts.to_dict() for counts in self.optimizer_state],
            "step_in_backward": [counts.to_dict() for counts in self.step_in_backward],
            "gradients": [counts.to_dict() for counts in self.gradients],
            "moved_parameters": self.moved_parameters.to_dict() if self.moved_parameters is not None else None,
            "disk_writes": self.disk.to_dict(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([str(self.verdict), "", *lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the verdict with bars, folded details, a memory curve. It loads no files."""
        page = report_page.render(self.verdict, self.rows(), self.notes)
        return page if self.plan is None else f"<div>{page}\n{inline.curve(self.plan, self.verdict)}</div>"

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table below the verdict, as names and texts."""
        about = self.to_dict()
        in_time = f"{self.prefetched - self.prefetched_late}" + (" as far as measured" if self.unmeasured_steps else "")
        rows = [
            *self._measured(),
            ("steps", f"{self.steps} on {self.device}, {self.tier}"),
            *self._profiled(),
            ("swapped", _words(self.swapped)),
            *self._recomputed(),
            *[(f"kept: {reason}", _words(count)) for reason, count in sorted(self.kept.items())],
            ("saved twice, copied once", _words(self.deduplicated)),
            ("copy-out", _rate(about["copy_out"])),
            ("copy-in", _rate(about["copy_in"])),
            *self._planned_link(),
            ("stalled", f"{self.store['stall_seconds']:.3f} s in all"),
            ("prefetched in time", f"{in_time}; loaded late: {self.loaded_late + self.prefetched_late}"),
            ("swaps cancelled", f"{about['cancelled']}" + (": needed again too soon" if about["cancelled"] else "")),
            *[("optimizer state", str(counts)) for counts in self.optimizer_state],
            *[("gradients", str(counts)) for counts in (*self.step_in_backward, *self.gradients)],
            *([("parameters", str(self.moved_parameters))] if self.moved_parameters is not None else []),
            *([("disk writes", str(self.disk))] if self.disk.nbytes else []),
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
        """Yield rows that say how the figures of the verdict were measured."""
        count = self.verdict.steps_measured
        if count:
            of = "step" if self.verdict.kind == "by hand" else "planned step"
            which = f"one {of}" if count == 1 else f"median of {count} {of}s"
            yield "time measured", f"{which}: forward and backward, without the optimizer"
            references = self.verdict.reference_steps
            known = f"computation of {references} reference steps, which no copy slows"
            estimated = "estimated: the computation of these steps, without copies and waits"
            yield "time without offload", known if references else estimated

    def _planned_link(self) -> Iterator[tuple[str, str]]:
        """If the plan swaps, yield a row with the copy speeds that it assumes."""
        if self.plan is not None and self.plan.swaps:
            link = self.plan.link
            rates = f"{format_bandwidth(link.out_bandwidth)} out, {format_bandwidth(link.in_bandwidth)} in"
            yield "planned with", f"{rates} (a quarter of the measurements was slower); {self.plan.slow_link()}"

    def _recomputed(self) -> Iterator[tuple[str, str]]:
        if self.recomputed.tensors:
            yield "recomputed", f"{_words(self.recomputed)} in {format_seconds(self.recompute_seconds)}"
        if self.regions:
            yield "compiled parts run again", ", ".join(self.regions)

    def _profiled(self) -> Iterator[tuple[str, str]]:
        if self.profiled_steps or self.borrowed_steps:
            tried = f"trial steps of recomputation: {self.trial_steps}; " if self.trial_steps else ""
            tried += f"reference steps: {self.reference_steps}; " if self.reference_steps else ""
            reused = f"steps that reuse a larger shape's plan: {self.borrowed_steps}"
            yield "slow profiling steps", f"{self.profiled_steps}; {tried}{reused}"


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
