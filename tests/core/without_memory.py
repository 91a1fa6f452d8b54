"""A child process: round after round, one more allocation on the lanes, or of the caller, succeeds before some fail.

Prints how often a copy-out, a copy-in and a spill failed; for the caller, how often each call met the failure.
"""

import ctypes
import faulthandler
import json
import sys
from collections import Counter

import numpy as np
from core.store_rig import POISON, Source, make_store

from offload import _core

ROUNDS_MIN, ROUNDS_MAX = 60, 2000
CALLER_MAX = 60  # allocations of one call, and some: a call that spills others makes most
SPARED_MAX = 10  # rounds in a row with fewer allocations than would fail: how many there are depends on timing
SIZES = [3000, 9000, 5000, 70_000, 6000, 6000, 5000, 150_000, 7000, 4097, 5000]


def leave(source):
    """Whether the bytes have left. A source whose copy failed is whole."""
    source.wait_copied_out()
    if source.ticket.state != "failed":
        return True
    assert source.ticket.failure == "std::bad_alloc"
    assert source.array.tobytes() == source.expected
    return False


def come_back(source, end_fault):
    """How often that was refused: what failed can be asked for again."""
    source.prefetch()
    try:
        source.swap_in()
    except MemoryError:
        assert source.array.tobytes() == bytes([POISON]) * len(source.expected)
        end_fault()
        source.prefetch()
        source.swap_in()
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


class Caller:
    """This thread's calls of a store, each with its `nth` allocation failing, and then once more without."""

    def __init__(self, nth, fail, met):
        self.nth, self.fail, self.met = nth, fail, met

    def call(self, name, function, check):
        """What `function` returns; where it was refused, `check` says that it has done nothing."""
        self.fail(False, self.nth, 1)
        try:
            return function()
        except MemoryError as error:
            if type(error) is not MemoryError:
                raise  # the pool is full
        finally:
            self.met[name] += self.fail(False, 0, 0) >= self.nth
        check()
        return function()


def swap_out(store, caller, source):
    """A source of its own kind: its swap_out may be refused, which leaves no ticket and no block behind."""
    live = store.stats()["live_tickets"]

    def check():
        assert store.stats()["live_tickets"] == live

    source.ticket = caller.call(
        "swap_out", lambda: store.swap_out(source.block.address, len(source.expected), 0, need=0), check
    )


def prefetch(store, caller, source):
    """It may be refused: then nothing is ever written to the target, and the ticket is as it was."""
    nbytes = len(source.expected)
    state = source.ticket.state
    refused = _core.HostBlock(nbytes, 4096, source.residue)
    source.target = refused
    array = np.frombuffer(refused, dtype=np.uint8)
    array[:] = POISON

    def begin():
        source.ticket.prefetch(source.target.address, 0, source.target)

    def check():
        store.quiesce()  # whatever was begun has ended
        assert source.ticket.state in (state, "out", "on_disk"), source.ticket.state
        assert array.tobytes() == bytes([POISON]) * nbytes, "a refused prefetch wrote to its target"
        source.target = _core.HostBlock(nbytes, 4096, source.residue)

    caller.call("prefetch", begin, check)


class Bytes(Source):
    """A source that has not been swapped out yet."""

    def __init__(self, generator, nbytes):
        super().__init__(self, generator, nbytes)

    def swap_out(self, *_, **__):
        """No store."""


def run_caller(tier, directory, nth, fail, met):
    """One round: every block leaves, comes back and is dropped; no ticket is left, nor, but for drops, any byte."""
    store = make_store(tier, directory, "delays", nth, host_bytes_max=128 << 10, slab_bytes=32 << 10)
    store.record_copies(4 * len(SIZES))
    idle = store.stats()
    generator = np.random.default_rng(nth)
    caller = Caller(nth, fail, met)
    sources = []
    for nbytes in SIZES:
        source = Bytes(generator, nbytes)
        try:
            swap_out(store, caller, source)
        except _core.PoolExhausted:
            continue
        sources.append(source)
    away = [source for source in sources if leave(source)]  # one that waited may have failed in a later one's call
    for source in away:
        prefetch(store, caller, source)
        source.swap_in()
    drops_without = nth % 2 == 0  # a block whose place cannot be noted stays counted as used
    for source in sources:
        if drops_without:
            caller.call("release", source.ticket.release, lambda: None)
        source.ticket.release()
    store.quiesce()
    stats = store.stats()
    assert stats["live_tickets"] == 0, (nth, stats)
    if drops_without:
        return
    for name in ("pool_requested_bytes", "spill_used_bytes"):
        assert stats[name] == idle[name], (nth, name, stats)
    store.trim()
    assert store.stats()["pool_held_bytes"] == idle["pool_held_bytes"], (nth, "a slab is lost")


def main():
    preloaded, tier, directory, times = sys.argv[1:]
    fail = ctypes.CDLL(preloaded).fail
    fail.argtypes, fail.restype = [ctypes.c_bool, ctypes.c_long, ctypes.c_long], ctypes.c_long
    if times == "caller":
        met = Counter()
        for nth in range(1, CALLER_MAX):
            faulthandler.dump_traceback_later(100, exit=True)
            run_caller(tier, directory, nth, fail, met)
        return print(json.dumps(met))
    totals = np.zeros(3, dtype=int)
    spared = 0
    for nth in range(1, ROUNDS_MAX):
        faulthandler.dump_traceback_later(100, exit=True)  # what is stuck says where
        asked, *failed = run_round(tier, directory, nth, int(times), lambda *when: fail(True, *when))
        totals += failed
        spared = spared + 1 if asked < nth else 0
        if spared >= SPARED_MAX and nth >= ROUNDS_MIN:
            break
    print(json.dumps({"rounds": nth, "out": int(totals[0]), "in": int(totals[1]), "spill": int(totals[2])}))


if __name__ == "__main__":
    main()
