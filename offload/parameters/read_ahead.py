"""Records the order in which each pass needs the moved parameters, and starts their copy-ins ahead of need.

A pass is a forward of the model and everything until the next forward: backward, and reads by the program.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from offload import _core

if TYPE_CHECKING:
    from offload.parameters.content import Content
    from offload.parameters.stored_parameter import StoredParameter

__all__ = ["ReadAhead"]

LENGTH_MAX = 1 << 16  # uses in a pass that are recorded; later ones are read on demand
SEARCHED = 64  # uses of the previous pass that this pass may skip

Reference = weakref.ref["StoredParameter"]


class ReadAhead:
    """Starts copy-ins in the order of the latest pass of the same kind.

    Parameters
    ----------
    nbytes_max
        Limit on the bytes of copy-ins that were started ahead of need. One is started even if it alone exceeds it.
    """

    def __init__(self, nbytes_max: int) -> None:
        self.nbytes_max = nbytes_max
        self._orders: dict[object, list[Reference]] = {}
        self._kind: object = None
        self._before: list[Reference] = []
        self._now: list[Reference] = []
        self._at = 0
        self._begun: dict[_core.SwappedStorage, int] = {}  # copy-ins nobody has waited for
        self._lock = threading.RLock()  # backward on an accelerator runs in threads of its own

    def begin_pass(self, kind: object) -> None:
        """Begin another pass. Passes of one kind are expected to need the same parameters in the same order."""
        with self._lock:
            if self._now:
                self._orders[self._kind] = self._now
            self._kind, self._before, self._now, self._at = kind, self._orders.get(kind, []), [], 0
            self._abandon(set())

    def needs(self, record: StoredParameter, content: Content) -> None:
        """Record a use of a parameter. Start its copy-in, and then those of the parameters that are needed next."""
        with self._lock:
            self._needs(record, content.stored)

    def _needs(self, record: StoredParameter, stored: _core.SwappedStorage | None) -> None:
        if len(self._now) < LENGTH_MAX:
            self._now.append(record.reference)
        wanted = {stored}
        if not record.is_in_memory() and stored is not None:
            self._begin(stored, record.nbytes)
        if self._find(record.reference):
            nbytes = 0
            for reference in self._before[self._at :]:
                each = reference()
                following = each.content.stored if each is not None else None
                if each is None or following is None or following in wanted or each.is_in_memory():
                    continue
                nbytes += each.nbytes
                if nbytes > self.nbytes_max and len(wanted) > 1:
                    break
                wanted.add(following)
                self._begin(following, each.nbytes)
        self._abandon(wanted)

    def _find(self, reference: Reference) -> bool:
        for position in range(self._at, min(self._at + SEARCHED, len(self._before))):
            if self._before[position] is reference:
                self._at = position + 1
                return True
        return False

    def _begin(self, stored: _core.SwappedStorage, nbytes: int) -> None:
        if stored not in self._begun and stored.prefetch():
            self._begun[stored] = nbytes

    def used(self, stored: _core.SwappedStorage) -> None:
        """Note that a caller now waits for this copy-in."""
        with self._lock:
            self._begun.pop(stored, None)

    def _abandon(self, wanted: set[_core.SwappedStorage | None]) -> None:
        """Free the memory of the copy-ins that are not in `wanted`."""
        for stored in [each for each in list(self._begun) if each not in wanted]:
            if self._begun.pop(stored, None) is None:
                continue  # a signal handler waits for it
            stored.ticket.settle()  # wait: no second copy-in may begin before this one has ended
            stored.remove_view()
            stored.add_view()

    def close(self) -> None:
        """Forget all orders."""
        with self._lock:
            self._abandon(set())
            self._orders.clear()
            self._before, self._now = [], []
