"""Measures contestants in turn, A B A B …, so that a drift of the machine affects all of them equally.

All comparisons in `bench/` are measured with this module.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Figure = TypeVar("Figure")
Samples = dict[str, list[float]]


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call, in seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def alternate(
    contestants: Mapping[str, Callable[[], Figure]], *, rounds: int, warmups: int = 1
) -> dict[str, list[Figure]]:
    """Call every contestant once a round, in turn.

    Parameters
    ----------
    contestants
        By name; each call measures once and returns its figure.
    rounds
        How many figures to take of each.
    warmups
        Rounds before those, of which nothing is kept.

    Returns
    -------
    dict
        The figures of every contestant, in the order taken. The garbage collector rests meanwhile.
    """
    samples: dict[str, list[Figure]] = {name: [] for name in contestants}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(warmups + rounds):
            for name, measure in contestants.items():
                figure = measure()
                if number >= warmups:
                    samples[name].append(figure)
    finally:
        if was_enabled:
            gc.enable()
    return samples


def medians(samples: Samples) -> dict[str, float]:
    """Median of every contestant's figures."""
    return {name: statistics.median(figures) for name, figures in samples.items()}


def spread(figures: list[float]) -> tuple[float, float]:
    """Lower and upper quartile; both the only figure where there is one."""
    if len(figures) < 2:
        return figures[0], figures[0]
    lower, _, upper = statistics.quantiles(figures, n=4, method="inclusive")
    return lower, upper
