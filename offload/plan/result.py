"""The plan: what swaps, when, what it costs, and how close to the best possible that is.

Place on the data path: what the planner hands to the engine, to the report and to people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from offload.plan.bounds import cut_bound
from offload.plan.simulate import Link, Swap, Timing, simulate, unswapped_bytes
from offload.plan.trace import SavedTensor, Trace
from offload.units import format_bytes, format_seconds

__all__ = ["Plan", "make_plan"]

_GIVEN_BACK = "nothing is worth swapping"


@dataclass(frozen=True)
class Plan:
    """A swap-only plan with its certificate.

    Parameters
    ----------
    swaps : tuple of Swap
        What swaps, by id; empty where the plan does nothing.
    step_seconds : float
        Step time, in seconds.
    compute_seconds : float
        Step time without swaps, in seconds.
    bound_seconds : float
        What no swap-only plan within the limit can beat, in seconds.
    gap : float
        ``step_seconds / bound_seconds - 1``.
    peak_bytes, unswapped_peak_bytes : int
        Largest number of bytes resident during a node, with the plan and without.
    host_bytes : int
        Largest number of bytes held below device memory, counted from a tensor's packing to its first use.
    limit_bytes : int
        Limit that the bound is about: the one that was asked for, else the plan's own peak.
    trace : Trace
        The step that was planned.
    link : Link
        The link that was assumed.
    """

    swaps: tuple[Swap, ...]
    step_seconds: float
    compute_seconds: float
    bound_seconds: float
    gap: float
    peak_bytes: int
    unswapped_peak_bytes: int
    host_bytes: int
    limit_bytes: int
    trace: Trace = field(repr=False)
    link: Link = field(repr=False)

    @cached_property
    def timing(self) -> Timing:
        """When everything happens, as predicted."""
        return simulate(self.trace, self.swaps, self.link)

    @cached_property
    def overhead_seconds(self) -> float:
        """By how much the swaps slow the computation around them, in seconds, as the link has it."""
        size = {tensor.id: tensor.bytes for tensor in self.trace.tensors}
        return sum(self.link.overhead_seconds(size[swap.id]) for swap in self.swaps)

    @property
    def expected_seconds(self) -> float:
        """What a step is expected to take: its step time and what swapping slows down, in seconds."""
        return self.step_seconds + self.overhead_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the plan's JSON form, as ``offload plan --json`` prints it."""
        return {
            "step_seconds": self.step_seconds,
            "compute_seconds": self.compute_seconds,
            "bound_seconds": self.bound_seconds,
            "gap": self.gap,
            "peak_bytes": self.peak_bytes,
            "unswapped_peak_bytes": self.unswapped_peak_bytes,
            "swaps": [swap._asdict() for swap in self.swaps],
            "recomputes": [],
        }

    def summary(self) -> str:
        """Return the certificate in words, two lines."""
        stalls = self.step_seconds - self.compute_seconds
        slowed = f", slowed by swaps {format_seconds(self.overhead_seconds)}" if self.overhead_seconds else ""
        return (
            f"step {format_seconds(self.expected_seconds)}: compute {format_seconds(self.compute_seconds)}, waiting "
            f"{format_seconds(stalls)}{slowed}; no swap-only plan within {format_bytes(self.limit_bytes)} takes less "
            f"than {format_seconds(self.bound_seconds)} (gap {self.gap:.3%})\n"
            f"peak {format_bytes(self.peak_bytes)} instead of {format_bytes(self.unswapped_peak_bytes)}; "
            f"{len(self.swaps)} of {len(self.trace.tensors)} tensors swap, up to {format_bytes(self.host_bytes)}"
        )

    def explain(self) -> str:
        """Return what was chosen and why, in words: the certificate, then tensor by tensor in the order of leaving.

        Returns
        -------
        str
            Lines of text. Where the plan does nothing it says so.
        """
        lines = [self.summary()]
        if not self.swaps:
            reason = "every tensor stays in device memory"
            if self.unswapped_peak_bytes <= self.limit_bytes:
                reason = f"the step fits as it is: {format_bytes(self.unswapped_peak_bytes)} at its peak"
            lines.append(f"{_GIVEN_BACK}: {reason}")
        tensors = {tensor.id: tensor for tensor in self.trace.tensors}
        late = self.late_seconds()
        for swap in sorted(self.swaps, key=lambda swap: (tensors[swap.id].packed, swap.id)):
            lines.append(self._sentence(tensors[swap.id], swap, *late[swap.id]))
        return "\n".join(lines)

    def _sentence(self, tensor: SavedTensor, swap: Swap, late_out: float, late_in: float) -> str:
        nodes = self.trace.nodes
        lead = tensor.first_backward - swap.prefetch
        waits = []
        if late_out > 0:
            waits.append(f"{format_seconds(late_out)} for it to leave")
        if late_in > 0:
            waits.append(f"{format_seconds(late_in)} for it to return")
        return (
            f"{nodes[tensor.produced].name} (tensor {tensor.id}), {format_bytes(tensor.bytes)}: leaves at node "
            f"{swap.release} ({nodes[swap.release].name}), returns at node {swap.prefetch} "
            f"({nodes[swap.prefetch].name}), {lead} {'node' if lead == 1 else 'nodes'} before its use at node "
            f"{tensor.first_backward}; " + (f"compute waits {' and '.join(waits)}" if waits else "hidden")
        )

    def late_seconds(self) -> dict[int, tuple[float, float]]:
        """Return by tensor id by how many seconds its copy-out and its copy-in are late; zeros where hidden."""
        timing = self.timing
        first_backward = {tensor.id: tensor.first_backward for tensor in self.trace.tensors}
        out_end = {copy.id: copy.end for copy in timing.copy_outs}
        in_end = {copy.id: copy.end for copy in timing.copy_ins}
        late = {}
        for swap in self.swaps:
            before = timing.finish[swap.release - 1] if swap.release else 0.0
            late_in = in_end[swap.id] - timing.ready[first_backward[swap.id]]
            late[swap.id] = (max(0.0, out_end[swap.id] - before), max(0.0, late_in))
        return late


def make_plan(
    trace: Trace,
    link: Link,
    swaps: Sequence[Swap],
    limit_bytes: int | None = None,
    *,
    bound_seconds: float | None = None,
) -> Plan:
    """Return the plan that `swaps` make, timed and certified.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    swaps : sequence of Swap
        What swaps.
    limit_bytes : int, optional
        Limit that the bound is about; the plan's own peak if not given.
    bound_seconds : float, optional
        `cut_bound` at that limit, where it is known already.

    Returns
    -------
    Plan
        Its step time by `simulate`, its bound by `cut_bound`.
    """
    timing = simulate(trace, swaps, link)
    limit_bytes = timing.peak_bytes if limit_bytes is None else limit_bytes
    # The bound is sums taken in another order: it may exceed the step time that it bounds by rounding, no more.
    bound = cut_bound(trace, limit_bytes, link) if bound_seconds is None else bound_seconds
    bound = min(bound, timing.step_seconds)
    return Plan(
        swaps=tuple(sorted(swaps)),
        step_seconds=timing.step_seconds,
        compute_seconds=list(accumulate((node.seconds for node in trace.nodes), initial=0.0))[-1],
        bound_seconds=bound,
        gap=timing.step_seconds / bound - 1 if bound else 0.0,
        peak_bytes=timing.peak_bytes,
        unswapped_peak_bytes=max(unswapped_bytes(trace), default=0),
        host_bytes=_host_bytes(trace, swaps),
        limit_bytes=limit_bytes,
        trace=trace,
        link=link,
    )


def _host_bytes(trace: Trace, swaps: Sequence[Swap]) -> int:
    change = [0] * (len(trace.nodes) + 1)
    tensors = {tensor.id: tensor for tensor in trace.tensors}
    for swap in swaps:
        tensor = tensors[swap.id]
        change[tensor.packed] += tensor.bytes
        change[tensor.first_backward + 1] -= tensor.bytes
    return max(accumulate(change), default=0)
