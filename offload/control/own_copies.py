"""The speed of the link, from the copies of an engine's own steps.

The first plan uses the calibrated link. Later plans use these speeds: they were measured beside the computation, and
they follow a disk that becomes slower or faster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from offload.plan import Link
from offload.profiling.link_measurement import lower_quartile
from offload.runtime.engine import Engine

__all__ = ["OwnCopies"]

_SAMPLE_SECONDS = 0.05  # of copies in one direction; less is too short to measure their speed
_SAMPLES_MAX = 16


class OwnCopies:
    """Samples of the speed of an engine's copies, in each direction. Older samples are dropped.

    Parameters
    ----------
    engine
        The engine. Its copies so far are the first sample.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sampled = {"out": (0.0, 0.0), "in": (0.0, 0.0)}  # seconds and bytes in samples so far
        self._rates: dict[str, deque[float]] = {name: deque(maxlen=_SAMPLES_MAX) for name in self._sampled}

    def read(self) -> None:
        """Take a sample of the copies since the last one, in each direction in which enough was copied."""
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
        """Return `known` with the lower quartile of the samples as bandwidth; without samples, it stays."""
        out, into = self._rates["out"], self._rates["in"]
        return replace(
            known,
            out_bandwidth=lower_quartile(out) if out else known.out_bandwidth,
            in_bandwidth=lower_quartile(into) if into else known.in_bandwidth,
        )
