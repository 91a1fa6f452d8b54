"""Steps with recomputed tensors, prepared for placement without building a trace for each.

`joint_search` prepares thousands of them. Each is bit-equal to the step made from the trace that `recomputed` returns.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

from offload.plan.placement import Step
from offload.plan.simulate import Link
from offload.plan.trace import Recompute, Trace

__all__ = ["JointSteps"]


class JointSteps:
    """The steps of a trace in which some of its tensors are recomputed.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths, latency and overheads.
    """

    def __init__(self, trace: Trace, link: Link) -> None:
        self._trace = trace
        self._whole = whole = Step(trace, link)
        index = {tensor_id: i for i, tensor_id in enumerate(whole.ids)}
        tensors = {tensor.id: tensor for tensor in trace.tensors}
        own = [tensors[i] for i in whole.ids]
        self._index = index
        self._in_trace = {tensor.id: at for at, tensor in enumerate(trace.tensors)}
        self._recipes: list[Recompute | None] = [tensor.recompute for tensor in own]
        self._sources = [[index[i] for i in tensor.recompute.inputs] if tensor.recompute else [] for tensor in own]
        self._produced, self._last_use = [tensor.produced for tensor in own], [tensor.last_use for tensor in own]

    def step(self, dropped: Collection[int]) -> Step:
        """Return the step in which the tensors with these ids are recomputed; each has a recipe."""
        whole = self._whole
        rows = [self._index[i] for i in sorted(dropped, key=self._in_trace.__getitem__)]
        uses = self._first_uses(rows)
        seconds = whole.seconds.copy()
        resident = [0] * (whole.node_count + 1)  # by how many bytes residency changes from node to node
        last_uses = self._last_uses(rows, uses)
        longer: dict[int, float] = {}
        for i in rows:
            recipe, node = self._recipes[i], uses.get(i, whole.first_backward[i])
            assert recipe is not None
            longer[node] = longer.get(node, 0.0) + recipe.seconds
            resident[node] += recipe.workspace_bytes
            resident[node + 1] -= recipe.workspace_bytes
            if whole.release_min[i] < node:
                resident[whole.release_min[i]] -= whole.bytes[i]
                resident[node] += whole.bytes[i]
        for node, more in longer.items():
            seconds[node] += more
        for i, last in last_uses.items():
            resident[self._last_use[i] + 1] += whole.bytes[i]
            resident[last + 1] -= whole.bytes[i]
        is_dropped = [False] * whole.count
        for i in rows:
            is_dropped[i] = True
        kept = [i for i in range(whole.count) if not is_dropped[i]]
        uses = {i: max(node, whole.release_min[i]) for i, node in uses.items()}  # an earlier use: never swapped out
        return whole.with_changes(kept, seconds, list(accumulate(resident[:-1])), uses)

    def _first_uses(self, rows: Collection[int]) -> dict[int, int]:
        """Return the first uses that recomputation moves to an earlier node; see `recompute.first_uses`."""
        uses: dict[int, int] = {}
        own, produced = self._whole.first_backward, self._produced
        waiting = sorted(rows, key=lambda i: (produced[i], self._whole.ids[i]))
        dropped = set(rows)
        while waiting:
            i = waiting.pop()
            at = uses.get(i, own[i])
            for source in self._sources[i]:
                if at < uses.get(source, own[source]):
                    uses[source] = at
                    if source in dropped:
                        waiting.append(source)
        return uses

    def _last_uses(self, rows: Collection[int], uses: dict[int, int]) -> dict[int, int]:
        """Return the last uses that recomputation moves to a later node."""
        last_uses: dict[int, int] = {}
        for i in rows:
            node = uses.get(i, self._whole.first_backward[i])
            for source in self._sources[i]:
                if node > last_uses.get(source, self._last_use[source]):
                    last_uses[source] = node
        return last_uses
