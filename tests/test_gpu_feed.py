"""`Prefetcher` on a CUDA device, and on a double of torch's streams: every ordering edge, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch_cuda import Event, OnDevice, Stream, doubled

import offload
from offload.contrib.prefetcher import Conveyor
from offload.diagnostics.report import Feed

SEEDS = range(12)
SLEEP_CYCLES = 50_000_000  # some 30 ms


class RealDevice:
    rows = 1 << 20

    def sleep(self) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)


@pytest.fixture(params=[*SEEDS, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A real device, or the double with one of its seeds."""
    if request.param == "cuda":
        yield RealDevice()
        return
    with doubled(request.param) as device_double:
        yield device_double
        device_double.synchronize()


def batches(device, count: int) -> list[torch.Tensor]:
    return [torch.arange(device.rows, dtype=torch.int64) * (number + 1) for number in range(count)]


def sums(device, count: int) -> list[int]:
    return [batch.sum().item() for batch in batches(device, count)]


def delay_copies(device, monkeypatch) -> None:
    copy = Conveyor._copy

    def late(conveyor, target, source):
        device.sleep()
        return copy(conveyor, target, source)

    monkeypatch.setattr(Conveyor, "_copy", late)


# -- what can go wrong, as functions: the double shows below that it would ---------------------------------------------


def every_batch_arrives(device) -> None:
    found = [batch.sum() for batch in offload.Prefetcher(batches(device, 4), device="cuda")]
    assert [value.item() for value in found] == sums(device, 4)


def a_freed_batch_is_read_to_its_end(device) -> None:
    found = []
    for batch in offload.Prefetcher(batches(device, 6), device="cuda"):
        device.sleep()  # the reader below is late; the next target but one may be this batch's memory
        found.append(batch.sum())  # small: a clone would take that memory itself
        del batch
    assert [value.item() for value in found] == sums(device, 6)


def a_consumer_on_another_stream(device) -> None:
    side = torch.cuda.Stream()
    given = iter(offload.Prefetcher(batches(device, 4), device="cuda"))
    found = [next(given).sum()]
    batch = next(given)  # sent from this stream, taken on the other
    del batch
    with torch.cuda.stream(side):
        for batch in given:
            device.sleep()
            found.append(batch.sum())
            del batch
    side.synchronize()
    expected = sums(device, 4)
    assert [value.item() for value in found] == [expected[0], *expected[2:]]


def a_batch_of_the_first_stream_is_read_on_the_second(device) -> None:
    side = torch.cuda.Stream()
    given = iter(offload.Prefetcher(batches(device, 2), device="cuda"))
    next(given)
    with torch.cuda.stream(side):
        batch = next(given)
        assert next(given, None) is None  # the pass holds no batch any more
        device.sleep()
        found = batch.sum()
    del batch  # its memory belongs to the first stream, and the second still reads it
    fresh = [torch.full((device.rows,), -1, dtype=torch.int64, device="cuda") for _ in range(4)]
    side.synchronize()
    assert found.item() == sums(device, 2)[1]
    assert all(bool((block == -1).all()) for block in fresh)


def memory_of_a_dropped_pass_is_not_written_later(device) -> None:
    given = iter(offload.Prefetcher(batches(device, 3), device="cuda"))
    next(given)
    given.close()  # the second batch is on its way
    fresh = [torch.full((device.rows,), -1, dtype=torch.int64, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert all(bool((block == -1).all()) for block in fresh)


# -- they do not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["compute", "copy", "nothing"])
def test_every_batch_arrives_whatever_is_slow(device, slow, monkeypatch):
    if slow == "copy":
        delay_copies(device, monkeypatch)
    expected = sums(device, 4)
    found = []
    for batch in offload.Prefetcher(batches(device, 4), device="cuda"):
        assert batch.device == torch.device("cuda", torch.cuda.current_device())
        if slow == "compute":
            device.sleep()
        found.append(batch.sum())
    assert [value.item() for value in found] == expected


def test_a_freed_batch_is_not_overwritten_before_its_reader_has_passed(device):
    a_freed_batch_is_read_to_its_end(device)


def test_a_consumer_on_another_stream(device):
    a_consumer_on_another_stream(device)


def test_a_batch_of_the_first_stream_is_read_on_the_second(device):
    a_batch_of_the_first_stream_is_read_on_the_second(device)


def test_memory_of_a_pass_that_is_dropped_is_not_written_later(device, monkeypatch):
    delay_copies(device, monkeypatch)
    memory_of_a_dropped_pass_is_not_written_later(device)


def test_a_loader_that_raises_raises_at_its_batch(device):
    def source():
        yield from batches(device, 2)
        raise OSError("batch 2 cannot be read")

    seen = []

    def run() -> None:
        for batch in offload.Prefetcher(source(), device="cuda"):
            seen.append(batch.sum().item())

    with pytest.raises(OSError, match="batch 2 cannot be read"):
        run()
    assert seen == sums(device, 2)


def test_a_copy_that_cannot_be_queued_leaves_no_copy_running(device, monkeypatch):
    copy = Conveyor._copy
    calls = []

    def failing(conveyor, target, source):
        calls.append(target)
        if len(calls) == 4:
            raise RuntimeError("the copy engine is gone")
        device.sleep()
        return copy(conveyor, target, source)

    monkeypatch.setattr(Conveyor, "_copy", failing)
    pairs = [(batch, batch) for batch in batches(device, 3)]
    with pytest.raises(RuntimeError, match="the copy engine is gone"):
        list(offload.Prefetcher(pairs, device="cuda"))
    calls.clear()
    fresh = [torch.full((device.rows,), -1, dtype=torch.int64, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert all(bool((block == -1).all()) for block in fresh)


def test_structures_pinned_and_resident_tensors_and_the_rest(device):
    resident = torch.ones(3, device="cuda")
    batch = {"x": torch.ones(2, 3).pin_memory(), "t": torch.ones(3, 2).t(), "names": ["a"], "more": (resident, None)}
    prefetched = offload.Prefetcher([batch], device="cuda")
    [found] = prefetched
    assert found["x"].is_cuda
    assert found["t"].is_cuda
    assert torch.equal(found["t"].cpu(), batch["t"])
    assert found["names"] == ["a"]
    assert found["more"][0] is resident
    assert (prefetched.feed.batches, prefetched.feed.copied_bytes) == (1, 2 * 6 * 4)


def feed_of_slow_copies(device) -> Feed:
    prefetched = offload.Prefetcher(batches(device, 4), device="cuda")
    for batch in prefetched:
        batch.sum()
    assert prefetched.feed.copied_bytes == 4 * device.rows * 8
    return prefetched.feed


def test_waiting_for_a_slow_copy_is_counted(monkeypatch):
    seconds = []
    for seed in SEEDS:
        with doubled(seed) as device_double, monkeypatch.context() as patch:
            delay_copies(device_double, patch)
            seconds.append(feed_of_slow_copies(device_double).device_wait_seconds)
    assert min(seconds) >= 0, "what has arrived early is no wait"
    assert max(seconds) >= 0.04, "the scheduler's turns are its milliseconds"


@pytest.mark.gpu
def test_waiting_for_a_slow_copy_is_counted_on_a_real_device(monkeypatch):
    delay_copies(RealDevice(), monkeypatch)
    assert feed_of_slow_copies(RealDevice()).device_wait_seconds > 0


@pytest.mark.gpu
def test_the_next_copy_runs_while_this_step_computes():
    device = RealDevice()
    prefetched = offload.Prefetcher(batches(device, 6), device="cuda")
    for number, batch in enumerate(prefetched):
        batch.sum()
        device.sleep()
        if number == 0:
            torch.cuda.synchronize()
            prefetched.feed.device_wait_seconds = 0.0  # the first batch has no step before it
    torch.cuda.synchronize()
    assert prefetched.feed.copied_bytes == 6 * device.rows * 8
    assert prefetched.feed.device_wait_seconds < 6 * 0.03


# -- and the double would tell ----------------------------------------------------------------------------------------

LEFT_OUT: dict[str, tuple[object, str, Callable[..., None]]] = {
    "a copy waits for its target's reader": (Stream, "wait_stream", a_freed_batch_is_read_to_its_end),
    "compute waits for the copy": (Stream, "wait_event", every_batch_arrives),
    "memory is kept for its other reader": (
        OnDevice,
        "record_stream",
        a_batch_of_the_first_stream_is_read_on_the_second,
    ),
    "a dropped pass waits for its copy": (Conveyor, "close", memory_of_a_dropped_pass_is_not_written_later),
}


@pytest.mark.parametrize("edge", LEFT_OUT)
def test_an_edge_that_is_left_out_is_found(edge, monkeypatch):
    owner, name, scenario = LEFT_OUT[edge]
    for seed in SEEDS:
        with doubled(seed) as device_double:
            scenario(device_double)  # as it is: no finding
    monkeypatch.setattr(owner, name, lambda *arguments: None)
    findings = 0
    for seed in SEEDS:
        with doubled(seed) as device_double:
            try:
                scenario(device_double)
            except AssertionError:
                findings += 1
    assert findings > 0


def test_a_wait_for_an_event_is_for_its_last_recording_and_one_that_never_comes_is_said():
    with doubled(0) as device_double:
        side = torch.cuda.Stream()
        event = Event(device_double)
        side.wait_event(event)  # never recorded: no wait
        side.synchronize()
        stuck = torch.cuda.Stream()
        stuck.queue.append(lambda: False)
        event.record(stuck)
        with pytest.raises(AssertionError, match="nothing can run"):
            event.synchronize()
        stuck.queue.clear()
