"""A child process: round after round, one more allocation on the lanes succeeds before some fail.

Prints how often a copy-out, a copy-in and a spill failed.
"""

import ctypes
import faulthandler
import json
import sys

import numpy as np
from core.store_rig import POISON, Source, make_store

from offload import _core

ROUNDS_MAX = 2000
SPARED_MAX = 10  # rounds in a row with fewer allocations than would fail: how many there are depends on timing
SIZES = [3000, 9000, 5000, 70_000, 6000, 6000, 5000, 150_000, 7000, 4097, 5000]


def leave(source):
    """Whether the bytes have left. A source whose copy failed is whole."""
    source.leave()
    if source.ticket.state != "failed":
        return True
    assert source.ticket.failure == "std::bad_alloc"
    assert source.array.tobytes() == source.expected
    return False


def come_back(source, end_fault):
    """How often that was refused: what failed can be asked for again."""
    source.begin_return()
    try:
        source.finish_return()
    except MemoryError:
        assert source.array.tobytes() == bytes([POISON]) * len(source.expected)
        end_fault()
        source.begin_return()
        source.finish_return()
        return 1
    return 0


def run_round(tier, directory, nth, times, fail_on_lanes):
    """Returns how many allocations the lanes asked for, and how many copies out, in and to the disk failed."""
    store = make_store(tier, directory, "delays", nth, host_bytes_max=128 << 10, slab_bytes=32 << 10)
    store.record_copies(4 * len(SIZES))
    generator = np.random.default_rng(nth)
    asked = 0

    def end_fault():
        nonlocal asked
        asked += fail_on_lanes(0, 0)

    fail_on_lanes(nth, times)
    sources = []
    for nbytes in SIZES:
        try:
            sources.append(Source(store, generator, nbytes))
        except _core.PoolExhausted:
            continue
    away = [source for source in sources if leave(source)]
    failed_in = sum([come_back(source, end_fault) for source in away])
    end_fault()
    for source in sources:
        source.ticket.release()
    store.quiesce()
    stats = store.stats()
    assert stats["live_tickets"] == 0
    failed_out = len(sources) - len(away)
    return asked, failed_out, failed_in, stats["failed"] - failed_out


def main():
    preloaded, tier, directory, times = sys.argv[1:]
    fail_on_lanes = ctypes.CDLL(preloaded).fail_on_lanes
    fail_on_lanes.argtypes, fail_on_lanes.restype = [ctypes.c_long, ctypes.c_long], ctypes.c_long
    totals = np.zeros(3, dtype=int)
    spared = 0
    for nth in range(1, ROUNDS_MAX):
        asked, *failed = run_round(tier, directory, nth, int(times), fail_on_lanes)
        totals += failed
        spared = spared + 1 if asked < nth else 0
        if spared == SPARED_MAX:
            break
    print(json.dumps({"rounds": nth, "out": int(totals[0]), "in": int(totals[1]), "spill": int(totals[2])}))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # what is stuck says where
    main()
