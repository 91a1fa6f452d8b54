"""`Prefetcher` on a CUDA device: every ordering edge, overlap, and nothing left behind."""

from __future__ import annotations

import pytest
import torch

import offload

pytestmark = pytest.mark.gpu

ROWS = 1 << 20
SLEEP_CYCLES = 50_000_000  # some 30 ms


def batches(count: int = 4) -> list[torch.Tensor]:
    return [torch.arange(ROWS, dtype=torch.int64) * (number + 1) for number in range(count)]


def sleep() -> None:
    torch.cuda._sleep(SLEEP_CYCLES)


@pytest.mark.parametrize("slow", ["compute", "copy", "nothing"])
def test_every_batch_arrives_whatever_is_slow(slow, monkeypatch):
    expected = [batch.sum().item() for batch in batches()]
    if slow == "copy":
        from offload.feed import Conveyor

        copy = Conveyor._copy

        def late(conveyor, target, source):
            sleep()
            return copy(conveyor, target, source)

        monkeypatch.setattr(Conveyor, "_copy", late)
    found = []
    for batch in offload.Prefetcher(batches(), device="cuda"):
        assert batch.device == torch.device("cuda", torch.cuda.current_device())
        if slow == "compute":
            sleep()
        found.append(batch.sum())
    assert [value.item() for value in found] == expected


def test_a_freed_batch_is_not_overwritten_before_its_reader_has_passed():
    prefetched = offload.Prefetcher(batches(6), device="cuda")
    found = []
    for batch in prefetched:
        sleep()  # the reader below is late; the next target may be this batch's memory
        found.append(batch.clone())
        del batch
    for value, expected in zip(found, batches(6), strict=True):
        assert torch.equal(value.cpu(), expected)


def test_the_next_copy_runs_while_this_step_computes():
    prefetched = offload.Prefetcher(batches(6), device="cuda")
    for number, batch in enumerate(prefetched):
        batch.sum()
        sleep()
        if number == 0:
            torch.cuda.synchronize()
            prefetched.feed.device_wait_seconds = 0.0  # the first batch has no step before it
    torch.cuda.synchronize()
    assert prefetched.feed.copied_bytes == 6 * ROWS * 8
    assert prefetched.feed.device_wait_seconds < 6 * 0.03


def test_a_consumer_on_another_stream():
    side = torch.cuda.Stream()
    given = iter(offload.Prefetcher(batches(3), device="cuda"))
    found = [next(given).sum()]
    with torch.cuda.stream(side):
        for batch in given:
            sleep()
            found.append(batch.sum())
            del batch
    side.synchronize()
    assert [value.item() for value in found] == [batch.sum().item() for batch in batches(3)]


def test_memory_of_a_pass_that_is_dropped_is_not_written_later(monkeypatch):
    from offload.feed import Conveyor

    copy = Conveyor._copy

    def late(conveyor, target, source):
        sleep()
        return copy(conveyor, target, source)

    monkeypatch.setattr(Conveyor, "_copy", late)
    given = iter(offload.Prefetcher(batches(3), device="cuda"))
    next(given)
    given.close()  # the second batch is on its way
    fresh = [torch.full((ROWS,), -1, dtype=torch.int64, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert all(bool((block == -1).all()) for block in fresh)


def test_a_loader_that_raises_raises_at_its_batch():
    def source():
        yield from batches(2)
        raise OSError("batch 2 cannot be read")

    seen = []

    def run() -> None:
        for batch in offload.Prefetcher(source(), device="cuda"):
            seen.append(batch.sum().item())

    with pytest.raises(OSError, match="batch 2 cannot be read"):
        run()
    assert seen == [batch.sum().item() for batch in batches(2)]


def test_structures_pinned_and_resident_tensors_and_the_rest():
    resident = torch.ones(3, device="cuda")
    batch = {"x": torch.ones(2, 3).pin_memory(), "t": torch.ones(3, 2).t(), "names": ["a"], "more": (resident, None)}
    [found] = offload.Prefetcher([batch], device="cuda")
    assert found["x"].is_cuda
    assert found["t"].is_cuda
    assert torch.equal(found["t"].cpu(), batch["t"])
    assert found["names"] == ["a"]
    assert found["more"][0] is resident
