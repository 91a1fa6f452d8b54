"""A device that fails between two calls: nobody's memory is touched after its owner has heard, no slot is early."""

import os
import threading
import time

import numpy as np
import pytest
from core.store_rig import POISON, Source, make_store
from twin.build import build_machine

from offload import _core


def happens(condition, seconds_max=20):
    """Whether it comes true; generous, as the machine may be loaded."""
    end = time.monotonic() + seconds_max
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def test_a_failed_copy_in_is_told_after_its_earlier_slices(tmp_path, fake_cuda):
    store = make_store("slab", tmp_path, device=fake_cuda.driver())
    source = Source(store, np.random.default_rng(0), 150_000)  # three slices
    source.wait_copied_out()
    fake_cuda.hold_streams(True)
    issued = fake_cuda.count("cuMemcpyHtoDAsync_v2")
    fake_cuda.fail_at("cuMemcpyHtoDAsync_v2", 3)
    source.prefetch()
    while fake_cuda.count("cuMemcpyHtoDAsync_v2") < issued + 2:
        os.sched_yield()
    threading.Timer(0.2, fake_cuda.hold_streams, [False]).start()
    with pytest.raises(_core.DriverError, match="cuMemcpyHtoDAsync_v2"):
        source.ticket.swap_in(0)
    target = np.frombuffer(source.target, dtype=np.uint8)
    target[:] = POISON  # its owner does as it likes again
    fake_cuda.hold_streams(False)
    store.quiesce()
    assert (target == POISON).all()
    source.prefetch()
    source.swap_in()


def test_a_slot_waits_for_an_earlier_copy_in(tmp_path, fake_cuda):
    """The second prefetch has issued nothing when the ticket goes; the first one's copy still reads the slab."""
    lanes = _core.HostDriver(schedule="stepped")  # no lane runs unless somebody waits
    store = _core.SwapStore.slab(fake_cuda.driver(), lanes, 1 << 20, slab_bytes=256 << 10, slice_bytes=4 << 20)
    source = Source(store, np.random.default_rng(0), 1 << 20)
    source.wait_copied_out()
    fake_cuda.hold_streams(True)
    source.prefetch()
    source.ticket.swap_in(0)
    first_target = source.target
    second_target = _core.HostBlock(1 << 20)
    source.ticket.prefetch(second_target.address, 0, second_target)
    source.ticket.release()
    held_bytes = store.stats()["pool_used_bytes"]
    fake_cuda.hold_streams(False)
    store.quiesce()
    assert held_bytes == 1 << 20
    assert np.frombuffer(first_target, dtype=np.uint8).tobytes() == source.expected
    assert store.stats()["pool_used_bytes"] == 0


@pytest.mark.parametrize("nth", range(1, 13))
def test_an_event_that_cannot_be_recorded_ends_no_process(tmp_path, fake_cuda, nth):
    store = make_store("slab+disk", tmp_path, device=fake_cuda.driver(), host_bytes_max=512 << 10)
    generator = np.random.default_rng(0)
    sources = [Source(store, generator, 150_000) for _ in range(4)]
    for source in sources:
        source.wait_copied_out()
    store.quiesce()
    source = next(source for source in sources if source.ticket.state == "on_disk")
    fake_cuda.fail_at("cuEventRecord", nth)
    failed = []
    try:
        source.prefetch()
        source.swap_in()
    except _core.DriverError as error:
        failed.append(error.call)
    assert set(failed) <= {"cuEventRecord"}
    store.quiesce()
    fake_cuda.forget_faults()
    for each in sources:
        each.prefetch()
        each.swap_in()


def test_a_source_is_read_until_its_copy_out_ends_though_it_is_coming_back(tmp_path, fake_cuda):
    store = make_store("slab", tmp_path, device=fake_cuda.driver())
    fake_cuda.hold_streams(True)
    source = Source(store, np.random.default_rng(0), 150_000)
    source.prefetch()
    assert not source.ticket.out_done()
    waits = fake_cuda.count("cuStreamWaitEvent")
    source.ticket.wait_out(0)
    ordered = fake_cuda.count("cuStreamWaitEvent") - waits
    fake_cuda.hold_streams(False)
    source.swap_in()
    assert source.ticket.out_done()
    assert ordered > 0


def test_a_failed_wait_leaves_no_small_block_behind(tmp_path, fake_cuda):
    """Nobody calls wait_out: the feed lane alone gets the third transfer going."""
    store = make_store("slab", tmp_path, device=fake_cuda.driver())
    fake_cuda.hold_streams(True)
    fake_cuda.fail_at("cuEventSynchronize", 1)
    generator = np.random.default_rng(0)
    sources = []
    for _ in range(3):
        copies = fake_cuda.count("cuMemcpyDtoHAsync_v2")
        sources.append(Source(store, generator, 9_000))
        while len(sources) < 3 and fake_cuda.count("cuMemcpyDtoHAsync_v2") == copies:
            os.sched_yield()
    fake_cuda.hold_streams(False)
    assert happens(lambda: all(source.ticket.out_done() for source in sources))


def test_a_failed_wait_leaves_no_slice_behind(tmp_path, fake_cuda):
    """Nobody calls swap_in: the pump lane alone issues the third slice."""
    store = make_store("slab", tmp_path, device=fake_cuda.driver())
    source = Source(store, np.random.default_rng(0), 150_000)  # three slices
    source.wait_copied_out()
    fake_cuda.hold_streams(True)
    fake_cuda.fail_at("cuEventSynchronize", 1)
    source.prefetch()
    fake_cuda.hold_streams(False)
    assert happens(source.ticket.in_done)
    source.swap_in()


def test_what_came_back_before_it_had_left_spills_nothing_early(tmp_path, fake_cuda):
    """The spill's wait for the copy-out fails; the ticket is ready by then, as all of it has been issued."""
    store = make_store("slab+disk", tmp_path, device=fake_cuda.driver(), host_bytes_max=80 << 10)
    fake_cuda.hold_streams(True)
    source = Source(store, np.random.default_rng(0), 60_000)
    source.prefetch()
    source.ticket.swap_in(0)
    fake_cuda.fail_at("cuEventSynchronize", 1)
    threading.Timer(0.2, fake_cuda.hold_streams, [False]).start()
    other = Source(store, np.random.default_rng(1), 60_000)
    other.wait_copied_out()
    other.ticket.release()
    source.prefetch()
    source.swap_in()


@pytest.mark.long
def test_a_device_without_timings_still_swaps(tmp_path):
    library = build_machine(tmp_path / "libwithout.so", without=("cuEventElapsedTime",))
    store = make_store("slab+disk", tmp_path, device=_core.cuda_driver(0, str(library)), host_bytes_max=512 << 10)
    generator = np.random.default_rng(0)
    sources = [Source(store, generator, 150_000) for _ in range(4)]
    for source in sources:
        source.wait_copied_out()
        source.prefetch()
        source.swap_in()
        source.ticket.release()
    assert store.stats()["out_copies"] == 4


def test_copies_under_way_are_told_once_they_can_be_timed(tmp_path, fake_cuda):
    store = make_store("slab", tmp_path, device=fake_cuda.driver())
    store.record_copies(10)
    fake_cuda.hold_streams(True)
    sources = [Source(store, np.random.default_rng(0), 150_000) for _ in range(2)]
    fake_cuda.fail_at("cuEventQuery", 2)
    with pytest.raises(_core.DriverError, match="cuEventQuery"):
        store.take_copies()
    assert store.take_copies() == []
    fake_cuda.hold_streams(False)
    for source in sources:
        source.wait_copied_out()
    told = store.take_copies()
    assert [ticket for _, ticket, *_ in told] == [source.ticket.id for source in sources]
    assert all(begin > 0 for *_, begin, _ in told)
