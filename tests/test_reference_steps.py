"""Reference steps on the real engine: they alone defer copy-outs."""

import pytest
import torch
from planned_rig import batch, enabled, known_link, make, plain_run, told_blocks, train  # noqa: F401
from torch import nn

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
