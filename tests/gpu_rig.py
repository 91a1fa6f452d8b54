"""What tests on an accelerator share: a stream that is held up on purpose, and a look at what is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerator import gpu, is_available, is_simulated

MIB = 1 << 20
POISON = 0xDB
SLEEP_CYCLES = 50_000_000  # some 30 ms
LONG_IF_SIMULATED = pytest.mark.full if is_simulated else pytest.mark.gpu  # what a processor takes its time for


@pytest.fixture(scope="module", autouse=True)
def cuda() -> Iterator[None]:
    """Skip without a device; else compute the same bits every time."""
    if not is_available():
        pytest.skip("no accelerator")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def sleep() -> None:
    """Hold the current stream up."""
    gpu._sleep(SLEEP_CYCLES)


def sleep_on(side: torch.Stream) -> None:
    """Hold another stream up, behind what the current one has queued."""
    side.wait_stream(gpu.current_stream())
    with gpu.stream(side):
        sleep()


def assert_nothing_left(handle: Any) -> None:
    """No slot, no record, no byte counted: all graphs are gone."""
    handle._engine.store.quiesce()
    handle._engine.drain()
    stats = handle._engine.store.stats()
    assert (stats["live_tickets"], stats["pool_used_bytes"]) == (0, 0)
    assert (handle._engine.live_records, handle._engine.resident.now, handle._engine.unswapped.now) == (0, 0, 0)
