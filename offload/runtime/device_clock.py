"""Measures when nodes begin and how long hooks delay them on an accelerator, which computes beside the CPU.

Events are recorded on the device's stream.
"""

from __future__ import annotations

from typing import Any

from offload._core import measure_step
from offload.runtime.engine import Engine

__all__ = ["DeviceClock", "StepTimes"]

# In this order: by node, when the node could begin to compute; by node, how long it computed; by pack index, seconds
# waited for the tensor; seconds in hooks; seconds of the step.
StepTimes = tuple[tuple[float, ...], tuple[float, ...], dict[int, float], float, float]


class DeviceClock:
    """Records what `NodeClock` records, with events on a device's stream. Hooks use no device time."""

    hook_seconds = 0.0

    def __init__(self, engine: Engine) -> None:
        self.is_listening = False
        self._engine = engine
        self._nodes = {0: engine.mark()}
        self._pauses: list[tuple[int, int | None, Any, Any]] = []  # (node, pack index, from, to)
        self._begin: Any = None
        self._node = 0

    def begin(self) -> None:
        """Record the start of a hook that may wait or start a copy."""
        self._begin = self._engine.mark()

    def pass_by(self, node: int) -> None:
        """Record the start of a node in a hook that neither waits nor starts a copy."""
        self._node = node
        self._nodes.setdefault(node, self._engine.mark())

    def arrive(self, node: int) -> None:
        """Record the start of a node. It is the start of the current hook."""
        self._node = node
        self._nodes.setdefault(node, self._begin)

    def end(self, pack_index: int | None) -> None:
        """Record the end of the hook that began last."""
        self._pauses.append((self._node, pack_index, self._begin, self._engine.mark()))

    def measure(self, end: Any, node_count: int) -> StepTimes | None:
        """Return the times of the step that ended at the mark `end`; None if the device has not reached it yet."""
        marks = [*self._nodes.values(), end]
        for _, _, begin, until in self._pauses:
            marks += (begin, until)
        seconds = self._engine.seconds_since(marks[0], marks)
        if seconds is None:
            return None
        nodes, rest = list(zip(self._nodes, seconds, strict=False)), iter(seconds[len(self._nodes) + 1 :])
        pauses = [(node, index, next(rest), next(rest)) for node, index, _, _ in self._pauses]
        step_seconds = seconds[len(self._nodes)]
        return (*measure_step(nodes, pauses, step_seconds, node_count), step_seconds)
