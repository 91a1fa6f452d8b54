"""Compares the copies of the slab tier and the spill file with plain memcpy and plain direct I/O. Uses no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from contest import seconds

from offload import _core

MIB = 1 << 20
GIB = 1 << 30
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def page_aligned(nbytes: int) -> tuple[_core.HostBlock, Bytes]:
    """Memory at a page's start, every page touched: the block and its bytes."""
    block = _core.HostBlock(nbytes, 4096)
    array = np.frombuffer(block, dtype=np.uint8)
    array[:] = 0x5A
    return block, array


class HostCopyRig:
    """The slab tier over the host driver against one thread's memcpy, at one block size.

    Every method copies one block and returns the seconds it took.
    """

    def __init__(self, block_bytes: int = 64 * MIB) -> None:
        self.block_bytes = block_bytes
        lanes = _core.HostDriver()
        slab_bytes = 2 * block_bytes
        self._store = _core.SwapStore.slab(lanes, lanes, slab_bytes, slab_bytes=slab_bytes)
        self._source_block, self._source = page_aligned(block_bytes)
        self._target_block, self._target = page_aligned(block_bytes)
        self._ticket = self._store.swap_out(self._source_block.address, block_bytes, 0)
        self._ticket.wait_out(0)

    def memcpy(self) -> float:
        """One thread, faulted-in memory to faulted-in memory."""
        return seconds(lambda: np.copyto(self._target, self._source))

    def out(self) -> float:
        """Source to slab."""

        def copy() -> None:
            ticket = self._store.swap_out(self._source_block.address, self.block_bytes, 0)
            ticket.wait_out(0)
            ticket.release()

        return seconds(copy)

    def into(self) -> float:
        """Slab to target."""

        def copy() -> None:
            self._ticket.prefetch(self._target_block.address, 0, self._target_block)
            self._ticket.swap_in(0)

        return seconds(copy)

    def contestants(self) -> dict[str, Callable[[], float]]:
        """For `contest.alternate`."""
        return {"memcpy": self.memcpy, "out": self.out, "into": self.into}


class PlainFile:
    """A file written and read with O_DIRECT from Python, block by block: the yardstick.

    Raises
    ------
    OSError
        The folder's file system knows no direct I/O (a tmpfs, say): there is nothing to compare.
    """

    def __init__(self, directory: str, nbytes: int) -> None:
        flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | os.O_DIRECT
        self._descriptor = os.open(directory, flags, 0o600)
        os.posix_fallocate(self._descriptor, 0, nbytes)

    def write(self, data: Bytes, offset: int) -> None:
        """Write all of `data`, however often the system stops short."""
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._descriptor, data[done:], offset + done)

    def read(self, data: Bytes, offset: int) -> None:
        """Fill `data`."""
        done = 0
        while done < data.nbytes:
            moved = os.preadv(self._descriptor, [data[done:]], offset + done)
            if moved == 0:
                raise OSError(f"the file ends at {offset + done} bytes")
            done += moved

    def close(self) -> None:
        """The file goes with its descriptor."""
        os.close(self._descriptor)


class SpillRig:
    """The spill file against plain direct I/O with the same block size.

    Every method moves `total_bytes` in blocks, over the same extents each time, and returns the
    seconds it took.
    """

    def __init__(self, directory: str, *, block_bytes: int, total_bytes: int) -> None:
        count = max(total_bytes // block_bytes, 1)
        self.total_bytes = count * block_bytes
        self._plain = PlainFile(directory, self.total_bytes)
        self._offsets = [number * block_bytes for number in range(count)]
        self._spill = _core.SpillFile(directory)
        self._extents = [self._spill.allocate(block_bytes) for _ in range(count)]
        self._block, self._data = page_aligned(block_bytes)
        self.write()
        self.plain_write()

    def write(self) -> float:
        """Through the spill file, checksums and all."""

        def run() -> None:
            for extent in self._extents:
                self._spill.write(extent, self._block)

        return seconds(run)

    def read(self) -> float:
        """Back through the spill file."""

        def run() -> None:
            for extent in self._extents:
                self._spill.read(extent, self._block)

        return seconds(run)

    def plain_write(self) -> float:
        """By os.pwrite."""

        def run() -> None:
            for offset in self._offsets:
                self._plain.write(self._data, offset)

        return seconds(run)

    def plain_read(self) -> float:
        """By os.preadv."""

        def run() -> None:
            for offset in self._offsets:
                self._plain.read(self._data, offset)

        return seconds(run)

    def contestants(self, direction: str) -> dict[str, Callable[[], float]]:
        """The spill file and plain I/O, "write" or "read", for `contest.alternate`."""
        if direction == "write":
            return {"plain": self.plain_write, "spill": self.write}
        return {"plain": self.plain_read, "spill": self.read}

    def close(self) -> None:
        """Free the disk space."""
        self._plain.close()
        self._extents.clear()
        del self._spill


def slab_seconds(slab_bytes: int = GIB) -> float:
    """Seconds per GiB to make a slab ready over the host driver: mapped, faulted in, registered."""
    lanes = _core.HostDriver()
    store = _core.SwapStore.slab(lanes, lanes, slab_bytes, slab_bytes=slab_bytes)
    block, _ = page_aligned(4096)
    store.swap_out(block.address, 4096, 0).wait_out(0)
    return float(store.stats()["pool_registration_seconds"]) * GIB / slab_bytes


def slab_waste(sizes: list[int]) -> tuple[float, float]:
    """Share of block memory that nobody asked for: in slabs, and where sizes round to powers of 2."""
    lanes = _core.HostDriver()
    store = _core.SwapStore.slab(lanes, lanes, 2 * sum(sizes))
    block, _ = page_aligned(max(sizes))
    tickets = [store.swap_out(block.address, nbytes, 0) for nbytes in sizes]
    stats = store.stats()
    used, asked = stats["pool_used_bytes"], stats["pool_requested_bytes"]
    for ticket in tickets:
        ticket.wait_out(0)
    rounded = sum(1 << (nbytes - 1).bit_length() for nbytes in sizes)
    return 1 - asked / used, 1 - asked / rounded
