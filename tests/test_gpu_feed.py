"""`Prefetcher` on an accelerator: every ordering edge, and nothing left behind.

On the simulated one each test runs under several seeds of delays, and what nothing orders is found besides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from accelerator import KIND, gpu, is_simulated, simulated

import offload
from offload.contrib.prefetcher import Conveyor
from offload.diagnostics.report import Feed

pytestmark = pytest.mark.gpu

SEEDS = range(4) if is_simulated else range(1)
DELAY_US_MAX = 1000
SLEEP_CYCLES = 5_000_000 if is_simulated else 50_000_000  # some 3 ms, some 30 ms
ROWS = 1 << 12 if is_simulated else 1 << 20


@pytest.fixture(params=SEEDS, autouse=True)
def seed(request):
    """Delays of its own on the simulated accelerator."""
    if is_simulated:
        simulated().schedule(request.param, DELAY_US_MAX)
    return request.param


def sleep() -> None:
    """Hold the current stream up."""
    gpu._sleep(SLEEP_CYCLES)


def batches(count: int) -> list[torch.Tensor]:
    return [torch.arange(ROWS, dtype=torch.int64) * (number + 1) for number in range(count)]


def sums(count: int) -> list[int]:
    return [batch.sum().item() for batch in batches(count)]


def delay_copies(monkeypatch) -> None:
    copy = Conveyor._copy

    def late(conveyor, target, source):
        sleep()
        return copy(conveyor, target, source)

    monkeypatch.setattr(Conveyor, "_copy", late)


# -- what can go wrong, as functions: their edges are left out below ---------------------------------------------


def every_batch_arrives() -> None:
    found = [batch.sum() for batch in offload.contrib.Prefetcher(batches(4), device=KIND)]
    assert [value.item() for value in found] == sums(4)


def a_freed_batch_is_read_to_its_end() -> None:
    found = []
    for batch in offload.contrib.Prefetcher(batches(6), device=KIND):
        sleep()  # the reader below is late; the next target but one may be this batch's memory
        found.append(batch.sum())  # small: a clone would take that memory itself
        del batch
    assert [value.item() for value in found] == sums(6)


def a_consumer_on_another_stream() -> None:
    side = gpu.Stream()
    given = iter(offload.contrib.Prefetcher(batches(4), device=KIND))
    found = [next(given).sum()]
    batch = next(given)  # sent from this stream, taken on the other
    del batch
    with gpu.stream(side):
        for batch in given:
            sleep()
            found.append(batch.sum())
            del batch
    side.synchronize()
    expected = sums(4)
    assert [value.item() for value in found] == [expected[0], *expected[2:]]


def a_batch_of_the_first_stream_is_read_on_the_second() -> None:
    side = gpu.Stream()
    given = iter(offload.contrib.Prefetcher(batches(2), device=KIND))
    next(given)
    with gpu.stream(side):
        batch = next(given)
        assert next(given, None) is None  # the pass holds no batch any more
        sleep()
        found = batch.sum()
    del batch  # its memory belongs to the first stream, and the second still reads it
    fresh = [torch.full((ROWS,), -1, dtype=torch.int64, device=KIND) for _ in range(4)]
    side.synchronize()
    assert found.item() == sums(2)[1]
    assert all(bool((block == -1).all()) for block in fresh)


def memory_of_a_dropped_pass_is_not_written_later() -> None:
    given = iter(offload.contrib.Prefetcher(batches(3), device=KIND))
    next(given)
    given.close()  # the second batch is on its way
    fresh = [torch.full((ROWS,), -1, dtype=torch.int64, device=KIND) for _ in range(4)]
    gpu.synchronize()
    assert all(bool((block == -1).all()) for block in fresh)


# -- they do not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["compute", "copy", "nothing"])
def test_every_batch_arrives_whatever_is_slow(slow, monkeypatch):
    if slow == "copy":
        delay_copies(monkeypatch)
    expected = sums(4)
    found = []
    for batch in offload.contrib.Prefetcher(batches(4), device=KIND):
        assert batch.device == torch.device(KIND, gpu.current_device())
        if slow == "compute":
            sleep()
        found.append(batch.sum())
    assert [value.item() for value in found] == expected


def test_a_freed_batch_is_not_overwritten_before_its_reader_has_passed():
    a_freed_batch_is_read_to_its_end()


def test_a_consumer_on_another_stream():
    a_consumer_on_another_stream()


def test_a_batch_of_the_first_stream_is_read_on_the_second():
    a_batch_of_the_first_stream_is_read_on_the_second()


def test_memory_of_a_pass_that_is_dropped_is_not_written_later(monkeypatch):
    delay_copies(monkeypatch)
    memory_of_a_dropped_pass_is_not_written_later()


def test_a_loader_that_raises_raises_at_its_batch():
    def source():
        yield from batches(2)
        raise OSError("batch 2 cannot be read")

    seen = []

    def run() -> None:
        for batch in offload.contrib.Prefetcher(source(), device=KIND):
            seen.append(batch.sum().item())

    with pytest.raises(OSError, match="batch 2 cannot be read"):
        run()
    assert seen == sums(2)


def test_a_copy_that_cannot_be_queued_leaves_no_copy_running(monkeypatch):
    copy = Conveyor._copy
    calls = []

    def failing(conveyor, target, source):
        calls.append(target)
        if len(calls) == 4:
            raise RuntimeError("the copy engine is gone")
        sleep()
        return copy(conveyor, target, source)

    monkeypatch.setattr(Conveyor, "_copy", failing)
    pairs = [(batch, batch) for batch in batches(3)]
    with pytest.raises(RuntimeError, match="the copy engine is gone"):
        list(offload.contrib.Prefetcher(pairs, device=KIND))
    calls.clear()
    fresh = [torch.full((ROWS,), -1, dtype=torch.int64, device=KIND) for _ in range(4)]
    gpu.synchronize()
    assert all(bool((block == -1).all()) for block in fresh)


def test_structures_pinned_and_resident_tensors_and_the_rest():
    resident = torch.ones(3, device=KIND)
    batch = {"x": torch.ones(2, 3).pin_memory(), "t": torch.ones(3, 2).t(), "names": ["a"], "more": (resident, None)}
    prefetched = offload.contrib.Prefetcher([batch], device=KIND)
    [found] = prefetched
    assert found["x"].device.type == KIND
    assert found["t"].device.type == KIND
    assert torch.equal(found["t"].cpu(), batch["t"])
    assert found["names"] == ["a"]
    assert found["more"][0] is resident
    assert (prefetched.feed.batches, prefetched.feed.copied_bytes) == (1, 2 * 6 * 4)


def feed_of_slow_copies() -> Feed:
    prefetched = offload.contrib.Prefetcher(batches(4), device=KIND)
    for batch in prefetched:
        batch.sum()
    assert prefetched.feed.copied_bytes == 4 * ROWS * 8
    return prefetched.feed


def test_waiting_for_a_slow_copy_is_counted(monkeypatch):
    delay_copies(monkeypatch)
    assert feed_of_slow_copies().device_wait_seconds > 0


@pytest.mark.skipif(is_simulated, reason="a processor may be elsewhere for as long as a copy takes")
def test_the_next_copy_runs_while_this_step_computes():
    prefetched = offload.contrib.Prefetcher(batches(6), device=KIND)
    for number, batch in enumerate(prefetched):
        batch.sum()
        sleep()
        if number == 0:
            gpu.synchronize()
            prefetched.feed.device_wait_seconds = 0.0  # the first batch has no step before it
    gpu.synchronize()
    assert prefetched.feed.copied_bytes == 6 * ROWS * 8
    assert prefetched.feed.device_wait_seconds < 6 * 0.03


# -- and each edge is missed where it is left out ----------------------------------------------------------------------

LEFT_OUT: dict[str, tuple[object, str, Callable[..., None]]] = {
    "a copy waits for its target's reader": (torch.Stream, "wait_stream", a_freed_batch_is_read_to_its_end),
    "compute waits for the copy": (torch.Stream, "wait_event", every_batch_arrives),
    "memory is kept for its other reader": (
        torch.Tensor,
        "record_stream",
        a_batch_of_the_first_stream_is_read_on_the_second,
    ),
    "a dropped pass waits for its copy": (Conveyor, "close", memory_of_a_dropped_pass_is_not_written_later),
}


@pytest.mark.finds
@pytest.mark.skipif(not is_simulated, reason="the simulated accelerator tells")
@pytest.mark.parametrize("edge", LEFT_OUT)
def test_an_edge_that_is_left_out_is_named(edge, monkeypatch):
    owner, name, scenario = LEFT_OUT[edge]
    sim = simulated()
    sim.schedule(0, 0)
    scenario()
    assert sim.violations() == []
    delay_copies(monkeypatch)  # so that the host does not happen to see a copy's end
    owner = gpu.Stream if owner is torch.Stream else owner  # torch's own class cannot be changed
    monkeypatch.setattr(owner, name, lambda *arguments: None, raising=False)
    with contextlib.suppress(AssertionError):  # wrong bytes besides, maybe
        scenario()
    gpu.synchronize()
    assert any(text.endswith("in no order") for text in sim.violations())
