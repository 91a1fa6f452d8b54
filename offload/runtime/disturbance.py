"""Notes work of a session that happens inside other models' steps, so that it does not count as theirs.

In an actor-critic training, the forward of the critic runs inside the actor's step. A plan for the critic that is made
there takes time, and a measurement of copies also memory; later steps of the actor have neither.
"""

from __future__ import annotations

from offload import _core

__all__ = ["disturb", "disturbances"]

_noted = _core.Gauge()


def disturb() -> None:
    """Note that a session begins to measure copies, make a plan or run recipes in a trial step.

    Steps of this process that are under way, in any thread, are measured again (`Stopwatch.is_disturbed`).
    """
    _noted.add(1)


def disturbances() -> int:
    """Return how often `disturb` has been called in this process."""
    return _noted.now
