"""Brings an optimizer's state back for one parameter at a time, in the order in which gradients become complete.

`StepInBackward` uses it if the optimizer's state is in the store between steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from offload.optimizer_state import mover as mover_module
from offload.optimizer_state.mover import StateMover

__all__ = ["StateInTurn"]


class StateInTurn:
    """Brings in the state of one parameter after another, and reads ahead that of the next ones.

    The order is expected to be that of the previous step.

    Parameters
    ----------
    mover
        Moves the state, and does not step the optimizer.
    """

    def __init__(self, mover: StateMover) -> None:
        self._mover = mover
        self._order: list[Tensor] = []  # as expected in this step
        self._place: dict[Tensor, int] = {}
        self._next = 0  # index in `_order` of the first parameter whose copy-in has not begun
        self._ahead: dict[Tensor, int] = {}  # bytes whose copy-ins have begun and which nobody has asked for
        self._seen: list[int] = []  # identities: the order of this step, which keeps no parameter alive

    def begin(self, params: Iterable[Tensor]) -> None:
        """Begin a step. `params` are all parameters of the optimizer."""
        found = {id(param): param for param in params}
        self._order = [found[each] for each in self._seen if each in found]
        self._place = {param: n for n, param in enumerate(self._order)}
        self._next = 0
        self._seen = []

    def bring(self, param: Tensor) -> None:
        """Bring the parameter's state into memory, and start the copy-ins for the next parameters.

        Raises
        ------
        OptimizerStateError
            The state could not be read.
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
        while self._next < len(self._order) and ahead < mover_module.AHEAD_BYTES:
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
        """End the step, or abandon it. Copy-ins that nobody has asked for are dropped."""
        for param in self._ahead:
            self._mover.abandon(param)
        self._ahead.clear()
        self._order, self._place = [], {}
