"""`Prefetcher` without a device: batches pass through, waits are counted, failures arrive where they belong."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offload


class Source:
    """A loader that raises for one of its batches, and tells whether its pass was closed."""

    def __init__(self, fails_at: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        self.fails_at = fails_at
        self.error = error
        self.closed = 0

    def __iter__(self):
        try:
            for number in range(5):
                if number == self.fails_at:
                    raise self.error(f"batch {number} cannot be read")
                yield torch.full((2, 3), float(number))
        finally:
            self.closed += 1


def test_batches_are_the_loaders_own_with_a_ragged_last_one():
    data = torch.arange(30.0).view(10, 3)
    loader = DataLoader(TensorDataset(data, torch.arange(10)), batch_size=4)
    batches = offload.contrib.Prefetcher(loader, device="cpu")
    assert len(batches) == 3
    for _ in range(2):
        found = list(batches)
        assert [len(x) for x, _ in found] == [4, 4, 2]
        assert torch.equal(torch.cat([x for x, _ in found]), data)
    assert (batches.feed.batches, batches.feed.empty_batches, batches.feed.copied_bytes) == (6, 0, 0)


def test_on_the_cpu_nothing_is_taken_ahead_of_need():
    taken = []

    def source():
        for number in range(3):
            taken.append(number)
            yield torch.ones(number + 1)

    given = iter(offload.contrib.Prefetcher(source(), device="cpu"))
    next(given)
    assert taken == [0]


def test_structures_pass_as_they_are():
    batch = {"x": torch.ones(2, 3), "names": ["a", "b"], "more": (torch.zeros(2), None)}
    [found] = offload.contrib.Prefetcher([batch], device="cpu")
    assert found is batch


def test_waiting_is_counted_and_reported(tmp_path):
    model = nn.Linear(3, 3)

    def slow():
        for _ in range(3):
            time.sleep(0.02)
            yield torch.ones(2, 3)

    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1, spill_dir=tmp_path) as handle:
        assert "waited for data" not in str(handle.report())
        batches = offload.contrib.Prefetcher(slow(), handle=handle)
        for x in batches:
            model(x).sum().backward()
    report = handle.report()
    assert batches.device == torch.device("cpu")
    assert (report.feed.batches, report.feed.late_batches) == (3, 3)
    assert report.feed.wait_seconds >= 0.06
    assert report.to_dict()["feed"]["wait_seconds"] == report.feed.wait_seconds
    assert "3 of 3 batches 1 ms or more" in str(report)


def test_two_loaders_add_up_in_the_report(tmp_path):
    model = nn.Linear(3, 3)
    with offload.enable(model, spill_dir=tmp_path) as handle:
        for rows in (2, 3):
            assert len(list(offload.contrib.Prefetcher(torch.ones(rows, 3).split(1), handle=handle))) == rows
        assert handle.report().feed.batches == 5


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt])
def test_a_loader_that_raises_raises_at_its_batch(error):
    source = Source(fails_at=3, error=error)
    threads = threading.active_count()
    seen = []

    def run() -> None:
        for batch in offload.contrib.Prefetcher(source, device="cpu"):
            seen.append(batch[0, 0].item())

    with pytest.raises(error, match="batch 3 cannot be read"):
        run()
    assert seen == [0.0, 1.0, 2.0]
    assert source.closed == 1
    assert threading.active_count() == threads


class NoCopies:
    """Stands in for the copies to an accelerator."""

    def __init__(self, *_: object) -> None:
        pass

    def send(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def receive(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def close(self) -> None:
        pass


@pytest.mark.parametrize("last", [None, 2])  # the loader is one batch ahead: the loop may end before the error's turn
def test_the_error_of_a_loader_is_freed_with_the_tensors_of_its_loop(monkeypatch, last):
    """Its traceback refers to the frames of the loop: in a reference cycle, they would wait for the collector."""
    monkeypatch.setattr("offload.contrib.prefetcher.Conveyor", NoCopies)

    def run() -> weakref.ref[torch.Tensor]:
        held = torch.ones(3)
        alive = weakref.ref(held)
        batches = offload.contrib.Prefetcher(Source(fails_at=3), device="cpu")
        batches.device = torch.device("cuda")
        try:
            for number, _ in enumerate(batches):
                if number == last:
                    return alive
        except RuntimeError:
            assert last is None
            return alive
        raise AssertionError("the loader has not raised")

    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_a_pass_that_is_dropped_half_way_leaves_nothing():
    source = Source()
    given = iter(offload.contrib.Prefetcher(source, device="cpu"))
    next(given)
    reference = weakref.ref(given)
    del given
    gc.collect()
    assert reference() is None
    assert source.closed == 1


def test_a_batch_without_rows_is_reported(tmp_path, caplog):
    model = nn.Linear(3, 3)
    with offload.enable(model, spill_dir=tmp_path) as handle:
        batches = [(torch.ones(2, 3), torch.ones(2)), (torch.ones(0, 3), torch.ones(0)), (torch.ones(0, 3), None)]
        assert len(list(offload.contrib.Prefetcher(batches, handle=handle))) == 3
        note = "2 of 3 batches had no rows: the device had nothing to compute; give a batch size of at least one row"
        assert note in str(handle.report())
    assert caplog.text.count("had no rows") == 1


def test_a_loader_without_batches_is_reported(tmp_path, caplog):
    model = nn.Linear(3, 3)
    loader = DataLoader(TensorDataset(torch.ones(10, 3)), batch_size=16, drop_last=True)
    with offload.enable(model, spill_dir=tmp_path) as handle:
        assert list(offload.contrib.Prefetcher(loader, handle=handle)) == []
        assert "gave no batch at all: with drop_last, the batch size must not exceed" in str(handle.report())
    assert "gave no batch at all" in caplog.text


def test_wrong_arguments():
    with pytest.raises(ValueError, match="takes an iterable of batches, such as a DataLoader, not 3"):
        offload.contrib.Prefetcher(3)
    with pytest.raises(ValueError, match="is a Prefetcher already"):
        offload.contrib.Prefetcher(offload.contrib.Prefetcher([]))
    with pytest.raises(ValueError, match="supports cpu and cuda devices, not meta"):
        offload.contrib.Prefetcher([], device="meta")
