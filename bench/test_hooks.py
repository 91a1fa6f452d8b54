"""Control-path cost per saved tensor: kept, swapped, duplicate, view; beside hooks that do nothing.

    offload run -- pytest bench/test_hooks.py --benchmark-only

Under `offload run --`: with plain glibc, which gives a step's memory back to the kernel, a swapped tensor takes 70 to
90 µs (hook_rig.py says why).

A benchmark's own time is a whole step of the engine's contestant, waiting for copies included. The
figures per tensor, without that waiting, are in extra_info, in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contest import medians
from hook_rig import COPIES, KINDS, Cost, HookRig
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 30
COUNTS = {"swapped": 64}
COUNT = 200


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[HookRig]:
    """A rig of each kind, its schedule settled."""
    made = HookRig(request.param, count=COUNTS.get(request.param, COUNT))
    for contestant in ("none", "plain", "offload", "offload", "offload"):
        made.step(contestant)
    yield made
    made.close()


def test_hooks(benchmark: BenchmarkFixture, rig: HookRig) -> None:
    benchmark.group = "hooks, one step that saves tensors"
    costs: dict[str, list[Cost]] = {name: [] for name in rig.contestants}

    def others() -> None:  # in turn with the engine, outside its time
        for name in rig.contestants:
            if name != "offload":
                costs[name].append(rig.step(name))

    benchmark.pedantic(lambda: costs["offload"].append(rig.step("offload")), setup=others, rounds=ROUNDS)
    total = medians({name: [cost.total for cost in taken] for name, taken in costs.items()})
    pack = medians({name: [cost.pack for cost in taken] for name, taken in costs.items()})
    processor = medians({name: [cost.processor_seconds for cost in taken] for name, taken in costs.items()})
    benchmark.extra_info |= {
        "kind": rig.kind,
        "tensors": rig.count,
        "plain_hooks_us": 1e6 * (total["plain"] - total["none"]),
        "pack_us": 1e6 * (pack["offload"] - pack["none"]),
        "pack_and_unpack_us": 1e6 * (total["offload"] - total["none"]),
        "processor_us": 1e6 * (processor["offload"] - processor["none"]),
        "over_plain_hooks_us": 1e6 * (total["offload"] - total["plain"]),
    }
    if COPIES in total:  # no hooks, and the same bytes are copied
        benchmark.extra_info["over_copies_us"] = 1e6 * (total["offload"] - total[COPIES])
