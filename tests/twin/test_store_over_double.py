"""The swap store over the double of libcuda: every entry point fails at every call, once, and nothing is lost."""

import errno
import threading
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
from faults.inject import inject_fault
from twin.double import ENTRY_POINTS, the_double

from offload import _core

NBYTES = 40_000  # three slices
SMALL_NBYTES = 9_000  # shares its transfer with others
BLOCKS = 6
SLAB_BYTES = 64 << 10


def make_store(directory, slabs=4):
    driver = the_double().driver()
    lanes = _core.HostDriver()
    return _core.SwapStore.slab(
        driver, lanes, slabs * SLAB_BYTES, directory, slab_bytes=SLAB_BYTES, slice_bytes=16 << 10
    )


class Swapped:
    def __init__(self, store, number):
        nbytes = NBYTES if number % 3 == 0 else SMALL_NBYTES
        self.block = _core.HostBlock(nbytes, 4096, 0)
        self.source = np.frombuffer(self.block, dtype=np.uint8)
        self.source[:] = np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)
        self.expected = self.source.tobytes()
        self.number = number
        self.swap_out(store)

    def swap_out(self, store):
        self.ticket = store.swap_out(self.block.address, len(self.expected), 0, self.number)

    def leave(self, store):
        self.ticket.wait_out(0)
        if self.ticket.state == "failed":  # told late, as its copy was issued late: the source is whole, try again
            assert " failed with code 2" in self.ticket.failure
            assert self.source.tobytes() == self.expected
            self.swap_out(store)
            self.ticket.wait_out(0)
        self.source[:] = 0xDB

    def come_back(self, asked_for=nullcontext):
        target = _core.HostBlock(len(self.expected), 4096, 0)
        with asked_for():
            self.ticket.prefetch(target.address, 0, target)
        self.ticket.swap_in(0)
        assert np.frombuffer(target, dtype=np.uint8).tobytes() == self.expected


def tried(errors, action, store=None):
    """Does it; where a call of the driver failed, says so and does it again."""
    try:
        return action()
    except _core.DriverError as error:
        errors.append(error)
        if store is not None and isinstance(error, _core.PinningFailed):
            store.trim()  # who frees memory says so
        return action()


@contextmanager
def standing_still(double, until_called):
    """Copies that are queued meanwhile begin once somebody has come to `until_called`."""
    before = double.count(until_called)
    double.hold_streams(True)
    try:
        yield
        while double.count(until_called) == before:  # the test's own timeout ends it where nobody ever comes
            time.sleep(0.001)
    finally:
        double.hold_streams(False)


def exercise(directory, asked_for=nullcontext):
    """A store's life: blocks go out and come back, each step tried again once.

    With a `directory` they are more than pinned memory holds. `asked_for` is around the prefetch of one block of
    several slices.
    """
    errors = []
    store = tried(errors, lambda: make_store(directory, slabs=2 if directory else BLOCKS))
    swapped = []
    for number in range(BLOCKS):
        swapped.append(tried(errors, lambda number=number: Swapped(store, number), store))
    for each in swapped:
        tried(errors, lambda each=each: each.leave(store), store)
    for each in reversed(swapped[1:]):
        tried(errors, each.come_back)
    tried(errors, lambda: swapped[0].come_back(asked_for))
    for each in swapped[:2]:  # a retained graph
        tried(errors, each.come_back)
    for each in swapped:
        each.ticket.release()
    tried(errors, store.trim)
    tried(errors, store.quiesce)
    return store, errors


@pytest.fixture
def double():
    double = the_double()
    double.forget_faults()
    yield double
    double.forget_faults()
    assert double.first_violation == ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_every_call_fails_once(tmp_path, double, name, spills):
    # Whether anybody waits for a copy is the threads' to decide, but where copies stand still.
    asked_for = partial(standing_still, double, name) if name == "cuEventSynchronize" else nullcontext
    failed = 0
    for nth in range(1, 1000):
        before = double.count(name)
        double.fail_at(name, nth)
        store, errors = exercise(str(tmp_path) if spills else "", asked_for)
        stats = tried(errors, store.stats)
        del store
        reached = double.count(name) - before >= nth
        double.forget_faults()
        assert stats["live_tickets"] == 0, (nth, stats)
        assert stats["spill_used_bytes"] == 0, (nth, stats)
        assert (stats["spilled_bytes"] > 0) == spills, (nth, stats)
        for error in errors:
            assert (error.call, error.code) == (name, 2), (nth, error)
        if not reached:
            assert errors == []
            break
        failed += 1
    assert failed > 0, f"{name} is never called"


def test_pool_and_handles_return_to_zero(double):
    handles, registrations = double.live_handles, double.registrations
    store, errors = exercise("")
    assert errors == []
    assert store.stats()["pool_used_bytes"] == 0
    assert store.stats()["pool_held_bytes"] == 0, "trimmed"
    del store
    double.await_live_handles(handles)
    assert double.registrations <= registrations


@pytest.mark.parametrize("nth", [1, 2])
def test_a_store_that_cannot_be_made_leaves_nothing(tmp_path, double, nth):
    left = []
    for _ in range(3):
        double.fail_at("cuStreamCreate", nth)
        with pytest.raises(_core.DriverError, match="cuStreamCreate failed with code 2"):
            make_store(str(tmp_path))
        left.append((double.live_handles, double.registrations))
    assert left[0] >= left[1] >= left[2]  # a store of the test before may still be going


def test_pinning_fails_and_is_typed(double):
    store = make_store("")
    double.fail_at("cuMemHostRegister_v2", 1)
    with pytest.raises(_core.DriverError, match="asked to pin 65536 bytes, failed after 0; lower host_limit"):
        Swapped(store, 0)
    assert store.stats()["pool_held_bytes"] == 0
    assert store.stats()["live_tickets"] == 0
    store.trim()
    swapped = Swapped(store, 0)
    swapped.leave(store)
    swapped.come_back()


def test_disk_and_driver_fail_together(tmp_path, double):
    store = make_store(str(tmp_path), slabs=3)
    inject_fault(store, "write", "error", nth=1, error_number=errno.ENOSPC)
    swapped = [Swapped(store, 3 * number) for number in range(3)]
    double.fail_at("cuMemcpyHtoDAsync_v2", 2)
    errors = []
    for each in swapped:
        each.leave(store)
    for each in swapped:
        tried(errors, each.come_back)
    assert [error.call for error in errors] == ["cuMemcpyHtoDAsync_v2"]
    stats = store.stats()
    assert (stats["failed"], stats["spilled_bytes"] > 0) == (1, True)


def test_a_failed_wait_spills_nothing_early(tmp_path, double):
    """Where the spill cannot wait for its copy-out, the block stays: its bytes are not there yet."""
    store = make_store(str(tmp_path))
    double.hold_streams(True)
    swapped = [Swapped(store, 3 * number) for number in range(3)]  # all that fit
    double.fail_at("cuEventSynchronize", 1)
    threading.Timer(0.3, double.hold_streams, [False]).start()
    swapped.append(Swapped(store, 9))
    for each in swapped:
        each.leave(store)
    for each in swapped:
        each.come_back()
    assert store.stats()["spilled_bytes"] > 0


def await_state(ticket, state):
    while ticket.state != state:  # the test's own timeout ends it where it never comes
        time.sleep(0.001)


def test_a_copy_in_that_outlives_its_slot_is_counted_with_its_bytes_and_time(double):
    """The host frees a slot as soon as it has queued the consumer: the device is then often behind."""
    store = make_store("")
    swapped = Swapped(store, 0)
    swapped.leave(store)
    target = _core.HostBlock(NBYTES, 4096, 0)
    double.hold_streams(True)
    swapped.ticket.prefetch(target.address, 0, target)
    threading.Timer(0.3, double.hold_streams, [False]).start()
    await_state(swapped.ticket, "arriving")
    swapped.ticket.release()
    stats = store.stats()
    assert (stats["in_seconds"] > 0) == (stats["in_bytes"] > 0) == (stats["in_copies"] > 0)
    store.quiesce()
    stats = store.stats()
    assert (stats["in_copies"], stats["in_bytes"]) == (1, NBYTES)
    assert stats["in_seconds"] > 0


def test_a_copy_in_that_fails_leaves_the_source_to_its_copy_out(double):
    store = make_store("")
    double.hold_streams(True)
    swapped = Swapped(store, 0)
    target = _core.HostBlock(NBYTES, 4096, 0)
    double.fail_at("cuStreamWaitEvent", 1)
    double.fail_at("cuStreamSynchronize", 1)  # it would wait for what is held
    swapped.ticket.prefetch(target.address, 0, target)
    await_state(swapped.ticket, "out")
    assert not swapped.ticket.out_done()
    double.hold_streams(False)
    swapped.leave(store)
    swapped.come_back()
