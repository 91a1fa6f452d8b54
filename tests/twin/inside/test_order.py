"""The machine finds what nothing orders: by its checker when work is queued, by wrong bytes when it runs late."""

import os
import signal

import pytest
import torch
from twin import sim

NUMEL = 1 << 16


def round_trip(*, waits=True, records=True):
    """A tensor goes out on a stream of its own, and its memory is used again at once; how often wrong bytes arrived."""
    copy, host = torch.sim.Stream(), torch.empty(NUMEL, pin_memory=True)
    wrong = 0
    for number in range(10):
        x = torch.full((NUMEL,), float(number), device="sim").mul_(2).add_(1)
        if waits:
            copy.wait_stream(torch.sim.current_stream())
        with torch.sim.stream(copy):
            host.copy_(x, non_blocking=True)
        if records:
            x.record_stream(copy)
        del x
        torch.full((NUMEL,), -5.0, device="sim")
        copy.synchronize()
        wrong += not bool((host == 2 * number + 1).all())
        torch.sim.synchronize()
    return wrong


def test_what_is_ordered_is_no_finding():
    for seed in range(3):
        sim.schedule(seed, 500)
        assert round_trip() == 0


@pytest.mark.finds
def test_a_missing_wait_is_named():
    sim.schedule(0, 0)
    round_trip(waits=False)
    found = sim.violations()
    assert any(text.startswith("copy_ reads on stream ") and "what aten::" in text for text in found), found
    assert all(text.endswith(", in no order") for text in found)


@pytest.mark.finds
def test_memory_that_another_stream_still_reads_is_named():
    sim.schedule(0, 0)
    round_trip(records=False)
    assert any(
        text.startswith("the allocator writes on stream ") and "what copy_ reads" in text for text in sim.violations()
    )


@pytest.mark.finds
@pytest.mark.parametrize("left_out", ["waits", "records"])
def test_delays_make_wrong_bytes_of_it(left_out):
    wrong = 0
    for seed in range(5):
        sim.schedule(seed, 500)
        wrong += round_trip(**{left_out: False})
    assert wrong > 0


@pytest.mark.finds
def test_the_host_is_ordered_too():
    """A file that is written from pinned memory before the copy into it is known to have ended."""
    host, x = torch.empty(NUMEL, pin_memory=True), torch.ones(NUMEL, device="sim")
    host.copy_(x, non_blocking=True)
    sim.touch_host(host.data_ptr(), host.nbytes, is_write=False)
    assert any(
        text.startswith("a file reads on the host what copy_ to pinned memory writes") for text in sim.violations()
    )
    sim.forget_violations()
    torch.sim.synchronize()
    sim.touch_host(host.data_ptr(), host.nbytes, is_write=False)
    assert sim.violations() == []


def test_a_processor_that_touches_device_memory_dies():
    x = torch.ones(4, device="sim")
    torch.sim.synchronize()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        import ctypes

        ctypes.string_at(x.data_ptr(), 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_the_host_runs_ahead():
    sim.hold_streams(True)
    x = torch.ones(100, 100, device="sim")
    done = torch.sim.Event()
    y = x @ x
    done.record()
    assert not done.query()
    sim.hold_streams(False)
    assert bool((y == 100).all())
    assert done.query()


def test_backward_runs_on_a_thread_of_the_device_under_forwards_stream():
    import threading

    seen = {}

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen["forward"] = threading.get_ident(), torch.sim.current_stream()
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            seen["backward"] = threading.get_ident(), torch.sim.current_stream()
            return gradient * 1

    side, x = torch.sim.Stream(), torch.ones(4, device="sim", requires_grad=True)
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        y = Probe.apply(x).sum()
    torch.sim.current_stream().wait_stream(side)
    y.backward()
    torch.sim.synchronize()
    assert seen["forward"][0] != seen["backward"][0]
    assert seen["forward"][1] == seen["backward"][1] == side
