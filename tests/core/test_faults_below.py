"""The store where memory cannot be pinned, or hardly any may be: typed errors, no deadlock, nothing kept."""

import errno
import itertools
import threading
import time

import numpy as np
import pytest
from faults.inject import inject_fault
from fresh_python import run_fresh_python
from twin.double import Double

from offload import _core

OUT_OF_MEMORY = 2  # CUDA's code
BLOCK_BYTES = 64 << 10


class Trip:
    """A block that leaves and comes back."""

    def __init__(self, store, number):
        self.source = _core.HostBlock(BLOCK_BYTES)
        self.target = _core.HostBlock(BLOCK_BYTES)
        self.value = number % 251
        np.frombuffer(self.source, dtype=np.uint8)[:] = self.value
        self.ticket = store.swap_out(self.source.address, BLOCK_BYTES, 0)

    def wait_copied_out(self):
        self.ticket.wait_out(0)
        while not self.ticket.out_done():  # where waiting is the compute stream's, not this thread's
            time.sleep(0.0001)
        np.frombuffer(self.source, dtype=np.uint8)[:] = 0xDB

    def come_back(self):
        self.ticket.prefetch(self.target.address, 0, self.target)
        self.ticket.swap_in(0)

    def is_whole(self):
        return bool((np.frombuffer(self.target, dtype=np.uint8) == self.value).all())


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    return Double(tmp_path_factory.mktemp("machine"), caller_is_legacy=False)  # one that no other test pins with


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_pinning_fails_at_the_nth_slab(double, nth, campaign_counts):
    store = _core.SwapStore.slab(
        double.driver(), _core.HostDriver(), 4 * BLOCK_BYTES, slab_bytes=BLOCK_BYTES, slice_bytes=16 << 10
    )
    registered = double.registrations
    double.fail_at("cuMemHostRegister_v2", nth, OUT_OF_MEMORY)
    trips = [Trip(store, number) for number in range(nth - 1)]
    with pytest.raises(_core.PinningFailed, match="cuMemHostRegister") as raised:
        Trip(store, nth)
    assert raised.value.code == OUT_OF_MEMORY
    campaign_counts["faults injected"] += 1
    stats = store.stats()
    assert stats["live_tickets"] == nth - 1
    assert stats["pool_held_bytes"] == stats["pool_used_bytes"] == (nth - 1) * BLOCK_BYTES
    store.trim()  # asks for what was refused again
    trips.append(Trip(store, nth))  # the fault has passed
    for trip in trips:
        trip.wait_copied_out()
        trip.come_back()
    store.quiesce()
    assert all(trip.is_whole() for trip in trips)
    for trip in trips:
        trip.ticket.release()
    store.quiesce()
    store.trim()
    stats = store.stats()
    assert (stats["live_tickets"], stats["pool_used_bytes"], stats["pool_held_bytes"]) == (0, 0, 0)
    assert double.registrations == registered
    assert double.first_violation == ""


def test_a_refused_pinning_is_not_tried_again(double):
    """Nor is anything larger, until a slab goes back or somebody trims; each is told what the first was told."""
    store = _core.SwapStore.slab(
        double.driver(), _core.HostDriver(), 16 * BLOCK_BYTES, slab_bytes=BLOCK_BYTES, slice_bytes=16 << 10
    )
    source = _core.HostBlock(3 * BLOCK_BYTES)

    def attempt(nbytes):
        """How often pinning was tried, and the ticket where it was got."""
        before = double.count("cuMemHostRegister_v2")
        ticket, text = None, ""
        try:
            ticket = store.swap_out(source.address, nbytes, 0)
        except _core.PinningFailed as error:
            text = str(error)
        return double.count("cuMemHostRegister_v2") - before, ticket, text

    def refuse_next():
        double.fail_at("cuMemHostRegister_v2", 1, OUT_OF_MEMORY)

    refuse_next()
    tried, _, first = attempt(2 * BLOCK_BYTES)
    assert (tried, "asked to pin 131072 bytes" in first) == (1, True)
    assert attempt(2 * BLOCK_BYTES) == (0, None, first)
    assert attempt(3 * BLOCK_BYTES) == (0, None, first)
    tried, small, text = attempt(BLOCK_BYTES)
    assert (tried, text) == (1, ""), "less may be had"
    refuse_next()
    assert attempt(BLOCK_BYTES)[0] == 1
    assert attempt(BLOCK_BYTES)[0] == 0
    assert store.stats()["live_tickets"] == 1
    small.release()
    store.quiesce()
    assert store.trim() == BLOCK_BYTES
    tried, ticket, text = attempt(2 * BLOCK_BYTES)
    assert (tried, text) == (1, "")
    ticket.release()
    store.quiesce()
    assert double.first_violation == ""


def test_where_no_more_can_be_pinned_what_is_pinned_goes_to_disk(double, tmp_path):
    """As where `host_limit` is reached: a refusal only makes the limit smaller."""
    store = _core.SwapStore.slab(
        double.driver(),
        _core.HostDriver(),
        16 * BLOCK_BYTES,
        str(tmp_path),
        slab_bytes=2 * BLOCK_BYTES,
        slice_bytes=16 << 10,
    )
    trips = [Trip(store, 1)]
    double.fail_at("cuMemHostRegister_v2", 1, OUT_OF_MEMORY)
    trips += [Trip(store, number) for number in range(2, 9)]
    stats = store.stats()
    assert stats["pool_held_bytes"] < 4 * BLOCK_BYTES
    assert stats["spilled_bytes"] >= 4 * BLOCK_BYTES
    with pytest.raises(_core.PinningFailed, match="asked to pin"):  # no slab is as large: nothing could make room
        store.swap_out(trips[0].source.address, 5 * BLOCK_BYTES, 0)
    for trip in trips:
        trip.wait_copied_out()
        trip.come_back()
    store.quiesce()
    assert all(trip.is_whole() for trip in trips)
    assert double.first_violation == ""


def test_a_prefetch_that_is_refused_keeps_no_target(tmp_path):
    """In a process of its own: where other tests have left free memory, malloc would place the target there."""
    script = """
        import sys
        from pathlib import Path
        from offload import _core

        def is_mapped(address):
            ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
            return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)

        nbytes = 64 << 20
        store = _core.SwapStore.direct(_core.HostDriver(), sys.argv[1])
        source = _core.HostBlock(nbytes)
        ticket = store.swap_out(source.address, nbytes, 0)
        target = _core.HostBlock(nbytes)
        middle = target.address + nbytes // 2
        assert is_mapped(middle)
        try:
            ticket.prefetch(target.address + 64, 0, target)
        except ValueError as error:
            print(error)
        del target
        assert not is_mapped(middle)
        ticket.wait_out(0)
    """
    assert "must be congruent" in run_fresh_python(script, str(tmp_path))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("spills", [True, False], ids=["with disk", "without"])
def test_eight_threads_and_one_block_of_memory(tmp_path, spills, is_full, campaign_counts):
    """Each waits for room that the others hold: all of them go on, and every byte is right."""
    lanes = _core.HostDriver()
    host_bytes_max = BLOCK_BYTES + (24 << 10 if spills else 0)  # beside the block: what reading from disk goes through
    directory = str(tmp_path) if spills else ""
    store = _core.SwapStore.slab(
        lanes, lanes, host_bytes_max, directory, slab_bytes=host_bytes_max, slice_bytes=16 << 10
    )
    end = time.monotonic() + (60 if is_full else 2)
    done, wrong = [0] * 8, []

    def work(thread):
        for number in itertools.count(thread):
            if time.monotonic() > end:
                return
            try:
                trip = Trip(store, number)
            except _core.PoolExhausted:
                time.sleep(0.0001)  # the one block is on its way back to somebody
                continue
            trip.wait_copied_out()
            trip.come_back()
            if not trip.is_whole():
                wrong.append((thread, number))
            trip.ticket.release()
            done[thread] += 1

    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end + 300 - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads), f"deadlock after {done} blocks"
    assert wrong == []
    assert min(done) > 0, done
    store.quiesce()
    stats = store.stats()
    assert (stats["live_tickets"], stats["spill_used_bytes"]) == (0, 0)
    assert (stats["spilled_bytes"] > 0) == spills
    campaign_counts["blocks through a memory of one"] += sum(done)


@pytest.mark.parametrize("kind", ["error", "wrong_block"])
def test_one_block_of_memory_and_a_disk_that_fails(tmp_path, kind, campaign_counts):
    """Room that cannot be made is refused with its numbers; a read that fails can be repeated."""
    lanes = _core.HostDriver()
    store = _core.SwapStore.slab(lanes, lanes, 88 << 10, str(tmp_path), slab_bytes=88 << 10, slice_bytes=16 << 10)
    first = Trip(store, 1)
    first.wait_copied_out()
    operation = "write" if kind == "error" else "read"
    inject_fault(store, operation, kind, error_number=errno.ENOSPC, persistent=True)
    campaign_counts["faults injected"] += 1
    if operation == "write":
        with pytest.raises(_core.PoolExhausted, match=r"asked 65536 bytes, \d+ free of 90112; raise host_limit"):
            Trip(store, 2)
    else:
        second = Trip(store, 2)
        second.wait_copied_out()
        for _ in range(3):
            with pytest.raises(OSError, match=f"offset .* of {tmp_path}"):
                first.come_back()
        inject_fault(store, "read", "error", nth=0)
        second.ticket.release()
    first.come_back()
    assert first.is_whole()
    first.ticket.release()
    store.quiesce()
    assert store.stats()["live_tickets"] == 0
