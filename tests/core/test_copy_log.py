"""The record of copies: which ticket's bytes moved when, by the clock of time.perf_counter."""

import time

import numpy as np
import pytest
from core.store_rig import Source, make_store
from faults.inject import inject_fault

TIERS = ["direct", "slab", "slab+disk", "cuda", "cuda+disk"]
CLOCK_SLACK_SECONDS = 0.1  # an anchor is off by less than half of the time it takes to wait for an event


@pytest.fixture(params=TIERS)
def store_of(request, tmp_path):
    """Makes stores of one tier, on the host driver or on the double of libcuda."""

    def make(schedule="threads", **options):
        tier = request.param
        if not tier.startswith("cuda"):
            return make_store(tier, tmp_path, schedule, **options)
        device = request.getfixturevalue("fake_cuda").driver()
        return make_store(tier.replace("cuda", "slab"), tmp_path, device=device, **options)

    make.tier = request.param
    return make


def out_and_back(store, count=3, nbytes=150_000):
    """Move blocks out and back in; the tickets' ids."""
    generator = np.random.default_rng(0)
    sources = [Source(store, generator, nbytes) for _ in range(count)]
    for source in sources:
        source.wait_copied_out()
    for source in sources:
        source.prefetch()
        source.swap_in()
    store.quiesce()
    return [source.ticket.id for source in sources]


def test_every_copy_is_told_once(store_of):
    store = store_of(host_bytes_max=2 << 20)
    store.record_copies(100)
    before = time.perf_counter()
    ids = out_and_back(store)
    after = time.perf_counter()
    copies = store.take_copies()
    assert len(set(ids)) == len(ids)
    for kind in ("out", "in"):  # sliced three times each, told as one
        assert sorted(ticket for name, ticket, *_ in copies if name == kind) == sorted(ids)
    for _, _, nbytes, begin, end in copies:
        assert nbytes == 150_000
        assert before - CLOCK_SLACK_SECONDS <= begin <= end <= after + CLOCK_SLACK_SECONDS
    assert [end for *_, end in copies] == sorted(end for *_, end in copies)
    by_ticket = {(name, ticket): (begin, end) for name, ticket, _, begin, end in copies}
    assert all(by_ticket["out", ticket][1] <= by_ticket["in", ticket][0] for ticket in ids)
    assert store.take_copies() == []


def test_disk_traffic_of_slabs_is_told(store_of):
    if not store_of.tier.endswith("+disk"):
        pytest.skip("no tier behind the slabs")
    store = store_of(host_bytes_max=512 << 10)
    store.record_copies(100)
    ids = out_and_back(store, count=6)
    copies = store.take_copies()
    spilled = {ticket: end for name, ticket, _, _, end in copies if name == "spill"}
    filled = {ticket: (begin, end) for name, ticket, _, begin, end in copies if name == "fill"}
    assert filled
    assert set(filled) <= set(spilled) <= set(ids)
    assert all(spilled[ticket] <= begin <= end for ticket, (begin, end) in filled.items())


def test_nothing_is_kept_unless_asked(store_of):
    store = store_of()
    out_and_back(store)
    assert store.take_copies() == []
    store.record_copies(100)
    out_and_back(store, count=1)
    store.record_copies(0)
    assert store.take_copies() == []
    out_and_back(store, count=1)
    assert store.take_copies() == []


def test_beyond_the_limit_the_oldest_is_forgotten(store_of):
    store = store_of(host_bytes_max=2 << 20)
    store.record_copies(2)
    ids = out_and_back(store, count=3)
    assert [(name, ticket) for name, ticket, *_ in store.take_copies()] == [("in", ids[1]), ("in", ids[2])]


def test_a_copy_under_way_is_told_later(tmp_path, fake_cuda):
    store = make_store("slab", tmp_path, device=fake_cuda.driver())
    store.record_copies(100)
    fake_cuda.hold_streams(True)
    source = Source(store, np.random.default_rng(0), 150_000)
    assert store.take_copies() == []
    fake_cuda.hold_streams(False)
    source.wait_copied_out()
    assert [(name, ticket) for name, ticket, *_ in store.take_copies()] == [("out", source.ticket.id)]


@pytest.mark.parametrize("tier", ["direct", "slab+disk"])
def test_the_stepped_schedule_waits_for_its_anchor(tmp_path, tier):
    store = make_store(tier, tmp_path, "stepped", host_bytes_max=1 << 20)
    source = Source(store, np.random.default_rng(0), 150_000)
    store.record_copies(100)  # while copies are queued
    source.wait_copied_out()
    other = Source(store, np.random.default_rng(1), 150_000)
    other.wait_copied_out()
    store.quiesce()
    assert other.ticket.id in [ticket for name, ticket, *_ in store.take_copies() if name == "out"]


def test_a_failed_copy_is_not_told(tmp_path):
    store = make_store("direct", tmp_path)
    store.record_copies(100)
    inject_fault(store, "write", "error", nth=1, error_number=28)
    source = Source(store, np.random.default_rng(0), 150_000)
    source.wait_copied_out()
    assert source.ticket.state == "failed"
    assert store.take_copies() == []
