"""Reference steps on the real engine: they alone defer copy-outs."""

from dataclasses import replace

import pytest
import torch
from planned_rig import batch, enabled, known_link, make, plain_run, told_blocks, train  # noqa: F401
from torch import nn

from offload.control.limits import LIMITS
from offload.control.promise import SlowdownPromise
from offload.runtime.executor import Stopwatch


class Deferrals:
    """What stopwatches tell the store."""

    def __init__(self, monkeypatch):
        self.said = []
        self.is_on = False
        for name in ("defer_copy_outs", "end_deferral"):
            monkeypatch.setattr(Stopwatch, name, self._wrapped(name, getattr(Stopwatch, name)))

    def _wrapped(self, name, method):
        def call(stopwatch):
            was = stopwatch._defers_copy_outs
            method(stopwatch)
            if stopwatch._defers_copy_outs != was:
                self.is_on = not was
                self.said.append(name)

        return call


@pytest.fixture
def run(tmp_path, monkeypatch):
    model, optimizer = make()
    with enabled(model, max_slowdown=0.05, spill_dir=tmp_path, recompute=False) as handle:
        yield model, optimizer, handle, Deferrals(monkeypatch)


def reference_steps(handle):
    return handle.report().reference_steps


def test_deferral_ends_with_the_step(run):
    model, optimizer, handle, deferrals = run
    results, _ = train(model, optimizer, [512] * 8)
    expected, _ = plain_run([512] * 8)
    assert all(map(torch.equal, results, expected))
    count = reference_steps(handle)
    assert count >= 1
    assert deferrals.said == ["defer_copy_outs", "end_deferral"] * count


def test_deferral_ends_where_backward_never_runs(run):
    model, optimizer, _, deferrals = run
    while not deferrals.is_on:
        x, y = batch(512, 0)
        loss = nn.functional.cross_entropy(model(x), y)
        if not deferrals.is_on:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    del loss
    x, y = batch(512, 0)
    nn.functional.cross_entropy(model(x), y).backward()
    assert deferrals.said[:2] == ["defer_copy_outs", "end_deferral"]
    assert not deferrals.is_on


def test_steps_after_the_search_are_counted_without_reference_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, replans=0))
    monkeypatch.setattr(SlowdownPromise, "_wants_reference", lambda promise, planned: planned.steps % 3 == 0)
    model, optimizer = make()
    found = []
    with enabled(model, memory_limit="8GiB", spill_dir=tmp_path, recompute=False) as handle:
        for _ in range(16):
            train(model, optimizer, [512])
            report = handle.report()
            found.append((report.settled_steps, report.reference_steps))
    assert found[0] == (0, 0)  # it was profiled
    steps = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(found[1:], found, strict=False)]
    settled = steps[steps.index((1, 0)) :]
    assert set(settled) == {(1, 0), (0, 1)}
