"""What is kept of a signature between its steps, and what the promise makes of it."""

from types import SimpleNamespace
from unittest import mock

import plant as machines
import pytest
from test_plan_search import STEPS, machine

from offload.control.limits import LIMITS
from offload.control.promise import SlowdownPromise
from offload.options import Options
from offload.runtime.counters import Counts

ENDED, ABANDONED = (SimpleNamespace(stopwatch=SimpleNamespace(finished=each)) for each in (True, False))


@pytest.fixture
def planned():
    plant, profiled, calibrated = machine(0)
    planned, _ = machines.run(plant, profiled, calibrated, 4, max_slowdown=0.05)
    planned.executors.clear()
    assert not planned.search.is_settled
    return planned


def promise(plan_state=None, device="cpu", memory_limit=None):
    defaults = {**dict.fromkeys(("n_tensors", "lookahead_nodes")), "memory_limit": memory_limit}
    options = Options(**defaults, max_slowdown=0.05, min_tensor_bytes=1, exclude=(), host_limit=0, spill_dir="")
    engine = mock.Mock(**{"device.type": device})
    return SlowdownPromise(options, LIMITS, engine, mock.Mock(), plan_state)


def test_a_device_that_is_behind_gets_no_reference_steps(planned):
    """And its other steps do not count: no measured step would have one beside it."""
    planned.executors.extend([ENDED] * planned.executors.maxlen)
    planned.plan_steps = planned.search.begun + 1
    before = planned.plan_steps, planned.search.begun
    assert not any(promise().begin_reference(planned, Counts()) for _ in range(5))
    assert (planned.plan_steps, planned.search.begun) == before
    planned.executors.popleft()
    assert promise().begin_reference(planned, Counts())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_the_cpu_computes_more_slowly_after_a_wait(planned, device):
    planned.reference = None
    schedule = promise(device=device, memory_limit=1 << 60).reference_schedule(planned)
    assert schedule.is_serial
    assert planned.search.waits == (schedule.waits if device == "cpu" else frozenset())
    assert schedule.waits == {node for node, _ in schedule.releases} | {node for node, *_ in schedule.prefetches}


def test_a_step_without_a_backward_pass_is_forgotten_first(planned):
    planned.executors.extend([ENDED, ABANDONED, *[ENDED] * (planned.executors.maxlen - 2)])
    assert not planned.is_behind
    planned.remember(ENDED)
    assert list(planned.executors) == [ENDED] * planned.executors.maxlen
    assert planned.is_behind


def test_a_search_that_begins_again_may_plan_as_often_as_the_first():
    plant, profiled, calibrated = machine(0)
    planned, _ = machines.run(plant, profiled, calibrated, STEPS, max_slowdown=0.05)
    planned.replans = LIMITS.replans
    assert promise(mock.Mock(**{"is_outdated.return_value": True})).is_outdated(planned)
    assert (planned.replans, planned.search.tried, planned.search.is_settled) == (0, [], False)
