"""Scenarios that expose each ordering edge: if the edge is disabled, two of their accesses are not ordered.

Needs the extension that is built with mutants (campaign/build.py).
"""

import tempfile
import threading
import time
from functools import cache

import torch
from test_training import BY_HAND, assert_same, mlp, plain_step, train
from twin import sim

import offload
from offload import _core
from offload.runtime.engine import Engine

KIB, MIB = 1 << 10, 1 << 20
SLICE_BYTES = 64 * KIB
LARGE, SMALL = 4 * MIB, 16 * KIB


def make_store(slabs=64, slice_bytes=SLICE_BYTES, spill_dir=""):
    """While streams are held, two transfers are in flight and all others are queued, whatever the machine's speed."""
    lanes = _core.HostDriver()
    driver = _core.cuda_driver(0, sim.LIBRARY)
    return _core.SwapStore.slab(driver, lanes, slabs * LARGE, spill_dir, slab_bytes=LARGE, slice_bytes=slice_bytes)


@cache
def trained():
    """Return the gradients without the engine."""
    return train(steps=3)


def fresh(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="sim")


def striped(number):
    """Return a block whose slices all differ, also from those of blocks with another number."""
    return (torch.arange(LARGE, device="sim") // SLICE_BYTES % 100 + 100 * number + 1).to(torch.uint8)


# -- scenarios ---------------------------------------------------------------------------------------------------------


def held_step(model, x):
    """Queue a whole step before any of it runs, so that the host cannot observe the end of any work."""
    torch.sim.synchronize()
    sim.hold_streams(True)
    try:
        plain_step(model, x)
    finally:
        sim.hold_streams(False)


def whole_steps():
    for options in BY_HAND:
        step_of = plain_step if options["lb"] == "auto" else held_step  # a step that measures the link waits for it
        assert_same(train(options, step_of=step_of, steps=3), trained())
        assert_same(train(options, step_of=step_of, steps=3, in_flight=1), trained())


def come_back_at_once(nbytes):
    """Prefetch while the copy-out is under way; the compute stream has waited for neither."""
    store = make_store()
    sources, targets = ([fresh(nbytes).fill_(number) for number in range(8)] for _ in range(2))
    torch.sim.synchronize()
    sim.hold_streams(True)
    tickets = [store.swap_out(each.data_ptr(), nbytes, 0) for each in sources]
    for ticket, target in zip(tickets, targets, strict=True):
        ticket.prefetch(target.data_ptr(), 0)
    sim.hold_streams(False)
    store.quiesce()
    for ticket in tickets:
        ticket.swap_in(0)
    torch.sim.synchronize()
    assert all(map(torch.equal, targets, sources))
    store.quiesce()


def large_blocks_come_back_at_once():
    come_back_at_once(LARGE)


def small_blocks_come_back_at_once():
    come_back_at_once(SMALL)


def small_blocks_leave_at_once():
    """A prefetch has all queued copy-outs issued, before the compute stream has filled their sources."""
    store = make_store()
    targets = [fresh(SMALL) for _ in range(8)]
    torch.sim.synchronize()
    sim.hold_streams(True)
    sources, tickets = [], []
    for number in range(8):
        sources.append(fresh(SMALL).fill_(number))
        tickets.append(store.swap_out(sources[-1].data_ptr(), SMALL, 0))
        while number < 2 and tickets[-1].state == "queued":  # two transfers in flight, and then a queue
            time.sleep(0)
    for ticket, target in zip(tickets, targets, strict=True):
        ticket.prefetch(target.data_ptr(), 0)
    sim.hold_streams(False)
    store.quiesce()
    for ticket in tickets:
        ticket.swap_in(0)
    torch.sim.synchronize()
    assert all(map(torch.equal, targets, sources))
    store.quiesce()


def targets_are_in_use():
    """Prefetch while the current stream still reads the target."""
    for nbytes in (LARGE, SMALL):
        store = make_store()
        sources = [fresh(nbytes).fill_(3) for _ in range(8)]
        targets = [fresh(nbytes).fill_(7) for _ in range(8)]
        tickets = [store.swap_out(each.data_ptr(), nbytes, 0) for each in sources]
        for ticket in tickets:
            ticket.wait_out(0)
        store.quiesce()
        sim.hold_streams(True)
        for ticket, target in zip(tickets, targets, strict=True):
            target.add_(1)
            ticket.prefetch(target.data_ptr(), 0)
        sim.hold_streams(False)
        store.quiesce()
        for ticket in tickets:
            ticket.swap_in(0)
        torch.sim.synchronize()
        assert all(map(torch.equal, targets, sources))
        store.quiesce()


def a_slot_is_dropped_while_it_is_read():
    """Its memory is reused for a block of another stream, which has not waited for the copy-in that reads it."""
    store, side = make_store(slabs=1, slice_bytes=LARGE), torch.sim.Stream()
    first, second, target = fresh(LARGE).fill_(1), fresh(LARGE).fill_(2), fresh(LARGE).fill_(3)
    torch.sim.synchronize()
    ticket = store.swap_out(first.data_ptr(), LARGE, 0)
    ticket.wait_out(0)
    store.quiesce()
    sim.hold_streams(True)  # otherwise the host may observe the end of the copy-in, which orders it
    ticket.prefetch(target.data_ptr(), 0)
    ticket.swap_in(0)
    ticket.release()
    sim.hold_streams(False)
    with torch.sim.stream(side):
        store.swap_out(second.data_ptr(), LARGE, side.native_handle).wait_out(side.native_handle)
    torch.sim.synchronize()
    assert torch.equal(target, first)
    store.quiesce()


def a_target_is_let_go_when_it_is_said_to_be_done():
    """A block of many slices is dropped; its target is freed when `in_done` is true."""
    store = make_store()
    source, target = fresh(LARGE).fill_(1), fresh(LARGE).fill_(2)
    ticket = store.swap_out(source.data_ptr(), LARGE, 0)
    ticket.wait_out(0)
    store.quiesce()
    copies = sim.calls("cuMemcpyHtoDAsync_v2")
    sim.hold_streams(True)
    ticket.prefetch(target.data_ptr(), 0)
    sim.await_calls("cuMemcpyHtoDAsync_v2", copies, "cuMemcpyHtoDAsync_v2", copies)  # slices issued later come too late
    if not ticket.in_done():
        sim.hold_streams(False)
        ticket.settle()
    del target
    other = fresh(LARGE).fill_(3)
    sim.hold_streams(False)  # not before: otherwise the host may observe the end of the copy-in, which orders it
    torch.sim.synchronize()
    store.quiesce()
    ticket.release()
    assert bool((other == 3).all())


def a_block_makes_room_for_another():
    """A block is written to a file after its copy-out to the slab, which ends only when the streams continue."""
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(slabs=2, spill_dir=folder)  # one of them has the bounce buffers
        blocks = [striped(number) for number in range(2)]
        torch.sim.synchronize()
        waits, writes = sim.calls("cuEventSynchronize"), sim.calls("file write")
        sim.hold_streams(True)
        tickets = [store.swap_out(blocks[0].data_ptr(), blocks[0].nbytes, 0)]
        thread = threading.Thread(
            target=lambda: tickets.append(store.swap_out(blocks[1].data_ptr(), blocks[1].nbytes, 0))
        )
        thread.start()
        sim.await_calls("cuEventSynchronize", waits, "file write", writes)
        sim.hold_streams(False)
        thread.join()
        torch.sim.synchronize()
        tickets[0].prefetch(blocks[1].data_ptr(), 0)
        tickets[0].swap_in(0)
        torch.sim.synchronize()
        assert torch.equal(*blocks)
        store.quiesce()


def a_block_comes_back_from_a_file():
    """It is read slice by slice through two bounce buffers; copies from them end only when the streams continue."""
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(slabs=2, spill_dir=folder)
        blocks = [striped(number) for number in range(2)]
        torch.sim.synchronize()
        tickets = [store.swap_out(each.data_ptr(), each.nbytes, 0) for each in blocks]
        for ticket in tickets:
            ticket.wait_out(0)
        torch.sim.synchronize()
        assert tickets[0].state == "on_disk"
        waits, reads = sim.calls("cuEventSynchronize"), sim.calls("file read")
        sim.hold_streams(True)
        tickets[0].prefetch(blocks[1].data_ptr(), 0)
        sim.await_calls("cuEventSynchronize", waits, "file read", reads + 2)
        sim.hold_streams(False)
        tickets[0].swap_in(0)
        torch.sim.synchronize()
        assert torch.equal(*blocks)
        store.quiesce()


def a_source_of_another_stream():
    side = torch.sim.Stream()
    model = mlp().to("sim")
    with offload.enable(model, n_tensors=-1, lb=1, min_tensor_bytes=1) as handle:
        handle._engine.in_flight_bytes_max = 1
        with torch.sim.stream(side):
            x = torch.ones(32, 64, device="sim")
        torch.sim.synchronize()
        sim.hold_streams(True)
        loss = model(x).sum()
        del x
        with torch.sim.stream(side):
            torch.full((32, 64), 7.0, device="sim")
        sim.hold_streams(False)
        loss.backward()
        torch.sim.synchronize()
    found = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model(torch.ones(32, 64, device="sim")).sum().backward()
    assert_same(found, [each.grad for each in model.parameters()])


def on_a_side_stream():
    side = torch.sim.Stream()
    model = mlp().to("sim")
    torch.sim.synchronize()
    with offload.enable(model, n_tensors=-1, lb=8, min_tensor_bytes=1), torch.sim.stream(side):
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(32, 64, device="sim")).square().mean().backward()
        torch.sim.synchronize()
    found = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model(torch.ones(32, 64, device="sim")).square().mean().backward()
    assert_same(found, [each.grad for each in model.parameters()])


def prefetched_on_one_stream_and_used_on_another():
    """The target, which belongs to the first stream, is freed while the other stream still reads it."""
    its_engine, streams = Engine(make_store(), torch.device("sim", 0)), [torch.sim.Stream() for _ in range(2)]
    x = fresh(SMALL).fill_(1)
    slot = its_engine.swap_out(x, its_engine.look(x, x.nbytes)[0], 0)
    view = _core.view_of(x, slot, 0)
    torch.sim.synchronize()
    its_engine.drain()
    del x
    sim.hold_streams(True)  # until all is queued: the host may observe the end of the copy-in, which orders it
    with torch.sim.stream(streams[0]):
        slot.prefetch()
    with torch.sim.stream(streams[1]):
        torch.sim._sleep(3_000_000)  # 2 ms
        total = view.restore().sum()
    with torch.sim.stream(streams[0]):
        fresh(SMALL).fill_(2)
    sim.hold_streams(False)
    torch.sim.synchronize()
    assert total.item() == SMALL


def abandoned_while_it_comes_in():
    """A graph is dropped while the copy-in of its prefetched tensor still writes."""
    its_engine, x = Engine(make_store(), torch.device("sim", 0)), fresh(SMALL).fill_(1)
    slot = its_engine.swap_out(x, its_engine.look(x, x.nbytes)[0], 0)
    torch.sim.synchronize()
    its_engine.drain()
    del x
    sim.hold_streams(True)  # otherwise the host may observe the end of the copy-in, which orders it
    slot.prefetch()
    slot.ticket.swap_in(torch.sim.Stream().native_handle)  # issues the copy-in, for a stream that does nothing
    del slot
    its_engine.collect()
    kept = [fresh(SMALL).fill_(2) for _ in range(2)]
    sim.hold_streams(False)
    torch.sim.synchronize()
    assert all(bool((each == 2).all()) for each in kept)
    its_engine.drain()


# -- the edges ---------------------------------------------------------------------------------------------------------

EDGES = {
    "copy-out waits for compute": [whole_steps],
    "copy-in waits for compute": [targets_are_in_use],
    "copy-in waits for its copy-out": [large_blocks_come_back_at_once],
    "a batch has only produced blocks": [small_blocks_leave_at_once],
    "a batch has only free targets": [targets_are_in_use],
    "a batch has only blocks that are copied out": [small_blocks_come_back_at_once],
    "consumer waits for copy-in": [whole_steps],
    "source outlives its copy-out": [whole_steps],
    "slot waits for its last read": [a_slot_is_dropped_while_it_is_read],
    "event is recycled after its last waiter": [large_blocks_come_back_at_once, whole_steps],
    "spill waits for copy-out": [a_block_makes_room_for_another],
    "bounce waits for its last read": [a_block_comes_back_from_a_file],
    "copy-in ends with its last slice": [a_target_is_let_go_when_it_is_said_to_be_done],
    "source is held until its copy ends": [whole_steps],
    "the current stream orders": [on_a_side_stream],
    "record_stream on sources": [a_source_of_another_stream],
    "abandoned targets are kept": [abandoned_while_it_comes_in],
    "a prefetch for another stream is not used": [prefetched_on_one_stream_and_used_on_another],
}
