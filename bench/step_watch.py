"""What a training step did besides taking time: its memory, its kind, and what the controller logged meanwhile."""

from __future__ import annotations

import logging
from typing import Any

from offload.demo.memory import MemoryMeter

KINDS = ("profiled", "trial", "reference", "bare")  # counted by a session; every other step follows a plan


class StepWatch:
    """Watches the steps of one trainer, one after another.

    Parameters
    ----------
    meter
        Measures this process's memory; it has been started.
    handle
        From `offload.enable`; None for plain training.
    """

    def __init__(self, meter: MemoryMeter, handle: Any) -> None:
        self._meter = meter
        self._handle = handle
        self._decisions = Decisions()
        self._before: dict[str, int] = {}
        if handle is not None:
            log = logging.getLogger("offload")
            log.setLevel(logging.DEBUG)  # phases
            logging.getLogger("offload.nodes").setLevel(logging.INFO)  # they would slow the steps that are watched
            log.addHandler(self._decisions)

    def begin(self) -> None:
        """Begin a step. What has been logged since the last one belongs to this one."""
        self._before = self._counted()
        self._meter.lap()

    def end(self) -> dict[str, Any]:
        """Return the largest resident set beyond the baseline, the kind of step, and the log's lines."""
        peak_bytes = self._meter.lap() - self._meter.baseline_bytes
        now = self._counted()
        kind = next((kind for kind in KINDS if now.get(kind) != self._before.get(kind)), "planned" if now else "plain")
        return {"peak_bytes": peak_bytes, "kind": kind, "decisions": self._decisions.take()}

    def _counted(self) -> dict[str, int]:
        # The session's own counters: a report reads measurements too, which the next step would do.
        counts = self._handle._counts if self._handle is not None else None
        return {} if counts is None else {kind: getattr(counts, f"{kind}_steps") for kind in KINDS}


class Decisions(logging.Handler):
    """Keeps what is logged until it is taken: level and text of each record."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self._kept.append((record.levelname, record.getMessage()))

    def take(self) -> list[tuple[str, str]]:
        """Return what was kept, and keep nothing of it."""
        taken, self._kept = self._kept, []
        return taken
