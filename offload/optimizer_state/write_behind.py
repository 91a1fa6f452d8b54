"""Bounds the memory of optimizer state that is still being written, over all optimizers of a model."""

from __future__ import annotations

from offload.optimizer_state.read_ahead import EarlyReads
from offload.runtime.engine import Engine
from offload.runtime.weak import WeakReferences

__all__ = ["WriteBehind"]


class WriteBehind:
    """The engines of a model's optimizers that have copy-outs under way.

    Attributes
    ----------
    allowed
        What a plan allows in updates: bytes that are being written, and the sum of these and of the bytes that have
        been read in backward and not been used. None if only the fixed limit holds.
    early
        Of each optimizer, what has been read in backward.
    """

    def __init__(self) -> None:
        self.allowed: tuple[int, int] | None = None
        self.early: WeakReferences[EarlyReads] = WeakReferences()
        self._writing: list[Engine] = []  # in the order in which they began

    def wait(self, engine: Engine, nbytes_max: int) -> None:
        """Wait until the optimizers' copy-outs hold few enough bytes. Those of other optimizers are awaited first.

        Parameters
        ----------
        engine
            The engine that has begun a copy-out. Its latest copy-out is not awaited.
        nbytes_max
            Limit for all copy-outs together.
        """
        others = [each for each in self._writing if each is not engine]
        for each in others:
            each.collect()
        others = [each for each in others if each.in_flight_bytes]
        self._writing = [*others, engine]
        nbytes = sum(each.in_flight_bytes for each in others)
        for each in others:
            if nbytes + engine.in_flight_bytes <= nbytes_max:
                break
            nbytes -= each.in_flight_bytes
            each.drain()
        engine.in_flight_bytes_max = max(nbytes_max - nbytes, 0)
        engine.limit_in_flight()

    def limit_in_update(self, nbytes_max: int) -> int:
        """Return the limit on bytes that are being written during an update. `nbytes_max`: the fixed limit."""
        if self.allowed is None:
            return nbytes_max
        writing, together = self.allowed
        return max(nbytes_max, min(writing, together - sum(each.nbytes for each in self.early)))

    def settle(self, nbytes_max: int) -> None:
        """As `wait`, between updates: the engine is the one that began a copy-out last."""
        for engine in self._writing:
            engine.in_flight_bytes_max = nbytes_max
        if self._writing:
            self.wait(self._writing[-1], nbytes_max)
