"""The plan: the swaps, the predicted step time and memory, and a lower bound on the step time.

It is the planner's result. The executor follows it; the report and `offload plan` show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

from offload.plan.bounds import cut_bound
from offload.plan.joint_bounds import joint_bound
from offload.plan.recompute import Recomputation, recomputations, recomputed
from offload.plan.share import StateShare
from offload.plan.simulate import Link, Swap, Timing, simulate, unswapped_bytes
from offload.plan.trace import SavedTensor, Trace
from offload.units import format_bytes, format_seconds

__all__ = ["Plan", "make_plan"]

SLOW = 2.0
_NO_SWAPS = "nothing is swapped or recomputed"


@dataclass(frozen=True)
class Plan:
    """A plan, with a lower bound on the step time and the gap to it.

    Parameters
    ----------
    swaps : tuple of Swap
        The swaps, sorted by id; empty if every tensor stays in device memory.
    step_seconds : float
        Predicted step time by `simulate`, in seconds.
    compute_seconds : float
        Step time without swaps and recomputation, in seconds.
    bound_seconds : float
        Lower bound on the step time of every plan within `limit_bytes`, in seconds: `cut_bound` if `swap_only`, else
        `joint_bound`.
    gap : float
        ``step_seconds / bound_seconds - 1``.
    peak_bytes, unswapped_peak_bytes : int
        Largest number of bytes resident during any node, with the plan and without it.
    host_bytes : int
        Largest number of bytes in the tier below device memory. A tensor counts from the node that saves it to its
        first use in backward.
    limit_bytes : int
        Limit that the bound refers to: the given limit or, without one, the plan's own peak.
    trace : Trace
        The step.
    link : Link
        The link for which the plan was made.
    recomputes : tuple of Recomputation
        The tensors that are recomputed, sorted by id.
    swap_only : bool
        Whether recomputation was excluded, from the plan and from the bound.
    refusals : mapping of int to str
        For ids of tensors that cannot be recomputed, the reason if it is known.
    state : StateShare, optional
        The optimizer state that leaves memory between updates, if some can. The other figures are those of forward and
        backward with this share: state that is in memory is part of the base bytes.
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
    recomputes: tuple[Recomputation, ...] = ()
    swap_only: bool = True
    refusals: Mapping[int, str] = field(default_factory=dict, repr=False, compare=False)
    state: StateShare | None = None
    notebook_page: ClassVar[Callable[[Plan], str] | None] = None  # set by offload.diagnostics

    def _repr_html_(self) -> str | None:
        """Return HTML for a notebook. None if offload's diagnostics are not imported: the notebook shows the text."""
        render = type(self).notebook_page
        return render(self) if render is not None else None

    @cached_property
    def recomputed_trace(self) -> Trace:
        """The step with its recomputations, to which the swaps refer."""
        return recomputed(self.trace, (row.id for row in self.recomputes)) if self.recomputes else self.trace

    @cached_property
    def timing(self) -> Timing:
        """Predicted timing of the step, by `simulate`."""
        return simulate(self.recomputed_trace, self.swaps, self.link)

    @cached_property
    def recompute_seconds(self) -> float:
        """Time that the recomputations take, in seconds."""
        chosen = {row.id for row in self.recomputes}
        return sum(x.recompute.seconds for x in self.trace.tensors if x.recompute is not None and x.id in chosen)

    @cached_property
    def overhead_seconds(self) -> float:
        """Overhead of the swaps in seconds, computed from the link. `step_seconds` does not include it."""
        size = {tensor.id: tensor.copied_bytes for tensor in self.trace.tensors}
        return sum(self.link.overhead_seconds(size[swap.id]) for swap in self.swaps)

    @property
    def expected_seconds(self) -> float:
        """Step time with the overhead of the swaps, in seconds."""
        return self.step_seconds + self.overhead_seconds

    def seconds_if_copies_take(self, factor: float) -> float:
        """Return the step time of this plan if copies take `factor` times as long, with overhead, in seconds."""
        link = self.link
        slower = replace(
            link,
            out_bandwidth=link.out_bandwidth / factor,
            in_bandwidth=link.in_bandwidth / factor,
            latency=link.latency * factor,
        )
        return simulate(self.recomputed_trace, self.swaps, slower).step_seconds + self.overhead_seconds

    def slow_link(self) -> str:
        """Return what a step takes if every copy takes twice as long, as on a disk that other programs use."""
        seconds = self.seconds_if_copies_take(SLOW)
        change = seconds / self.expected_seconds - 1 if self.expected_seconds else 0.0
        return f"step {format_seconds(seconds)} if copies take twice as long ({100 * change:+.0f} %)"

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
            "recomputes": [row._asdict() for row in self.recomputes],
            **({"state": self.state.to_dict()} if self.state is not None else {}),
        }

    def summary(self) -> str:
        """Return step time, bound and peak as two lines of text, and a third one on optimizer state that can move."""
        # The durations were added in another order, so rounding leaves a difference far below a nanosecond.
        stalls = max(0.0, round(self.step_seconds - self.compute_seconds - self.recompute_seconds, 9))
        again = f"recomputing {format_seconds(self.recompute_seconds)}, " if self.recomputes else ""
        slowed = f", slowed by swaps {format_seconds(self.overhead_seconds)}" if self.overhead_seconds else ""
        size = {tensor.id: tensor.bytes for tensor in self.trace.tensors}
        dropped = sum(size[row.id] for row in self.recomputes)
        share = " with this share of optimizer state" if self.state is not None else ""
        made = f"; {len(self.recomputes)} are recomputed, {format_bytes(dropped)}" if self.recomputes else ""
        return (
            f"step {format_seconds(self.expected_seconds)}: compute {format_seconds(self.compute_seconds)}, {again}"
            f"waiting {format_seconds(stalls)}{slowed}; no "
            f"{'swap-only ' if self.swap_only else ''}plan within {format_bytes(self.limit_bytes)}{share} takes less "
            f"than {format_seconds(self.bound_seconds)} (gap {self.gap:.3%})\n"
            f"peak {format_bytes(self.peak_bytes)} instead of {format_bytes(self.unswapped_peak_bytes)}; "
            f"{len(self.swaps)} of {len(self.trace.tensors)} tensors swap, up to {format_bytes(self.host_bytes)}{made}"
            + (f"\n{self.state.summary()}" if self.state is not None else "")
        )

    def explain(self) -> str:
        """Return the summary, then lines on optimizer state that moves, then a line for each tensor.

        The line says when the tensor is copied, how it is recomputed, or why it is kept.

        If tensors are swapped, one line says what the step takes on a slower link.

        Returns
        -------
        str
            Lines of text: swaps in copy-out order, recomputations and kept tensors in the order of the step. If no
            tensor is swapped or recomputed, one line with the reason replaces the lines of the tensors.
        """
        lines = [self.summary(), *(self.state.explain() if self.state is not None else ())]
        if not self.swaps and not self.recomputes:
            # Without a limit, `limit_bytes` is the plan's own peak.
            fits = self.unswapped_peak_bytes < self.limit_bytes
            reason = "the step fits as it is" if fits else "every tensor stays in device memory"
            reason += f": {format_bytes(self.unswapped_peak_bytes)} at its peak"
            return "\n".join([*lines, f"{_NO_SWAPS}: {reason}"])
        if self.swaps:
            lines.append(self.slow_link())
        tensors = {tensor.id: tensor for tensor in self.recomputed_trace.tensors}
        originals = {tensor.id: tensor for tensor in self.trace.tensors}
        late = self.late_seconds()
        for swap in sorted(self.swaps, key=lambda swap: (tensors[swap.id].packed, swap.id)):
            sentence = self._sentence(tensors[swap.id], swap, *late[swap.id])
            lines.append(sentence + self._instead(originals[swap.id]))
        for row in sorted(self.recomputes, key=lambda x: x.at):
            lines.append(self._recompute_sentence(originals[row.id], row.at))
        moved = {swap.id for swap in self.swaps} | {row.id for row in self.recomputes}
        without = unswapped_bytes(self.trace)
        kept = sorted((x for x in self.trace.tensors if x.id not in moved), key=lambda x: (x.produced, x.id))
        return "\n".join([*lines, *(self._kept_sentence(tensor, without) for tensor in kept)])

    def _kept_sentence(self, tensor: SavedTensor, without: Sequence[int]) -> str:
        """Return the sentence that says why a tensor is kept. `without`: bytes resident at each node without swaps."""
        most = max(without[tensor.last_forward + 1 : tensor.first_backward], default=0)
        if tensor.first_backward == tensor.last_forward + 1:
            why = "since backward uses it directly after its last use in forward"
        elif most <= self.limit_bytes:
            why = f"since memory is within the limit while it is not in use (at most {format_bytes(most)})"
        else:
            why = "since swapping or recomputing others is enough"
        return f"{self._name(tensor)}: kept {why}{self._instead(tensor)}"

    def _instead(self, tensor: SavedTensor) -> str:
        """Return how long recomputing a tensor would take, or why it cannot be recomputed."""
        if tensor.id in self.refusals:
            return f"; cannot be recomputed: {self.refusals[tensor.id]}"
        recipe = tensor.recompute
        return f"; recomputing it would take {format_seconds(recipe.seconds)}" if recipe is not None else ""

    def _name(self, tensor: SavedTensor) -> str:
        return f"{self.trace.nodes[tensor.produced].name} (tensor {tensor.id}), {format_bytes(tensor.bytes)}"

    def _recompute_sentence(self, tensor: SavedTensor, at: int) -> str:
        nodes = self.trace.nodes
        recipe = tensor.recompute
        assert recipe is not None
        sources = ", ".join(str(i) for i in recipe.inputs)
        link, size = self.link, tensor.copied_bytes
        copies = 2 * link.latency + size / link.out_bandwidth + size / link.in_bandwidth
        return (
            f"{self._name(tensor)}: dropped after node {tensor.last_forward} ({nodes[tensor.last_forward].name}), "
            f"recomputed at node {at} ({nodes[at].name}) in {format_seconds(recipe.seconds)}"
            + (f" from {sources}" if sources else "")
            + f"; its copies would take {format_seconds(copies)}"
        )

    def _sentence(self, tensor: SavedTensor, swap: Swap, late_out: float, late_in: float) -> str:
        nodes = self.trace.nodes
        lead = tensor.first_backward - swap.prefetch
        ahead = f"{lead} {'node' if lead == 1 else 'nodes'}"
        waits = []
        if late_out > 0:
            waits.append(f"{format_seconds(late_out)} for the copy-out")
        if late_in > 0:
            waits.append(f"{format_seconds(late_in)} for the copy-in")
        return (
            f"{self._name(tensor)}: released at node {swap.release} ({nodes[swap.release].name}), prefetched at node "
            f"{swap.prefetch} ({nodes[swap.prefetch].name}), {ahead} before its use at node "
            f"{tensor.first_backward}; " + (f"compute waits {' and '.join(waits)}" if waits else "hidden")
        )

    def late_seconds(self) -> dict[int, tuple[float, float]]:
        """Return for each swapped tensor's id the seconds by which its copy-out and its copy-in are late."""
        timing = self.timing
        first_backward = {tensor.id: tensor.first_backward for tensor in self.recomputed_trace.tensors}
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
    recomputes: Iterable[int] | None = None,
) -> Plan:
    """Return the plan for given swaps and recomputations, with its predicted timing and its bound.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    swaps : sequence of Swap
        The swaps.
    limit_bytes : int, optional
        Limit that the bound refers to, in bytes; by default, the plan's own peak.
    bound_seconds : float, optional
        The bound at that limit, in seconds, if it is known already.
    recomputes : iterable of int, optional
        Ids of the tensors that are recomputed. If this is given, even empty, the bound is that of all plans that swap
        and recompute, otherwise that of all swap-only plans.

    Returns
    -------
    Plan
        With its step time by `simulate` and its bound by `joint_bound` or `cut_bound`.

    Raises
    ------
    ValueError
        If a swap's id is unknown, occurs twice or is that of a recomputed tensor, or its nodes are out of order. If a
        tensor to recompute has no recipe.
    """
    rows = recomputations(trace, recomputes or ())
    step = recomputed(trace, (row.id for row in rows)) if rows else trace
    timing = simulate(step, swaps, link)
    limit_bytes = timing.peak_bytes if limit_bytes is None else limit_bytes
    # The bound adds the same durations in another order, so it may exceed the step time by rounding.
    bound = bound_seconds
    if bound is None:
        bound = (cut_bound if recomputes is None else joint_bound)(trace, limit_bytes, link)
    bound = min(bound, timing.step_seconds)
    return Plan(
        swaps=tuple(sorted(swaps)),
        step_seconds=timing.step_seconds,
        compute_seconds=list(accumulate((node.seconds for node in trace.nodes), initial=0.0))[-1],
        bound_seconds=bound,
        gap=timing.step_seconds / bound - 1 if bound else 0.0,
        peak_bytes=timing.peak_bytes,
        unswapped_peak_bytes=max(unswapped_bytes(trace), default=0),
        host_bytes=_host_bytes(step, swaps),
        limit_bytes=limit_bytes,
        trace=trace,
        link=link,
        recomputes=rows,
        swap_only=recomputes is None,
    )


def _host_bytes(trace: Trace, swaps: Sequence[Swap]) -> int:
    change = [0] * (len(trace.nodes) + 1)
    tensors = {tensor.id: tensor for tensor in trace.tensors}
    for swap in swaps:
        tensor = tensors[swap.id]
        change[tensor.packed] += tensor.copied_bytes
        change[tensor.first_backward + 1] -= tensor.copied_bytes
    return max(accumulate(change), default=0)
