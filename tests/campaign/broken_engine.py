"""Guards of offload/engine.py and offload/hooks.py left out, one at a time, under the tests that must notice.

    python -m campaign.broken_engine '{"guard": "test id", …}'

prints one line of JSON: for each guard, whether its test passes as things are and fails without the guard.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from offload import engine, hooks
from offload.engine import Departure, Engine, Lease, SwappedView

Patches = list[Any]


def no_hold() -> Patches:
    """The engine forgets the source as soon as the copy has been asked for."""
    original = Engine.swap_out

    def swap_out(self: Engine, tensor: torch.Tensor, key: engine.StorageKey, need: int) -> Lease:
        lease = original(self, tensor, key, need)
        departure: Departure | None = lease.record._departure
        if departure is not None:
            departure.source = None
        return lease

    return [mock.patch.object(Engine, "swap_out", swap_out)]


def no_check(module: Any) -> Callable[[], Patches]:
    """A change in place is not an error any more."""
    return lambda: [mock.patch.object(module, "raise_changed")]


def addresses_only() -> Patches:
    """Storages with the same address are the same."""

    def key_of(tensor: torch.Tensor) -> engine.StorageKey:
        storage = tensor.untyped_storage()
        return 0, 0, 0, storage.nbytes(), storage.data_ptr()

    return [mock.patch.object(Engine, "key_of", staticmethod(key_of))]


def no_stride() -> Patches:
    """The second view of some bytes comes back contiguous."""
    original = SwappedView.__init__

    def init(self: SwappedView, tensor: torch.Tensor, lease: Lease, offset: int) -> None:
        original(self, tensor, lease, offset)
        if lease.record.views > 1:
            self._stride = torch.empty(self._shape, device="meta").stride()

    return [mock.patch.object(SwappedView, "__init__", init)]


BROKEN: dict[str, Callable[[], Patches]] = {
    "source is held until its copy ends": no_hold,
    "version of a swapped tensor is checked": no_check(engine),
    "identity is more than an address": addresses_only,
    "a duplicate keeps its stride": no_stride,
    "version of a kept tensor is checked": no_check(hooks),
}


class Outcomes:
    """Counts what a run of pytest came to."""

    def __init__(self) -> None:
        self.passed = self.failed = 0
        self.first = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed:
            self.failed += 1
            self.first = self.first or f"{report.nodeid}: {report.longreprtext.strip().splitlines()[-1]}"


def outcomes(test: str, *options: str) -> Outcomes:
    """Run one test in this process."""
    seen = Outcomes()
    pytest.main(["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", *options, test], plugins=[seen])
    return seen


def run_all(table: dict[str, str]) -> list[dict[str, Any]]:
    """Each guard's row."""
    rows = []
    for guard, test in table.items():
        sound = outcomes(test)
        patches = BROKEN[guard]()
        for patch in patches:
            patch.start()
        try:
            broken = outcomes(test)
        finally:
            for patch in patches:
                patch.stop()
        passes = sound.passed > 0 and sound.failed == 0
        rows.append(
            {
                "name": guard,
                "caught_by": test,
                "passes_unbroken": passes,
                "caught": broken.failed > 0,
                "first": broken.first,
            }
        )
    return rows


if __name__ == "__main__":
    print("\n" + json.dumps(run_all(json.loads(sys.argv[1]))))
