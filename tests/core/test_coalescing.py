"""Small blocks that wait side by side become one transfer; each keeps a state and a failure of its own."""

import errno
import time

import numpy as np
import pytest
from core.store_rig import Source, make_store
from faults.inject import inject_fault
from twin.build import build_machine

from offload import _core

SMALL_BYTES = 20_000
COUNT = 16


@pytest.fixture
def produced_at_once(fake_cuda):
    """The double, where each block is produced when it is swapped out, although copies are held."""
    fake_cuda.caller_is_legacy(True)
    yield fake_cuda
    fake_cuda.caller_is_legacy(False)


def small_sources(store, count=COUNT):
    generator = np.random.default_rng(0)
    return [Source(store, generator, SMALL_BYTES) for _ in range(count)]


def cuda_store(tmp_path, fake_cuda, slice_bytes=64 << 10, **options):
    return make_store("slab", tmp_path, device=fake_cuda.driver(), slice_bytes=slice_bytes, **options)


def test_waiting_copy_outs_share_transfers(tmp_path, produced_at_once):
    store = cuda_store(tmp_path, produced_at_once)
    batches_before = produced_at_once.count("cuMemcpyBatchAsync")
    produced_at_once.hold_streams(True)  # two transfers are in flight; what comes then gathers
    sources = small_sources(store)
    produced_at_once.hold_streams(False)
    for source in sources:
        source.wait_copied_out()
    stats = store.stats()
    assert stats["out_copies"] == COUNT
    assert COUNT * SMALL_BYTES / (64 << 10) <= stats["out_transfers"] <= COUNT / 2
    assert produced_at_once.count("cuMemcpyBatchAsync") > batches_before
    for source in sources:
        source.prefetch()
        source.swap_in()


def test_waiting_copy_ins_share_transfers(tmp_path, fake_cuda):
    store = cuda_store(tmp_path, fake_cuda)
    sources = small_sources(store)
    for source in sources:
        source.wait_copied_out()
    fake_cuda.hold_streams(True)
    for source in sources:
        source.prefetch()
    fake_cuda.hold_streams(False)
    for source in sources:
        while not source.ticket.in_done():  # nobody is in a hurry
            time.sleep(0)
        source.swap_in()
    stats = store.stats()
    assert stats["in_copies"] == COUNT
    assert stats["in_transfers"] <= COUNT / 2


def test_one_event_pair_for_a_batch(tmp_path, produced_at_once):
    store = cuda_store(tmp_path, produced_at_once, slice_bytes=1 << 20)
    store.record_copies(100)
    produced_at_once.hold_streams(True)
    sources = small_sources(store)
    produced_at_once.hold_streams(False)
    for source in sources:
        source.wait_copied_out()
    times = {(begin, end) for _, _, _, begin, end in store.take_copies()}
    assert len(times) == store.stats()["out_transfers"] < COUNT


@pytest.mark.long
def test_a_driver_without_batches_copies_one_by_one(tmp_path):
    library = build_machine(tmp_path / "libwithout.so", without=("cuMemcpyBatchAsync",))
    store = make_store("slab", tmp_path, device=_core.cuda_driver(0, library=str(library)))
    for source in small_sources(store):
        source.wait_copied_out()
        source.prefetch()
        source.swap_in()


def test_a_device_that_refuses_batches_copies_one_by_one(tmp_path, fake_cuda):
    store = cuda_store(tmp_path, fake_cuda)
    fake_cuda.fail_at("cuMemcpyBatchAsync", 1, code=801)
    batches = fake_cuda.count("cuMemcpyBatchAsync")
    sources = gathered(store, fake_cuda)  # 14 blocks, of which three fit into a transfer
    fake_cuda.hold_streams(False)
    for source in sources:
        source.wait_copied_out()
    assert fake_cuda.count("cuMemcpyBatchAsync") == batches + 1, "it is not asked again"
    for source in sources:
        source.prefetch()
        source.swap_in()
    assert store.stats()["failed"] == 0


def gathered(store, fake_cuda):
    """Sources of which all but the first two wait in one queue, the streams held."""
    fake_cuda.hold_streams(True)
    sources = []
    for count in (1, 1, COUNT - 2):  # two transfers in flight, and then a queue
        sources += small_sources(store, count)
        while count == 1 and sources[-1].ticket.state == "queued":
            time.sleep(0)
    return sources


def test_who_needs_a_queued_block_leaves_those_behind_it_to_be_joined(tmp_path, fake_cuda):
    store = cuda_store(tmp_path, fake_cuda, slice_bytes=1 << 20)
    sources = gathered(store, fake_cuda)
    sources[3].prefetch()
    assert [source.ticket.state == "queued" for source in sources] == [False] * 4 + [True] * (COUNT - 4)
    fake_cuda.hold_streams(False)
    for source in sources:
        source.wait_copied_out()
    sources[3].swap_in()


def test_a_failed_batch_fails_only_the_block_that_fails_alone(tmp_path, fake_cuda):
    store = cuda_store(tmp_path, fake_cuda, slice_bytes=1 << 20)
    sources = gathered(store, fake_cuda)
    waiting = sources[2:]
    assert {source.ticket.state for source in waiting} == {"queued"}
    fake_cuda.fail_at("cuMemcpyBatchAsync", 1)
    fake_cuda.fail_at("cuMemcpyDtoHAsync_v2", 2)
    fake_cuda.hold_streams(False)
    for source in sources:
        source.wait_copied_out()
    failed = [source for source in sources if source.ticket.state == "failed"]
    assert len(failed) == 1
    assert failed[0] in waiting
    assert failed[0].array.tobytes() == failed[0].expected
    assert "cuMemcpyDtoHAsync_v2" in failed[0].ticket.failure
    with pytest.raises(RuntimeError, match="nothing was swapped out"):
        failed[0].prefetch()
    for source in sources:
        if source is not failed[0]:
            source.prefetch()
            source.swap_in()
        source.ticket.release()
    assert store.stats()["live_tickets"] == store.stats()["pool_requested_bytes"] == 0


def test_a_failed_batch_of_copy_ins_can_be_repeated(tmp_path, fake_cuda):
    store = cuda_store(tmp_path, fake_cuda, slice_bytes=1 << 20)
    sources = small_sources(store)
    for source in sources:
        source.wait_copied_out()
    fake_cuda.hold_streams(True)
    for number, source in enumerate(sources):
        source.prefetch()
        while number < 2 and source.ticket.state == "copying_in":
            time.sleep(0)
    waiting = sources[2:]
    assert {source.ticket.state for source in waiting} == {"copying_in"}
    fake_cuda.fail_at("cuMemcpyBatchAsync", 1)
    fake_cuda.fail_at("cuMemcpyHtoDAsync_v2", 3)
    fake_cuda.hold_streams(False)
    for source in sources:
        while not source.ticket.in_done():
            time.sleep(0)
    errors = {}
    for source in sources:
        try:
            source.swap_in()
        except _core.DriverError as error:
            errors[source] = error.call
            source.prefetch()
            source.swap_in()
    assert list(errors.values()) == ["cuMemcpyHtoDAsync_v2"]
    assert set(errors) <= set(waiting)


def test_a_waiting_copy_out_can_be_taken_back(tmp_path, fake_cuda):
    store = cuda_store(tmp_path, fake_cuda, slice_bytes=1 << 20)
    sources = gathered(store, fake_cuda)
    waiting = sources[2:]
    assert waiting[0].ticket.cancel()
    assert waiting[0].ticket.state == "cancelled"
    waiting[1].ticket.release()  # nobody wants it any more: the same
    assert not sources[0].ticket.cancel()
    fake_cuda.hold_streams(False)
    for source in sources:
        if source is not waiting[1]:
            source.wait_copied_out()
    assert store.stats()["cancelled"] == 2
    assert store.stats()["out_copies"] == COUNT - 2
    assert waiting[0].array.tobytes() == waiting[0].expected


def test_a_full_pool_issues_what_waits(tmp_path):
    store = make_store("slab+disk", tmp_path, "stepped", slice_bytes=256 << 10, host_bytes_max=256 << 10)
    sources = small_sources(store, 40)  # three times the pool
    for source in sources:
        source.wait_copied_out()
        source.prefetch()
        source.swap_in()
    assert store.stats()["spilled_bytes"] > 0


@pytest.mark.parametrize("tier", ["direct", "slab"])
@pytest.mark.parametrize("seed", range(8))
def test_coalesced_under_every_schedule(tmp_path, tier, seed):
    store = make_store(tier, tmp_path, "stepped", seed, slice_bytes=256 << 10)
    sources = small_sources(store)
    sources[-1].wait_copied_out()
    for source in sources:
        source.wait_copied_out()
    assert store.stats()["out_transfers"] < store.stats()["out_copies"] == COUNT
    for source in sources:
        source.prefetch()
    store.quiesce()
    assert store.stats()["in_transfers"] < store.stats()["in_copies"] == COUNT
    for source in sources:
        source.swap_in()


@pytest.mark.parametrize("seed", range(4))
def test_a_failed_write_is_its_own_blocks(tmp_path, seed):
    store = make_store("direct", tmp_path, "stepped", seed, slice_bytes=256 << 10)
    inject_fault(store, "write", "error", nth=5, error_number=errno.EIO)
    sources = small_sources(store)
    for source in sources:
        source.wait_copied_out()
    assert [number for number, source in enumerate(sources) if source.ticket.state == "failed"] == [4]
    assert sources[4].array.tobytes() == sources[4].expected
    assert store.stats()["out_transfers"] < COUNT
    del sources[4]
    for source in sources:
        source.prefetch()
        source.swap_in()
        source.ticket.release()
    assert store.stats()["spill_used_bytes"] == 0


@pytest.mark.parametrize("kind", ["error", "wrong_block"])
def test_a_failed_read_is_its_own_blocks(tmp_path, kind):
    store = make_store("direct", tmp_path, "stepped", slice_bytes=256 << 10)
    sources = small_sources(store)
    for source in sources:
        source.wait_copied_out()
    inject_fault(store, "read", kind, nth=5, error_number=errno.EIO)
    for source in sources:
        source.prefetch()
    store.quiesce()
    assert store.stats()["in_transfers"] < COUNT
    for number, source in enumerate(sources):
        if number == 4:
            with pytest.raises(OSError, match="offset"):
                source.swap_in()
            source.prefetch()
        source.swap_in()


def test_a_full_disk_fails_each_block(tmp_path):
    store = make_store("direct", tmp_path, "stepped")
    inject_fault(store, "allocate", "error", error_number=errno.ENOSPC, persistent=True)
    sources = small_sources(store)
    for source in sources:
        source.wait_copied_out()
    assert {source.ticket.state for source in sources} == {"failed"}
    assert all(source.array.tobytes() == source.expected for source in sources)
    assert all("No space left" in source.ticket.failure for source in sources)


def test_short_transfers_of_a_batch_are_continued(tmp_path):
    store = make_store("direct", tmp_path, "stepped", slice_bytes=256 << 10)
    inject_fault(store, "write", "short_transfer", nth=3)
    sources = small_sources(store)
    for source in sources:
        source.wait_copied_out()
    for source in sources:
        source.prefetch()
    for source in sources:
        source.swap_in()
