"""Lets copy-outs of optimizer state end in forward, and copy-ins begin in backward, where a plan leaves memory free.

A plan's `StateOverlap` says how much. The movers of a model share one `StateInPasses`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from offload.optimizer_state import mover as mover_module
from offload.optimizer_state.mover import StateMover
from offload.optimizer_state.write_behind import WriteBehind
from offload.plan import StateOverlap
from offload.runtime.executor import ScheduleExecutor
from offload.runtime.weak import WeakReferences, weak_callback
from offload.torch_compat.autograd import keeps_graph

__all__ = ["StateInPasses"]

_instances: WeakReferences[Any] = WeakReferences()  # of all models


class StateInPasses:
    """Follows the `StateOverlap` of the training step that runs.

    Per step, `prepare` is called first, then `follow` if the step's plan has an overlap, then `begin`. `end` may be
    called at any time.

    Parameters
    ----------
    movers
        Returns the movers of the optimizers that are alive.
    behind
        The model's limit on the bytes of copy-outs that have not ended. An overlap raises it.
    """

    def __init__(self, movers: Callable[[], Sequence[StateMover]], behind: WriteBehind) -> None:
        self._movers = movers
        self._behind = behind
        self._next: StateOverlap | None = None
        self._may_read = False  # in the step that runs
        self._begun_params = self._begun_bytes = 0  # those whose state is read ahead
        self._pid = os.getpid()
        self._thread = 0  # the thread of the latest forward pass
        self._must_end = False  # another model's thread asks for the memory
        _instances.add(self)

    def prepare(self) -> None:
        """Free state that was read ahead and that no update has used. Called before a step of any kind begins.

        Ends the overlap of other models: this model's plan does not count their memory. A model that runs in another
        thread ends its own overlap when it reaches the next node of `StateOverlap.rows`; after the last one, its copies
        still overlap with this model's step.
        """
        for other in _instances:
            if other._thread == threading.get_ident():
                if other is not self:
                    other.end()
            elif other._behind.allowed is not None:
                other._must_end = True
        self._next = None
        self._drop()

    def follow(self, overlap: StateOverlap, executor: ScheduleExecutor) -> None:
        """Let copies overlap with the step that the next `begin` begins and that `executor` observes."""
        self._next = overlap
        reach = partial(weak_callback(self._reach), overlap.rows)
        executor.call_at([(node, is_read) for node, is_read, _ in overlap.rows], reach, weak_callback(self.end))

    def begin(self) -> None:
        """Begin a forward pass: wait until at most `overlap.behind_bytes` are being copied out.

        `end` if there is no overlap.
        """
        self._thread, self._must_end = threading.get_ident(), False
        overlap = self._next
        if overlap is None or self._is_child:
            self.end()
            return
        self._may_read = True
        self._behind.allowed = overlap.behind_bytes, max(overlap.behind_bytes, overlap.read_bytes)
        self._behind.settle(overlap.behind_bytes)

    def end(self) -> None:
        """End the overlap: free unused copy-ins, and wait until at most `BEHIND_BYTES` are being copied out."""
        self._may_read = False
        self._behind.allowed = None
        if not self._is_child:
            self._drop()
            self._behind.settle(mover_module.BEHIND_BYTES)

    @property
    def _is_child(self) -> bool:
        """Whether this process is a forked child: the store is that of its parent."""
        return os.getpid() != self._pid

    def _drop(self) -> None:
        for mover in self._movers() if self._begun_params else ():
            mover.early.drop(mover.state)
        self._begun_params = self._begun_bytes = 0

    def _reach(self, rows: Sequence[tuple[int, bool, int]], place: int) -> None:
        """Do what a row says: the step has reached its node."""
        _, is_read, nbytes = rows[place]
        if self._is_child:
            return
        if self._must_end:
            self.end()
        elif not is_read:
            self._behind.settle(nbytes)
        elif self._may_read and not keeps_graph():  # with `retain_graph`, saved tensors stay, so no memory gets free
            self._read(nbytes)

    def _read(self, nbytes_max: int) -> None:
        due = [mover for mover in self._movers() if mover.share.is_last_before_update]
        moving = [(mover.early, mover.state) for mover in due if mover.state is not None]
        wanted = ((early, state, param) for early, state in moving for param in early.expected)
        for early, state, param in islice(wanted, self._begun_params, None):
            nbytes = state.nbytes_of(param)
            if self._begun_bytes + nbytes > nbytes_max:
                break
            self._begun_params += 1
            self._begun_bytes += nbytes
            if not early.begin(state, param):  # no memory is free: the update reads the rest
                self._may_read = False
                break
