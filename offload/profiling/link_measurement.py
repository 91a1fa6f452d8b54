"""Measures how fast an engine copies between a device and the tier below it (pinned memory, or a file without a GPU).

`calibration.py` caches the result.
"""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload import _core
from offload._core import SwappedStorage
from offload.runtime.engine import Engine

__all__ = ["BLOCKS_AT_A_TIME", "BLOCK_BYTES_MIN", "LinkRates", "lower_quartile", "measure", "upper_quartile"]

BLOCK_BYTES_MIN = 4096
COPIES_IN_FLIGHT = 2  # per direction
BLOCKS_AT_A_TIME = 2 * COPIES_IN_FLIGHT  # blocks that are on the device at the same time
ROUNDS = 6
ROUNDS_MIN = 2  # also if copies are slow: two rounds show whether the speed changes
ROUND_SECONDS = 0.05  # short, so that the rounds show how the speed varies
SECONDS_MAX = 1.5
SMALL_COPIES = 32
POLL_SECONDS = 5e-5
POLL_BYTES_MIN = 4 << 20  # copies of smaller blocks take less time than a sleep, so their polls do not sleep


@dataclass(frozen=True)
class LinkRates:
    """The result of `measure`: medians over its rounds, unless stated otherwise.

    Attributes
    ----------
    out, into : float
        Bytes per second out of device memory and into it, while no copy runs in the other direction.
    out_both, in_both : float
        Bytes per second out of device memory and into it, while copies run in both directions.
    out_low, in_low : float
        Lower quartiles of `out_both` and `in_both` over the rounds.
    latency_seconds : float
        The part of a copy's time that does not depend on its bytes.
    processor_seconds : float
        CPU time of the copying threads, in seconds, for one byte out and in again. The least over the rounds.
    spread : float
        Upper quartile divided by lower quartile over the rounds: the larger ratio of `out_both` and `in_both`.
    """

    out: float
    into: float
    out_both: float
    in_both: float
    out_low: float
    in_low: float
    latency_seconds: float
    processor_seconds: float
    spread: float


def measure(store: _core.SwapStore, device: torch.device, block_bytes: int, room_bytes: int | None = None) -> LinkRates:
    """Copy blocks of at most `block_bytes` out of `device` and back: each direction alone, then both.

    Before this, up to `SMALL_COPIES` blocks of one page are copied, to measure the latency. They are fewer if they
    would need more than `room_bytes` of device memory.

    Raises
    ------
    OSError
        Reading or writing the disk failed.
    MemoryError
        There is no room even for the smallest blocks.
    """
    deadline = time.perf_counter() + SECONDS_MAX
    engine = Engine(store, device)
    try:
        pages = SMALL_COPIES if room_bytes is None else min(SMALL_COPIES, max(1, room_bytes // BLOCK_BYTES_MIN))
        latency = _small_copy_seconds(engine, pages)
        traffic = _Traffic(engine, _affordable(engine, block_bytes))
        rates: list[tuple[float, ...]] = []
        while len(rates) < ROUNDS_MIN or (len(rates) < ROUNDS and time.perf_counter() < deadline - 3 * ROUND_SECONDS):
            rates.append((*traffic.rates(out=True), *traffic.rates(into=True), *traffic.rates(out=True, into=True)))
        traffic.close()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # the frames would keep swapped storages alive
        raise
    finally:
        engine.drain()
    columns = list(zip(*rates, strict=True))
    out, _, _, _, into, _, out_both, in_both, _ = map(statistics.median, columns)
    out_processor, in_processor = min(columns[2]), min(columns[5])  # other threads can only add time
    return LinkRates(
        out=out,
        into=into,
        out_both=out_both,
        in_both=in_both,
        out_low=lower_quartile(columns[6]),
        in_low=lower_quartile(columns[7]),
        latency_seconds=max(latency - BLOCK_BYTES_MIN / max(out, into), 0.0),
        processor_seconds=out_processor + in_processor,
        spread=max(upper_quartile(columns[each]) / lower_quartile(columns[each]) for each in (6, 7)),
    )


def lower_quartile(values: Sequence[float]) -> float:
    """Return the lower quartile: an element of `values`; the smallest one if there are four or fewer."""
    return sorted(values)[(len(values) - 1) // 4]


def upper_quartile(values: Sequence[float]) -> float:
    """Return the upper quartile: an element of `values`; the largest one if there are four or fewer."""
    return sorted(values)[-1 - (len(values) - 1) // 4]


def _filled(engine: Engine, nbytes: int) -> torch.Tensor:
    """Return a tensor whose pages are in physical memory and whose bytes do not compress."""
    return torch.arange(nbytes // 8, dtype=torch.int64, device=engine.device).mul_(0x9E3779B97F4A7C1)


def _out(engine: Engine, source: torch.Tensor) -> SwappedStorage:
    key, _ = engine.look(source, source.nbytes)
    assert key is not None
    return engine.swap_out(source, key, 0)


def _has_left(slot: SwappedStorage) -> bool:
    """Return whether the copy-out has ended. Raises an OSError if it failed."""
    ticket = slot.ticket
    if not ticket.out_done():
        return False
    if ticket.state == "failed":
        raise OSError(f"a copy-out failed while the link was measured: {ticket.failure}")
    return True


def _has_arrived(slot: SwappedStorage) -> bool:
    return slot.ticket.in_done()


def _await_all(slots: list[SwappedStorage], has_ended: Callable[[SwappedStorage], bool]) -> None:
    for slot in slots:
        while not has_ended(slot):
            time.sleep(0)


def _small_copy_seconds(engine: Engine, count: int) -> float:
    """Queue `count` copies of one page each. Return the time per copy in the slower direction, in seconds."""
    outs, ins = [], []
    for _ in range(ROUNDS):
        sources = [_filled(engine, BLOCK_BYTES_MIN) for _ in range(count)]
        begun = time.perf_counter()
        slots = [_out(engine, source) for source in sources]
        _await_all(slots, _has_left)
        outs.append(time.perf_counter() - begun)
        engine.drain()
        del sources
        begun = time.perf_counter()
        for slot in slots:
            slot.prefetch()
        _await_all(slots, _has_arrived)
        ins.append(time.perf_counter() - begun)
        for slot in slots:
            slot.swap_in()
    return max(statistics.median(outs), statistics.median(ins)) / count


def _affordable(engine: Engine, block_bytes: int) -> int:
    """Return `block_bytes`, divided by 4 until a block fits into memory and its copy-out takes at most one round.

    The result is at least `BLOCK_BYTES_MIN`, even if a copy-out then takes longer.
    """
    while True:
        try:
            begun = time.perf_counter()
            _await_all([_out(engine, _filled(engine, block_bytes))], _has_left)
            seconds = time.perf_counter() - begun
        except MemoryError:  # torch.OutOfMemoryError is not a subclass of MemoryError
            if block_bytes <= BLOCK_BYTES_MIN:
                raise
            seconds = math.inf
        except torch.OutOfMemoryError as error:
            if block_bytes <= BLOCK_BYTES_MIN:
                raise MemoryError(str(error)) from None
            seconds = math.inf
        engine.drain()
        if seconds <= ROUND_SECONDS or block_bytes <= BLOCK_BYTES_MIN:
            return block_bytes
        block_bytes = max(block_bytes // 4 // BLOCK_BYTES_MIN * BLOCK_BYTES_MIN, BLOCK_BYTES_MIN)


def _other_threads_seconds() -> float:
    return time.process_time() - time.thread_time()


class _Traffic:
    """Runs copies of equal blocks, `COPIES_IN_FLIGHT` at a time in each requested direction."""

    def __init__(self, engine: Engine, block_bytes: int) -> None:
        self._engine = engine
        self._block_bytes = block_bytes
        self._sources = [_filled(engine, block_bytes) for _ in range(COPIES_IN_FLIGHT)]
        self._parked = [_out(engine, _filled(engine, block_bytes)) for _ in range(COPIES_IN_FLIGHT)]
        _await_all(self._parked, _has_left)
        engine.drain()

    def rates(self, *, out: bool = False, into: bool = False) -> tuple[float, float, float]:
        """Return the bytes per second out, those in, and the CPU seconds per byte that all other threads use.

        At least one copy is measured in each requested direction. The rate of a direction that is not requested is 0.
        """
        begun, processors_begun = time.perf_counter(), _other_threads_seconds()
        leaving = [_out(self._engine, source) for source in self._sources] if out else []
        arriving = list(self._parked) if into else []
        for slot in arriving:
            slot.prefetch()
        copies, last = [0, 0], [begun, begun]
        while True:
            enough = time.perf_counter() - begun >= ROUND_SECONDS
            if enough and (copies[0] or not out) and (copies[1] or not into):
                break
            for at in range(len(leaving)):
                if _has_left(leaving[at]):
                    copies[0] += 1
                    last[0] = time.perf_counter()
                    leaving.pop(at)  # freed first, because the same bytes can have only one SwappedStorage
                    leaving.insert(at, _out(self._engine, self._sources[at]))
            for slot in arriving:
                if _has_arrived(slot):
                    slot.swap_in()
                    copies[1] += 1
                    last[1] = time.perf_counter()
                    slot.prefetch()
            time.sleep(POLL_SECONDS if self._block_bytes >= POLL_BYTES_MIN else 0)
        _await_all(leaving, _has_left)
        _await_all(arriving, _has_arrived)
        for slot in arriving:
            slot.swap_in()
        moved = [count * self._block_bytes for count in copies]
        ended = [copies[0] + len(leaving), copies[1] + len(arriving)]
        return (
            moved[0] / (last[0] - begun) if copies[0] else 0.0,
            moved[1] / (last[1] - begun) if copies[1] else 0.0,
            (_other_threads_seconds() - processors_begun) / (sum(ended) * self._block_bytes),
        )

    def close(self) -> None:
        """Free all blocks."""
        self._parked.clear()
        self._sources.clear()
