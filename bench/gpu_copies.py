"""Part of the GPU suite: the store's slab tier beside Tensor.copy_ and pinned memory of torch.

    python bench/gpu_copies.py --json FILE [--rehearse]

Copies out, in and both at once by block size; slab memory beside pin_memory; the control path per
saved tensor. Copies are timed on the device, by events on the compute stream.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from contest import alternate, medians, seconds, spread
from gpu_frontier import release
from hook_rig import KINDS, HookRig, microseconds
from result_file import ResultFile
from torch import Tensor

from offload import _core
from offload.options import default_host_limit

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCK_BYTES = (4 * KIB, 64 * KIB, *(MIB << n for n in range(0, 11, 2)))  # … 1 GiB
ROUND_BYTES = 256 * MIB  # moved each way in one round, where blocks are small enough
BLOCKS_MAX = 64
POOL_BYTES_MAX = 4 * GIB


class DeviceClock:
    """Seconds that work takes on the compute stream; on the CPU, which has none, by the wall."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"

    def measure(self, work: Callable[[], None]) -> float:
        """Time from the stream's present point to the end of all that `work` queues."""
        if not self._is_cuda:
            return seconds(work)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


class Blocks:
    """Device memory of one round: `count` blocks to copy out of and as many to copy into."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        self.count = min(max(ROUND_BYTES // nbytes, 1), BLOCKS_MAX)
        self.sources, self.targets = (
            [torch.full((nbytes,), fill, dtype=torch.uint8, device=device) for _ in range(self.count)]
            for fill in (1, 0)
        )


class TorchCopies:
    """Tensor.copy_ from and to pinned memory: on the compute stream, or on two streams for both."""

    def __init__(self, blocks: Blocks, device: str) -> None:
        self._blocks = blocks
        self._streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []
        self._pinned = [
            [torch.zeros(blocks.nbytes, dtype=torch.uint8, pin_memory=device == "cuda") for _ in range(blocks.count)]
            for _ in range(2)
        ]

    def out(self) -> None:
        """Device to pinned memory."""
        self._copy(self._blocks.sources, self._pinned[0])

    def into(self) -> None:
        """Pinned memory to device."""
        self._copy(self._pinned[1], self._blocks.targets)

    def both(self) -> None:
        """Both at once."""
        if not self._streams:
            self.out()
            self.into()
            return
        compute = torch.cuda.current_stream()
        for stream, copy in zip(self._streams, (self.out, self.into), strict=True):
            stream.wait_stream(compute)
            with torch.cuda.stream(stream):
                copy()
        for stream in self._streams:
            compute.wait_stream(stream)

    @staticmethod
    def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)


class StoreCopies:
    """The same copies by the swap store, on its own two streams."""

    def __init__(self, blocks: Blocks, store: _core.SwapStore, device: str) -> None:
        self._blocks = blocks
        self._store = store
        self._stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
        self._tickets = self._begin_out()
        self._wait_out(self._tickets)

    def out(self) -> None:
        """Device to slab."""
        self._wait_out(self._begin_out())

    def into(self) -> None:
        """Slab to device, of blocks that went out before."""
        self._begin_in()
        self._wait_in()

    def both(self) -> None:
        """Both at once."""
        leaving = self._begin_out()
        self._begin_in()
        self._wait_out(leaving)
        self._wait_in()

    def _begin_out(self) -> list[_core.Ticket]:
        return [
            self._store.swap_out(source.data_ptr(), self._blocks.nbytes, self._stream)
            for source in self._blocks.sources
        ]

    def _wait_out(self, tickets: list[_core.Ticket]) -> None:
        for ticket in tickets:
            ticket.wait_out(self._stream)

    def _begin_in(self) -> None:
        for ticket, target in zip(self._tickets, self._blocks.targets, strict=True):
            ticket.prefetch(target.data_ptr(), self._stream)

    def _wait_in(self) -> None:
        for ticket in self._tickets:
            ticket.swap_in(self._stream)

    def arrived(self) -> bool:
        """Whether the targets hold what the sources held."""
        pairs = zip(self._blocks.sources, self._blocks.targets, strict=True)
        return all(torch.equal(source, target) for source, target in pairs)


def make_store(device: str, pool_bytes: int, slab_bytes: int = 256 * MIB) -> _core.SwapStore:
    """A slab tier without a disk, over the GPU or, to rehearse, over the host."""
    lanes = _core.HostDriver()
    driver = _core.cuda_driver(torch.cuda.current_device()) if device == "cuda" else lanes
    return _core.SwapStore.slab(driver, lanes, pool_bytes, slab_bytes=slab_bytes)


def copies(results: ResultFile, device: str, sizes: tuple[int, ...], rounds: int) -> bool:
    """Both contestants by block size and direction; False where bytes did not arrive."""
    pool_bytes = min(POOL_BYTES_MAX, default_host_limit())
    store = make_store(device, pool_bytes)
    clock = DeviceClock(device)
    whole = True
    for nbytes in sizes:
        if 3 * max(nbytes, ROUND_BYTES) > pool_bytes:
            results.append("left_out", {"block_bytes": nbytes, "reason": "too little host memory"})
            continue
        blocks = Blocks(nbytes, device)
        ours, theirs = StoreCopies(blocks, store, device), TorchCopies(blocks, device)
        for direction, ours_moves, theirs_moves in (
            ("out", ours.out, theirs.out),
            ("in", ours.into, theirs.into),
            ("both", ours.both, theirs.both),
        ):
            contestants = {
                "torch": partial(clock.measure, theirs_moves),
                "store": partial(clock.measure, ours_moves),
            }
            samples = alternate(contestants, rounds=rounds)
            moved = nbytes * blocks.count * (2 if direction == "both" else 1)
            results.append("copies", copy_row(nbytes, direction, moved, samples))
        whole &= ours.arrived()
    results.set("arrived_whole", whole)
    return whole


def copy_row(nbytes: int, direction: str, moved: int, samples: dict[str, list[float]]) -> dict[str, object]:
    """One line of the table of copies."""
    taken = medians(samples)
    row: dict[str, object] = {"block_bytes": nbytes, "direction": direction, "moved_bytes": moved}
    for name, figures in samples.items():
        lower, upper = spread(figures)
        row[f"{name}_bytes_per_second"] = moved / taken[name]
        row[f"{name}_bytes_per_second_spread"] = [moved / upper, moved / lower]
    row["store_over_torch"] = taken["torch"] / taken["store"]
    return row


def slab_memory(results: ResultFile, device: str, nbytes: int, rounds: int) -> None:
    """Seconds per GiB until host memory is pinned: a slab, and torch's pin_memory."""
    held: list[object] = []  # until the end: neither side may recycle what it had before
    release(device)

    def slab() -> float:
        source = torch.zeros(1, dtype=torch.uint8, device=device)
        store = make_store(device, nbytes, nbytes)
        stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
        held.append((store, source, store.swap_out(source.data_ptr(), 1, stream)))
        return float(store.stats()["pool_registration_seconds"])

    def pin() -> float:
        begin = time.perf_counter()
        held.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda"))
        return time.perf_counter() - begin

    taken = medians(alternate({"torch": pin, "slab": slab}, rounds=rounds, warmups=0))
    per_gib = {name: figure * GIB / nbytes for name, figure in taken.items()}
    faster = taken["torch"] / taken["slab"]
    results.set("slab_memory", {"seconds_per_gib": per_gib, "slab_over_torch": faster})


def control_path(results: ResultFile, device: str, rounds: int) -> None:
    """Microseconds per saved tensor that the calling thread spends in hooks, copies left out."""
    for kind in KINDS:
        with closing(HookRig(kind, count=64, device=device)) as rig:
            results.append("control_path", {"kind": kind, **microseconds(rig, rounds=rounds)})


def main() -> int:
    """Measure; 1 where bytes did not arrive."""
    parser = argparse.ArgumentParser(prog="gpu_copies.py")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    args = parser.parse_args()
    results = ResultFile(args.json)
    device, rounds = ("cpu", 1) if args.rehearse else ("cuda", 7)
    results.set("seconds_allowed", os.environ.get("OFFLOAD_PART_SECONDS"))
    whole = copies(results, device, BLOCK_BYTES[:2] if args.rehearse else BLOCK_BYTES, rounds)
    control_path(results, device, rounds)
    slab_memory(results, device, 4 * MIB if args.rehearse else GIB, min(rounds, 3))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
