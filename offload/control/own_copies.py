"""Measures the speed of the link on the copies of an engine's own steps.

The first plan uses the calibrated link. The plan after a trial step uses the speed of the copies so far, for which the
step waited; later plans also that of copies that run while the step computes. They follow a disk that becomes slower or
faster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from offload.plan import Link
from offload.profiling.link_measurement import lower_quartile
from offload.runtime.engine import Engine

__all__ = ["OwnCopies"]

_SAMPLE_SECONDS = 0.05  # copy time in one direction that is long enough to measure the speed
_SAMPLES_MAX = 16


class OwnCopies:
    """Samples of the speed of an engine's copies, in each direction. Older samples are dropped.

    Parameters
    ----------
    engine
        Runs the copies. Those that it has run so far belong to the first sample.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sampled = {"out": (0.0, 0.0), "in": (0.0, 0.0)}  # seconds and bytes in samples so far
        self._rates: dict[str, deque[float]] = {name: deque(maxlen=_SAMPLES_MAX) for name in self._sampled}

    def read(self) -> None:
        """Sample the copies since the last sample, in each direction in which they took long enough."""
        stats = self._engine.store_stats()
        for name, (seconds_before, bytes_before) in self._sampled.items():
            seconds, nbytes = stats[f"{name}_seconds"], stats[f"{name}_bytes"]
            if seconds - seconds_before > _SAMPLE_SECONDS and nbytes > bytes_before:
                self._rates[name].append((nbytes - bytes_before) / (seconds - seconds_before))
                self._sampled[name] = seconds, nbytes

    @property
    def are_known(self) -> bool:
        """Whether both directions have a sample."""
        return all(self._rates.values())

    def link(self, known: Link) -> Link:
        """Return `known` with the lower quartile of the samples as bandwidth. Without samples it is unchanged."""
        out, into = self._rates["out"], self._rates["in"]
        return replace(
            known,
            out_bandwidth=lower_quartile(out) if out else known.out_bandwidth,
            in_bandwidth=lower_quartile(into) if into else known.in_bandwidth,
        )
