"""The gate that every test on the simulated accelerator passes: no rule broken, and no two accesses in no order."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from accelerator import simulated

DELAY_US_MAX = 300


@pytest.fixture(autouse=True)
def gate(request: pytest.FixtureRequest) -> Iterator[None]:
    """The machine as after a restart, watched; a test marked `finds` looks at what was found itself."""
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
