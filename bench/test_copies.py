"""Throughput of the slab tier and of the spill file, beside Tensor.copy_ and plain direct I/O.

    pytest bench/test_copies.py --benchmark-only

The yardstick of each is measured in turn with it; bytes per second of both are in extra_info.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
import torch
from contest import medians, seconds
from copy_rig import GIB, MIB, SpillRig, slab_seconds, slab_waste
from gpu_copies import BLOCK_BYTES as EVERY_BLOCK_BYTES
from gpu_copies import ROUND_BYTES, Blocks, DeviceClock, StoreCopies, TorchCopies, make_store
from pytest_benchmark.fixture import BenchmarkFixture

from offload.options import default_host_limit, default_spill_dir
from offload.units import format_bytes

ROUNDS = 7
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_BYTES = EVERY_BLOCK_BYTES if DEVICE == "cuda" else EVERY_BLOCK_BYTES[:-1]  # a gigabyte six times is much RAM
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


@pytest.mark.parametrize("nbytes", BLOCK_BYTES, ids=format_bytes)
@pytest.mark.parametrize("direction", ["out", "into", "both"])
def test_copies(benchmark: BenchmarkFixture, direction: str, nbytes: int) -> None:
    benchmark.group = f"copies of the slab tier, {DEVICE}"
    pool_bytes = 3 * max(nbytes, ROUND_BYTES)
    if pool_bytes > default_host_limit():
        pytest.skip(f"needs {format_bytes(pool_bytes)} of host memory and as much again")
    blocks, clock = Blocks(nbytes, DEVICE), DeviceClock(DEVICE)
    ours = StoreCopies(blocks, make_store(DEVICE, pool_bytes), DEVICE)
    theirs = TorchCopies(blocks, DEVICE)
    engine, yardstick = (getattr(each, direction) for each in (ours, theirs))
    clock.measure(engine)
    moved = nbytes * blocks.count * (2 if direction == "both" else 1)
    name = "Tensor.copy_, pinned" if DEVICE == "cuda" else "Tensor.copy_"
    compete(benchmark, lambda: clock.measure(engine), lambda: clock.measure(yardstick), moved, name)
    benchmark.extra_info["block_bytes"] = nbytes
    if direction != "out":
        assert ours.arrived()


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
