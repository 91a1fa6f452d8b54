"""Throughput of the host driver and of the spill file, beside memcpy and plain direct I/O.

    pytest bench/test_copies.py --benchmark-only

The yardstick of each is measured in turn with it; bytes per second of both are in extra_info.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from contest import medians, seconds
from copy_rig import GIB, MIB, HostCopyRig, SpillRig, slab_seconds, slab_waste
from pytest_benchmark.fixture import BenchmarkFixture

from offload.options import default_spill_dir

ROUNDS = 7
SPILL_BLOCKS_MIB = (1, 4, 16, 64)
SPILL_TOTAL_BYTES = 128 * MIB


def compete(
    benchmark: BenchmarkFixture,
    engine: Callable[[], float],
    yardstick: Callable[[], float],
    nbytes: int,
    name: str,
) -> None:
    """Benchmark `engine` in turn with `yardstick`, both of which move `nbytes`."""
    taken: dict[str, list[float]] = {"engine": [], "yardstick": []}
    benchmark.pedantic(
        lambda: taken["engine"].append(engine()),
        setup=lambda: taken["yardstick"].append(yardstick()),
        rounds=ROUNDS,
    )
    median = medians(taken)
    benchmark.extra_info |= {
        "bytes": nbytes,
        "bytes_per_second": nbytes / median["engine"],
        "yardstick": name,
        "yardstick_bytes_per_second": nbytes / median["yardstick"],
        "share_of_yardstick": median["yardstick"] / median["engine"],
    }


@pytest.mark.parametrize("direction", ["out", "into"])
def test_host_copy(benchmark: BenchmarkFixture, direction: str) -> None:
    benchmark.group = "host driver, 64 MiB blocks"
    rig = HostCopyRig()
    engine = {"out": rig.out, "into": rig.into}[direction]
    engine()
    compete(benchmark, engine, rig.memcpy, rig.block_bytes, "memcpy, one thread")


@pytest.mark.parametrize("block_mib", SPILL_BLOCKS_MIB)
@pytest.mark.parametrize("direction", ["write", "read"])
def test_spill_file(benchmark: BenchmarkFixture, direction: str, block_mib: int) -> None:
    benchmark.group = f"spill file, {direction}"
    try:
        made = SpillRig(default_spill_dir(), block_bytes=block_mib * MIB, total_bytes=SPILL_TOTAL_BYTES)
    except OSError as error:
        pytest.skip(f"no direct I/O to compare with: {error}")
    with closing(made) as rig:
        contestants = rig.contestants(direction)
        compete(
            benchmark,
            contestants["spill"],
            contestants["plain"],
            rig.total_bytes,
            "plain O_DIRECT, same block size",
        )


def test_slab_memory(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "slab memory, 1 GiB"

    def touch() -> float:
        return seconds(lambda: np.zeros(GIB, dtype=np.uint8)[::4096].fill(1))

    compete(benchmark, slab_seconds, touch, GIB, "numpy, faulted in by one thread")


def test_slab_waste(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "slab memory, blocks of odd sizes"
    draw = random.Random(0)
    sizes = [draw.randrange(100_000, 8_000_000) for _ in range(100)]
    waste: list[tuple[float, float]] = []
    benchmark.pedantic(lambda: waste.append(slab_waste(sizes)), rounds=1)
    in_slabs, in_powers = waste[0]
    benchmark.extra_info |= {
        "bytes": sum(sizes),
        "waste_share": in_slabs,
        "power_of_two_waste_share": in_powers,
    }
