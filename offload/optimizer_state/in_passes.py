"""Lets optimizer state be written in forward and read in backward, as far as a plan leaves memory for it.

A plan's `StateOverlap` says how much. The movers of a model share one `StateInPasses`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from offload.optimizer_state import mover as one
from offload.optimizer_state.mover import StateMover
from offload.optimizer_state.write_behind import WriteBehind
from offload.plan import StateOverlap
from offload.runtime.executor import ScheduleExecutor
from offload.runtime.weak import WeakReferences, weak_callback
from offload.torch_compat.autograd import keeps_graph

__all__ = ["StateInPasses"]

_every: WeakReferences[Any] = WeakReferences()  # the `StateInPasses` of all models


class StateInPasses:
    """Follows the `StateOverlap` of the step that runs.

    Parameters
    ----------
    movers
        Returns the movers of the optimizers that are alive.
    behind
        Limits the copy-outs that have not ended.
    """

    def __init__(self, movers: Callable[[], Sequence[StateMover]], behind: WriteBehind) -> None:
        self._movers = movers
        self._behind = behind
        self._next: StateOverlap | None = None
        self._reads = False  # whether the step that runs may still read state
        self._begun = self._begun_bytes = 0  # parameters whose state is read ahead, and its bytes
        self._pid = os.getpid()
        self._thread = 0  # the thread of the latest forward pass
        self._must_end = False  # another model's thread asks for the memory
        _every.add(self)

    def prepare(self) -> None:
        """Free state that was read for an update that has not come. Called before a step of any kind begins.

        Ends the overlap of other models: this model's plan does not count their memory. One that runs in another thread
        ends its overlap when it reaches its next row.
        """
        for other in _every:
            if other._thread == threading.get_ident():
                if other is not self:
                    other.end()
            elif other._behind.allowed is not None:
                other._must_end = True
        self._next = None
        self._drop()

    def follow(self, overlap: StateOverlap, executor: ScheduleExecutor) -> None:
        """Let copies overlap with the pass that `begin` begins and that `executor` observes."""
        self._next = overlap
        reach = partial(weak_callback(self._reach), overlap.rows)
        executor.call_at([(node, is_read) for node, is_read, _ in overlap.rows], reach, weak_callback(self.end))

    def begin(self) -> None:
        """Begin a forward pass: wait until few enough bytes are being written."""
        self._thread, self._must_end = threading.get_ident(), False
        overlap = self._next
        if overlap is None or self._is_child:
            self.end()
            return
        self._reads = True
        self._behind.allowed = overlap.behind_bytes, max(overlap.behind_bytes, overlap.read_bytes)
        self._behind.settle(overlap.behind_bytes)

    def end(self) -> None:
        """End the overlap: free what has been read, and wait until as few bytes are being written as without it."""
        self._reads = False
        self._behind.allowed = None
        if not self._is_child:
            self._drop()
            self._behind.settle(one.BEHIND_BYTES)

    @property
    def _is_child(self) -> bool:
        """Whether this process is a forked child: the store is that of its parent."""
        return os.getpid() != self._pid

    def _drop(self) -> None:
        for mover in self._movers() if self._begun else ():
            mover.early.drop(mover.state)
        self._begun = self._begun_bytes = 0

    def _reach(self, rows: Sequence[tuple[int, bool, int]], place: int) -> None:
        """Do what a row says: the step has reached its node."""
        _, is_read, nbytes = rows[place]
        if self._is_child:
            return
        if self._must_end:
            self.end()
        elif not is_read:
            self._behind.settle(nbytes)
        elif self._reads and not keeps_graph():  # with `retain_graph`, saved tensors stay, so no memory gets free
            self._read(nbytes)

    def _read(self, nbytes_max: int) -> None:
        due = [mover for mover in self._movers() if mover.share.is_last_before_update]
        moving = [(mover.early, mover.state) for mover in due if mover.state is not None]
        every = ((early, state, param) for early, state in moving for param in early.expected)
        for early, state, param in islice(every, self._begun, None):
            nbytes = state.nbytes_of(param)
            if self._begun_bytes + nbytes > nbytes_max:
                break
            self._begun += 1
            self._begun_bytes += nbytes
            if not early.begin(state, param):  # no memory is free: the update reads the rest
                self._reads = False
                break
