"""A growing set of tensors to recompute, and the bytes that every plan with this set needs.

The search for the tensors to recompute adds tensors as long as some plan stays within the limit.
"""

from __future__ import annotations

import numpy as np

from offload.plan.bounds import unavoidable_bytes
from offload.plan.trace import Trace

__all__ = ["DropSet"]


class DropSet:
    """Tensors to recompute such that some plan stays within a limit.

    Parameters
    ----------
    trace : Trace
        The step.
    limit_bytes : int
        Limit on the resident bytes, in bytes; feasible without recomputation.

    Notes
    -----
    Dropping a tensor frees no more bytes than swapping it for as long as is allowed. But its sources must be resident
    when it is recomputed, and the recipe needs its workspace. So the least feasible limit can only rise.

    A recomputation can move to an earlier node when further tensors are added. A source that was kept longer because of
    this recomputation then still counts as kept that long. So a tensor may be refused although it would fit.
    """

    def __init__(self, trace: Trace, limit_bytes: int) -> None:
        self.ids: set[int] = set()
        self._limit_bytes = limit_bytes
        self._tensors = {tensor.id: tensor for tensor in trace.tensors}
        self._uses = {tensor.id: tensor.first_backward for tensor in trace.tensors}
        self._last_uses = {tensor.id: tensor.last_use for tensor in trace.tensors}
        self._unavoidable = np.asarray(unavoidable_bytes(trace), dtype=np.int64)

    def add(self, tensor_id: int) -> bool:
        """Add a tensor that has a recipe. If no plan would stay within the limit, change nothing and return False."""
        uses, last_uses, changes = self._changes(tensor_id)
        done = 0
        fits = True
        for first, stop, count in changes:
            span = self._unavoidable[first:stop]
            span += count
            done += 1
            if count > 0 and span.size and int(span.max()) > self._limit_bytes:
                fits = False
                break
        if not fits:
            for first, stop, count in changes[:done]:
                self._unavoidable[first:stop] -= count
            return False
        self._uses.update(uses)
        self._last_uses.update(last_uses)
        self.ids.add(tensor_id)
        return True

    def _changes(self, tensor_id: int) -> tuple[dict[int, int], dict[int, int], list[tuple[int, int, int]]]:
        """Return the first uses and last uses that change, and as (first, stop, bytes) how ranges of nodes change."""
        uses: dict[int, int] = {}
        last_uses: dict[int, int] = {}
        lower, raises = [], []
        waiting = [(tensor_id, -1)]  # a tensor, and the node at which it was recomputed before (-1: none)
        while waiting:
            i, before = waiting.pop()
            recipe = self._tensors[i].recompute
            assert recipe is not None
            node = uses.get(i, self._uses[i])
            if recipe.workspace_bytes:
                raises.append((node, node + 1, recipe.workspace_bytes))
                if before >= 0:
                    lower.append((before, before + 1, -recipe.workspace_bytes))
            for source in recipe.inputs:
                tensor = self._tensors[source]
                last = last_uses.get(source, self._last_uses[source])
                if node > last:
                    last_uses[source] = node
                    raises.append((last + 1, node + 1, tensor.bytes))
                use = uses.get(source, self._uses[source])
                if node < use:
                    uses[source] = node
                    raises.append((max(node, tensor.last_forward + 1), use, tensor.bytes))
                    if source in self.ids:
                        waiting.append((source, use))
        return uses, last_uses, lower + raises
