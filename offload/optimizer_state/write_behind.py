"""Bounds the memory of optimizer state that is still being written, over all optimizers of a model."""

from __future__ import annotations

from offload.runtime.engine import Engine

__all__ = ["WriteBehind"]


class WriteBehind:
    """The engines of a model's optimizers that have copy-outs under way."""

    def __init__(self) -> None:
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
