"""The swap store against a plain dictionary of bytes, on both tiers and under every schedule."""

import contextlib
import errno
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from core.store_rig import POISON, SCHEDULES, TIERS, Source, make_store
from faults.inject import inject_fault, truncate

from offload import _core


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4096, 100_003, 300_000])
@pytest.mark.parametrize("residue", [0, 64, 511])
def test_bytes_come_back(tmp_path, tier, schedule, nbytes, residue):
    store = make_store(tier, tmp_path, schedule)
    source = Source(store, np.random.default_rng(0), nbytes, residue)
    for _ in range(2):  # a retained graph brings the same bytes back again
        source.wait_copied_out()
        source.prefetch()
        source.swap_in()
    source.ticket.release()
    store.quiesce()
    assert store.stats()["live_tickets"] == 0
    assert store.stats()["spill_used_bytes"] == 0


def random_walk(store, seed, steps, tier):
    """Out, back, dropped at any time: whatever returns must be what left. Returns how much came back."""
    choose = random.Random(seed)
    generator = np.random.default_rng(seed)
    waiting, left, returning, returned = [], [], [], 0
    for _ in range(steps):
        action = choose.choice(["out", "out", "leave", "begin", "begin", "finish", "drop", "cancel"])
        if action == "out":
            try:
                residue = choose.choice([0, 0, 64])
                nbytes = choose.randrange(1, choose.choice([20_000, 200_000]))  # coalesced, or sliced
                waiting.append(Source(store, generator, nbytes, residue))
            except _core.PoolExhausted:
                if tier != "slab" and not returning:
                    raise  # blocks on their way back cannot be spilled; all others make room
        elif action == "leave" and waiting:
            source = waiting.pop(choose.randrange(len(waiting)))
            source.wait_copied_out()
            left.append(source)
        elif action == "begin" and left:
            source = left.pop(choose.randrange(len(left)))
            if source.ticket.state not in ("cancelled", "failed"):
                source.prefetch()
                returning.append(source)
        elif action == "finish" and returning:
            source = returning.pop(choose.randrange(len(returning)))
            source.swap_in()
            returned += 1
            if choose.random() < 0.3:
                left.append(source)
        elif action == "cancel" and waiting:
            source = choose.choice(waiting)
            if source.ticket.cancel():
                assert source.array.tobytes() == source.expected
        elif action == "drop":
            pool = choose.choice([waiting, left, returning])
            if pool:
                source = pool.pop(choose.randrange(len(pool)))
                if pool is waiting:
                    source.ticket.wait_out(0)  # the owner keeps the source until then
                if pool is returning and tier != "direct":
                    source.ticket.swap_in(0)  # the owner keeps the target until then
                source.ticket.release()
    for source in returning:
        source.swap_in()
        returned += 1
    for source in waiting:
        source.wait_copied_out()
    return returned


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_random_walk(tmp_path, tier, schedule, seed):
    store = make_store(tier, tmp_path, schedule, seed)
    assert random_walk(store, seed, 300, tier) > 10
    store.quiesce()
    stats = store.stats()
    assert stats["live_tickets"] == 0, stats
    assert stats["spill_used_bytes"] == 0, stats
    if tier == "slab":
        assert stats["pool_requested_bytes"] == 0, stats


@pytest.mark.parametrize("tier", ["direct", "slab+disk"])
def test_file_does_not_grow_from_step_to_step(tmp_path, tier):
    store = make_store(tier, tmp_path, host_bytes_max=256 << 10)
    generator = np.random.default_rng(0)
    sizes = []
    for _ in range(5):
        sources = [Source(store, generator, 100_000) for _ in range(20)]
        for source in sources:
            source.wait_copied_out()
        for source in reversed(sources):
            source.prefetch()
            source.swap_in()
            source.ticket.release()
        store.quiesce()
        sizes.append(store.stats()["spill_file_bytes"])
    assert sizes[0] > 0
    assert sizes == [sizes[0]] * 5


def test_exhaustion_names_the_numbers(tmp_path):
    store = make_store("slab", tmp_path, host_bytes_max=128 << 10)
    generator = np.random.default_rng(0)
    held = Source(store, generator, 100_000)
    with pytest.raises(_core.PoolExhausted, match=r"asked 100001 bytes, \d+ free of 131072; raise host_limit"):
        Source(store, generator, 100_001)
    with pytest.raises(MemoryError):
        Source(store, generator, 1 << 20)
    held.wait_copied_out()
    held.prefetch()
    held.swap_in()


@pytest.mark.parametrize("kind", ["error", "short_transfer"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_failed_copy_out_leaves_the_source(tmp_path, kind, schedule):
    store = make_store("direct", tmp_path, schedule)
    generator = np.random.default_rng(0)
    inject_fault(store, "write", kind, nth=1, error_number=errno.ENOSPC)
    source = Source(store, generator, 100_000)
    source.wait_copied_out()
    if kind == "error":
        assert source.ticket.state == "failed"
        assert source.array.tobytes() == source.expected
        with pytest.raises(RuntimeError, match="nothing was swapped out"):
            source.prefetch()
    else:
        source.prefetch()
        source.swap_in()
    source.ticket.release()
    assert store.stats()["live_tickets"] == 0
    assert store.stats()["spill_used_bytes"] == 0


@pytest.mark.parametrize("tier", ["direct", "slab+disk"])
@pytest.mark.parametrize(("kind", "number"), [("error", errno.EIO), ("wrong_block", 0), ("error", errno.EINTR)])
def test_failed_copy_in_is_typed_and_can_be_repeated(tmp_path, tier, kind, number):
    store = make_store(tier, tmp_path, host_bytes_max=256 << 10)
    generator = np.random.default_rng(0)
    source = Source(store, generator, 150_000)
    others = [Source(store, generator, 150_000) for _ in range(2)]
    for each in [source, *others]:
        each.wait_copied_out()
    store.quiesce()
    assert source.ticket.state == "on_disk"
    inject_fault(store, "read", kind, nth=1, error_number=number)
    source.prefetch()
    if number == errno.EINTR:
        source.swap_in()
        return
    with pytest.raises(OSError, match="offset") as raised:
        source.swap_in()
    assert raised.value.errno == errno.EIO
    assert raised.value.filename == str(tmp_path)
    assert raised.value.offset >= 0
    source.prefetch()
    source.swap_in()


def test_truncated_file_is_an_error(tmp_path):
    store = make_store("direct", tmp_path)
    source = Source(store, np.random.default_rng(0), 1 << 20)
    source.wait_copied_out()
    truncate(store, 4096)
    source.prefetch()
    with pytest.raises(OSError, match="ends early"):
        source.swap_in()


def test_urgent_copy_in_overtakes(tmp_path):
    store = make_store("direct", tmp_path, "stepped", seed=3)
    generator = np.random.default_rng(0)
    sources = [Source(store, generator, 1 << 20) for _ in range(6)]
    for source in sources:
        source.wait_copied_out()
    for source in sources:
        source.prefetch()
    sources[-1].swap_in()
    pending = [source.ticket.state for source in sources].count("copying_in")
    assert pending >= 3, "the last one asked for must not wait for all before it"
    for source in sources[:-1]:
        source.swap_in()


def test_nothing_is_visible_in_the_spill_directory(tmp_path):
    store = make_store("direct", tmp_path)
    source = Source(store, np.random.default_rng(0), 1 << 20)
    source.wait_copied_out()
    assert list(tmp_path.iterdir()) == []


def test_missing_directory(tmp_path):
    with pytest.raises(OSError, match="cannot create the spill file") as raised:
        make_store("direct", tmp_path / "absent")
    assert raised.value.errno == errno.ENOENT


def test_swap_in_needs_a_prefetch(tmp_path):
    store = make_store("direct", tmp_path)
    source = Source(store, np.random.default_rng(0), 1 << 20)
    source.wait_copied_out()
    with pytest.raises(RuntimeError, match="swap_in was called before prefetch"):
        source.ticket.swap_in(0)


def test_residue_must_match(tmp_path):
    store = make_store("direct", tmp_path)
    if store.alignment_bytes == 1:
        pytest.skip("no direct I/O in the temporary folder")
    source = Source(store, np.random.default_rng(0), 1 << 20, residue=64)
    source.wait_copied_out()
    source.residue = 0
    with pytest.raises(ValueError, match="congruent"):
        source.prefetch()


def test_a_ticket_asked_for_too_early_can_still_be_taken_back(tmp_path):
    """What was cancelled is not in the slab any more, and cannot be spilled to make room."""
    cancelled = 0
    for seed in range(20):
        store = make_store("slab+disk", tmp_path, "stepped", seed, host_bytes_max=256 << 10)
        generator = np.random.default_rng(seed)
        source = Source(store, generator, 9_000)
        if source.ticket.state != "queued":
            continue
        with pytest.raises(RuntimeError, match="swap_in was called before prefetch: the ticket is queued"):
            source.ticket.swap_in(0)
        cancelled += source.ticket.cancel()
        others = [Source(store, generator, 60_000) for _ in range(6)]
        for other in others:
            other.wait_copied_out()
            other.prefetch()
            other.swap_in()
    assert cancelled > 0


def test_room_that_another_thread_makes_is_waited_for(tmp_path):
    """Everything that could be spilled is on its way to the disk already."""
    mebibyte = 1 << 20
    store = make_store(
        "slab+disk", tmp_path, host_bytes_max=66 * mebibyte, slab_bytes=66 * mebibyte, slice_bytes=mebibyte
    )
    generator = np.random.default_rng(0)
    first = Source(store, generator, 64 * mebibyte)
    first.wait_copied_out()
    block = _core.HostBlock(16 * mebibyte)
    made = []
    maker = threading.Thread(target=lambda: made.append(Source(store, np.random.default_rng(1), 32 * mebibyte)))
    maker.start()
    while first.ticket.state == "out":
        time.sleep(0)
    ticket = store.swap_out(block.address, 16 * mebibyte, 0)
    maker.join(60)
    ticket.wait_out(0)
    assert ticket.out_done()
    (other,) = made
    other.wait_copied_out()


def test_a_store_that_cannot_be_made_leaves_no_lane_behind(tmp_path):
    def lanes_alive():
        found = set()
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a lane of an earlier test ends
                if path.read_text() == "offload-lane\n":
                    found.add(path.parent.name)
        return found

    before = lanes_alive()
    with pytest.raises(_core.PoolExhausted, match="raise host_limit"):
        make_store("slab+disk", tmp_path, host_bytes_max=4096)
    assert lanes_alive() <= before


def test_nothing_leaves_nothing_in_the_file(tmp_path):
    """A block without bytes goes to the disk with others, and its room there comes back."""
    store = make_store("slab+disk", tmp_path, host_bytes_max=256 << 10)
    generator = np.random.default_rng(0)
    empty = _core.HostBlock(0)
    nothing = store.swap_out(empty.address, 0, 0)
    nothing.wait_out(0)
    sources = [Source(store, generator, 60_000) for _ in range(4)]
    for source in sources:
        source.wait_copied_out()
    store.quiesce()
    assert nothing.state == "on_disk"
    nothing.prefetch(empty.address, 0, empty)
    nothing.swap_in(0)
    for source in sources:
        source.ticket.release()
    nothing.release()
    store.quiesce()
    store.trim()
    assert store.stats()["spill_file_bytes"] == 0


@pytest.mark.parametrize("tier", TIERS)
def test_of_two_racing_prefetches_one_is_refused(tmp_path, tier):
    """The one that is not brings the bytes to its own target, and the other one's is not touched."""
    store = make_store(tier, tmp_path, "delays", seed=1)
    generator = np.random.default_rng(0)
    for _ in range(60):
        source = Source(store, generator, 20_000)
        targets = [_core.HostBlock(20_000, 4096, 0) for _ in range(2)]
        refused = []
        start = threading.Barrier(2)

        def prefetch(number, source=source, targets=targets, refused=refused, start=start):
            start.wait()
            try:
                source.ticket.prefetch(targets[number].address, 0, targets[number])
            except RuntimeError as error:
                refused.append((number, str(error)))

        for target in targets:
            np.frombuffer(target, dtype=np.uint8)[:] = POISON
        threads = [threading.Thread(target=prefetch, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        source.ticket.swap_in(0)
        held = [np.frombuffer(target, dtype=np.uint8) for target in targets]
        assert {text for _, text in refused} <= {"a copy-in of this ticket is under way"}
        for number, _ in refused:
            assert (held[number] == POISON).all()
            assert held[1 - number].tobytes() == source.expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("end", ["wait", "prefetch", "end"])
def test_deferred_copy_outs_begin_when_one_is_waited_for(tmp_path, schedule, end):
    store = make_store("direct", tmp_path, schedule)
    generator = np.random.default_rng(0)
    store.defer_copy_outs(True)
    sources = [Source(store, generator, 30_000) for _ in range(20)]
    cancelled = sources.pop(3)
    assert cancelled.ticket.cancel()
    other = make_store("direct", tmp_path, schedule)  # time for a lane to begin
    Source(other, generator, 30_000).wait_copied_out()
    assert {source.ticket.state for source in sources} == {"queued"}
    if end == "prefetch":
        sources[-1].prefetch()
        sources[-1].swap_in()
        sources.pop()
    elif end == "end":
        store.defer_copy_outs(False)
    for source in sources:
        source.wait_copied_out()
        source.prefetch()
        source.swap_in()
    assert store.stats()["out_copies"] == 19


def test_a_store_forgets_what_it_deferred(tmp_path):
    store = make_store("direct", tmp_path)
    store.defer_copy_outs(True)
    sources = [Source(store, np.random.default_rng(0), 30_000) for _ in range(20)]
    store.quiesce()
    assert {source.ticket.state for source in sources} == {"cancelled"}
