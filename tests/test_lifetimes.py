"""What a step has computed is freed when the program lets go of it, and does not wait for Python's garbage collector.

The memory of a reference cycle is beyond every plan: the inputs and outputs of a step would outlive it.
"""

import gc
import time
import weakref
from functools import partial

import pytest
import torch
from planned_rig import batch, enabled, held_bytes, make
from planned_rig import known_link as known_link
from planned_rig import told_blocks as told_blocks

from offload.plan import InfeasibleLimitError, bounds

ROWS, STEPS, SLOW, TRIES = 512, 20, range(6, 12), 4


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def outlived(model, optimizer):
    """Train; return the steps whose inputs or outputs outlived them. Slow steps lead to new plans."""
    found = []
    for number in range(STEPS):
        x, y = batch(ROWS, number)
        out = model(x)
        if number in SLOW:
            time.sleep(0.03)
        torch.nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        alive = weakref.ref(x), weakref.ref(out)
        del x, y, out
        found += [number for each in alive if each() is not None]
    return found


def near_the_least_limit(folder):
    """The steps whose inputs or outputs outlived them, with the least limit that a plan keeps.

    First, a plan is asked for that leaves room for what recipes hold. There is none, and that error is caught.
    """
    limit = held_bytes(*make())
    for _ in range(TRIES):
        gc.collect()
        model, optimizer = make()
        try:
            with enabled(model, memory_limit=limit, spill_dir=folder) as handle:
                found = outlived(model, optimizer)
                assert handle.report().trial_steps == 1
                return found
        except InfeasibleLimitError as error:
            limit = error.least_limit_bytes
    raise AssertionError(f"no plan keeps {limit} bytes")


def check_with_a_cycle(trace, limit_bytes):
    """A mutant: the error is a variable of the frame to which its traceback refers."""
    error = bounds.refusal(trace, limit_bytes)
    if error is not None:
        raise error


def test_nothing_outlives_its_step_where_a_plan_was_refused(tmp_path, no_collector, monkeypatch):
    refused = []

    def noted_check(check, *about):
        try:
            check(*about)
        except InfeasibleLimitError:
            refused.append(about[1])
            raise

    monkeypatch.setattr("offload.plan.search.check_limit", partial(noted_check, bounds.check_limit))
    assert near_the_least_limit(tmp_path) == []
    assert refused
    monkeypatch.setattr("offload.plan.search.check_limit", partial(noted_check, check_with_a_cycle))
    assert near_the_least_limit(tmp_path)


@pytest.mark.parametrize("knobs", [{"max_slowdown": 0.05}, {"preset": "smallest"}, {"n_tensors": -1, "lb": 2}])
def test_nothing_outlives_its_step(tmp_path, no_collector, knobs):
    model, optimizer = make()
    with enabled(model, spill_dir=tmp_path, **knobs) as handle:
        assert outlived(model, optimizer) == []
        assert handle.report().swapped.tensors > 0
