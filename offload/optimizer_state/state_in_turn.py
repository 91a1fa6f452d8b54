"""Brings an optimizer's state back for one parameter at a time, in the order in which gradients become complete.

`StepInBackward` uses it where the optimizer's state is in the store between steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from offload.optimizer_state import mover as one
from offload.optimizer_state.mover import StateMover

__all__ = ["StateInTurn"]


class StateInTurn:
    """The state of one parameter after the other; that of the following ones is read ahead.

    Which ones follow is expected from the step before.

    Parameters
    ----------
    mover
        It does not step the optimizer itself.
    """

    def __init__(self, mover: StateMover) -> None:
        self._mover = mover
        self._order: list[Tensor] = []  # as expected in this step
        self._place: dict[Tensor, int] = {}
        self._next = 0  # the first of them whose copy-in has not begun
        self._ahead: dict[Tensor, int] = {}  # bytes whose copy-ins have begun and which nobody has asked for
        self._seen: list[int] = []  # identities: the order of this step, which keeps no parameter alive

    def begin(self, params: Iterable[Tensor]) -> None:
        """A step begins. `params`: all of the optimizer's."""
        found = {id(param): param for param in params}
        self._order = [found[each] for each in self._seen if each in found]
        self._place = {param: n for n, param in enumerate(self._order)}
        self._next = 0
        self._seen = []

    def bring(self, param: Tensor) -> None:
        """Have the parameter's state in memory, and start the copy-ins of those that follow.

        Raises
        ------
        OptimizerStateError
            It could not be read.
        """
        self._ahead.pop(param, None)
        self._mover.begin(param)
        place = self._place.get(param)
        if place is not None:
            self._read_ahead(place)
        self._mover.fetch(param)

    def _read_ahead(self, place: int) -> None:
        self._next = max(self._next, place + 1)
        ahead = sum(self._ahead.values())
        while self._next < len(self._order) and ahead < one.AHEAD_BYTES:
            param = self._order[self._next]
            self._next += 1
            nbytes = self._mover.begin(param)
            if nbytes:
                self._ahead[param] = nbytes
                ahead += nbytes

    def leave(self, param: Tensor) -> None:
        """Start the copy-outs of the parameter's state."""
        self._mover.leave(param, len(self._seen))
        self._seen.append(id(param))

    def end(self) -> None:
        """The step is over, or nothing more of it is to come."""
        for param in self._ahead:
            self._mover.abandon(param)
        self._ahead.clear()
        self._order, self._place = [], {}
