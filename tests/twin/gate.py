"""Checks after every test on the simulated accelerator: no rule of CUDA violated, no two accesses unordered."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from accelerator import simulated
from faults.inject import watch

from offload import _core

DELAY_US_MAX = 300
make_slab = _core.SwapStore.slab


def watched_slab(*args: Any, **options: Any) -> _core.SwapStore:
    """Return a store whose file is also watched by the order checker."""
    store = make_slab(*args, **options)
    watch(store, simulated().LIBRARY)
    return store


@pytest.fixture(autouse=True)
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the machine and watch it. Tests marked `finds` check the findings themselves."""
    monkeypatch.setattr(_core.SwapStore, "slab", watched_slab)
    sim = simulated()
    sim.reset()
    sim.schedule(request.config.getoption("--twin-seed"), DELAY_US_MAX)
    sim.watch_order()
    yield
    gc.collect()
    for device in range(sim.DEVICES):
        if not sim.failure():
            sim.module.synchronize(device)
    found = sim.violations()
    sim.reset()
    if request.node.get_closest_marker("finds") is None:
        assert found == []
