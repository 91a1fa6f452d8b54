"""The durations of a measured step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.runtime.executor import Measured

__all__ = ["StepCost", "without_slowing"]


@dataclass(frozen=True)
class StepCost:
    """The durations of a step in seconds: as elapsed time, and without the time that other programs took.

    Attributes
    ----------
    step, nodes
        Elapsed seconds of the whole step, and of each node.
    own_step
        An estimate of `step` without other programs: CPU time of the thread, plus `share` × the time that its hooks
        waited. `share` is the fraction of the processor that other programs left to the thread: `own_computed` /
        `computed`, at most 1. Equal to `step` if the CPU time is unknown.
    own_computed
        CPU time of the thread without the CPU time of hooks. Equal to `computed` if the CPU time is unknown.
    """

    step: float
    nodes: tuple[float, ...]
    own_step: float
    own_computed: float

    @property
    def computed(self) -> float:
        """Elapsed seconds of all nodes together."""
        return sum(self.nodes)

    @classmethod
    def of(cls, measured: Measured) -> StepCost:
        """Return the cost of a measured step."""
        nodes, own = measured.node_seconds, measured.thread_seconds
        computed = sum(nodes)
        if own is None:
            return cls(measured.step_seconds, nodes, measured.step_seconds, computed)
        own_computed = own - measured.hook_seconds
        # The fraction of the processor that other programs left to this thread.
        share = min(1.0, own_computed / computed) if computed > 0 else 1.0
        waited = max(0.0, measured.stall_seconds - measured.hook_seconds)
        return cls(measured.step_seconds, nodes, own + share * waited, own_computed)


def without_slowing(seconds: Sequence[float], slowed: float) -> tuple[float, ...]:
    """Subtract `slowed`, the total time that copies added, from the durations in proportion; at most half of each."""
    if slowed <= 0:
        return tuple(seconds)
    total = sum(seconds)
    share = 1 - min(slowed / total, 0.5) if total > 0 else 1.0
    return tuple(each * share for each in seconds)
