"""With `memory_limit`, a loss outside of the model that begins to need more memory is noticed by the device's peak."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import plant as machines
import pytest
import torch
from forked_python import run_python
from planned_rig import assert_equal, enabled, known_link  # noqa: F401
from torch import nn

from offload.control import peak_watch
from offload.control.limits import LIMITS
from offload.control.peak_watch import PeakWatch
from offload.control.phase import Phase, SignatureState, SignatureStates
from offload.control.planned_step import PlannedStep
from offload.control.repeated_profile import compare_again, restore_profile, take_over
from offload.plan import InfeasibleLimitError, Link
from offload.plan.trace import Node, SavedTensor, Trace
from offload.profiling.model_state import HeldBytes
from offload.profiling.profiler import Profile

MIB = 1 << 20
LIMIT_BYTES = 100 * MIB


@pytest.fixture
def peak(monkeypatch):
    """The device's peak, which a test sets."""
    found = mock.Mock(return_value=0)
    monkeypatch.setattr(peak_watch, "peak_bytes", found)
    return found


def growths(device, peak, steps, limit_bytes=LIMIT_BYTES):
    """For each step whether growth is noticed. `steps`: the peaks before and after each, in MiB."""
    watch, found = PeakWatch(torch.device(device), limit_bytes, LIMITS), []
    for before, after in steps:
        peak.return_value = before * MIB
        watch.begin()
        peak.return_value = after * MIB
        watch.end()
        found.append(watch.has_grown())
    return found


def test_on_the_cpu_only_a_large_growth_counts(peak):
    """16 MiB, or 5 % of the limit if that is more; the resident set is larger than the limit then."""
    assert growths("cpu", peak, [(500, 516), (516, 533)]) == [False, True]
    assert growths("cpu", peak, [(1500, 1550), (1550, 1601)], 1000 * MIB) == [False, True]
    assert growths("cpu", peak, [(50, 99), (50, 101)]) == [False, True]


def test_on_an_accelerator_a_peak_counts_that_is_above_the_limit(peak):
    assert growths("cuda", peak, [(50, 104), (104, 106), (106, 106), (20, 106)]) == [False, True, False, False]


def test_each_time_it_has_to_be_twice_as_much(peak):
    steps = [(200, 200 + more) for more in (20, 30, 40, 70)]
    assert growths("cpu", peak, steps) == [True, False, True, True]
    steps = [(20, 100 + more) for more in (6, 9, 11, 19, 21)]
    assert growths("cuda", peak, steps) == [True, False, True, False, True]


def test_without_a_limit_the_peak_is_not_read(peak):
    assert growths("cpu", peak, [(0, 500)], None) == [False]
    assert not peak.called


def test_what_happens_between_two_steps_does_not_count(peak):
    watch = PeakWatch(torch.device("cpu"), LIMIT_BYTES, LIMITS)
    for cancelled in (False, True):
        watch.begin()
        watch.cancel() if cancelled else watch.end()
        peak.return_value += 500 * MIB
        watch.end()
        assert not watch.has_grown()


def profiled(base_bytes, *, knows_temporaries=True, state=0, gradients=0):
    nodes = (Node("a", 1.0, False), Node("b", 1.0, False), Node("c", 1.0, True), Node("d", 1.0, True))
    trace = Trace(nodes, base_bytes, (SavedTensor(1, 500, 0, 0, 0, 3, 3),))
    return Profile(machines.order_of(trace), trace, {1: (1,)}, [0] * 4, HeldBytes(state, gradients), knows_temporaries)


CASES = {
    "the same": ((100, 200, 100, 100), {}, (100, 200, 100, 100)),
    "noise": ((100, 240, 100, 100), {}, (100, 200, 100, 100)),
    "less": ((50, 50, 50, 50), {}, (100, 200, 100, 100)),
    "more in a node": ((50, 650, 100, 100), {}, (100, 650, 100, 100)),
    "more state": ((160, 260, 160, 160), {"state": 60}, (100, 200, 100, 100)),
    "more gradients": ((160, 260, 160, 160), {"gradients": 60}, (100, 200, 100, 100)),
    "more state and more in a node": ((160, 860, 160, 160), {"state": 60}, (100, 800, 100, 100)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_over(name, caplog):
    """From each node that needs more, and not where the optimizer's state or gradients explain it."""
    found, given, expected = CASES[name]
    before = profiled((100, 200, 100, 100))
    planned = PlannedStep(LIMITS, before, Link(1e9, 1e9), HeldBytes(0, 0))
    has_more = expected != (100, 200, 100, 100)
    assert take_over(planned, profiled(found, **given), 1000, LIMITS) == has_more
    assert planned.profile.trace.base_bytes == expected
    assert planned.known is (before if has_more else None)
    assert ("it is planned again" in caplog.text) == has_more


def test_a_step_goes_on_if_no_plan_keeps_the_limit(caplog):
    before = profiled((100, 200, 100, 100))
    planned = PlannedStep(LIMITS, before, Link(1e9, 1e9), HeldBytes(0, 0))
    error = InfeasibleLimitError(1000, 1200, ())
    assert not restore_profile(planned, error), "it is raised, as ever"
    assert take_over(planned, profiled((100, 1200, 100, 100)), 1000, LIMITS)
    assert restore_profile(planned, error)
    assert planned.profile is before
    assert not restore_profile(planned, error), "a later one is raised"
    assert (
        "no plan keeps memory_limit (1000 B) any more, so steps exceed it; the least limit is 1.17 KiB" in caplog.text
    )


COMPARED = {  # by what the profile is: whether the doubted one is in use again, and whether it has taken over more
    "usable": ({}, True, True),
    "incomplete": ({"knows_temporaries": False}, False, False),
    "disturbed": ({"is_disturbed": True}, False, False),
    "not alone": ({"is_alone": False}, False, False),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_profile_that_cannot_be_compared_is_repeated(name):
    given, is_used, has_more = COMPARED[name]
    planned = PlannedStep(LIMITS, profiled((100, 200, 100, 100)), Link(1e9, 1e9), HeldBytes(0, 0))
    states = SignatureStates(a=SignatureState(Phase.STEADY, planned=planned))
    states.doubt()
    states.doubt()  # before the step comes
    state = states["a"]
    assert (state.planned, state.doubted) == (None, planned)
    profile = profiled((100, 700, 100, 100), knows_temporaries=given.get("knows_temporaries", True))
    stopwatch = SimpleNamespace(is_disturbed=given.get("is_disturbed", False))
    profiler = SimpleNamespace(stopwatch=stopwatch, is_alone=given.get("is_alone", True))
    options = SimpleNamespace(memory_limit=1000)
    assert compare_again(state, profile, profiler, options, LIMITS)
    assert (state.planned is planned) == is_used
    assert (planned.known is not None) == has_more
    assert state.phase is (Phase.PLANNING if has_more else Phase.STEADY)
    while state.doubted is not None:
        assert state.comparisons < LIMITS.incomplete_profiles
        assert compare_again(state, profile, profiler, options, LIMITS)
    assert state.planned is planned
    assert state.phase is (Phase.PLANNING if has_more else Phase.MEASURING)


def test_a_profile_with_other_nodes_replaces_the_doubted_one():
    planned = PlannedStep(LIMITS, profiled((100, 200, 100, 100)), Link(1e9, 1e9), HeldBytes(0, 0))
    state = SignatureState(Phase.STEADY, doubted=planned)
    other = profiled((100, 200, 100, 100))
    other = replace(other, trace=replace(other.trace, nodes=other.trace.nodes[1:], base_bytes=(1, 1, 1), tensors=()))
    profiler = SimpleNamespace(stopwatch=SimpleNamespace(is_disturbed=False), is_alone=True)
    assert not compare_again(state, other, profiler, SimpleNamespace(memory_limit=1000), LIMITS)
    assert state.doubted is None


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(8) for each in (nn.Linear(128, 128), nn.GELU())])


def train(model, sizes, watched=lambda number: None):
    """Losses and gradients of steps with these numbers of rows. `watched` is called in each one, before backward."""
    found = []
    for number, rows in enumerate(sizes):
        x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        loss = model(x).square().mean()
        watched(number)
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters())]
    return found


@pytest.mark.parametrize("is_left_out", [False, True])
def test_every_shape_is_profiled_again(is_left_out, monkeypatch, tmp_path, peak, caplog):
    """Also after one that borrows a plan. None needs more, so the plans stay. Left out: no step is watched."""
    if is_left_out:
        monkeypatch.setattr(PeakWatch, "begin", lambda _: None)
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, borrow_from=2, replans=0))
    sizes = [512, 768] * 8 + [640] * 2 + [512, 768, 640] * 2
    grows_in = 17  # a step of 640 rows, which follows the plan of 768
    expected = train(make_model(), sizes)

    def watched(number):
        peak.return_value = 64 * MIB if number >= grows_in else 0

    model = make_model()
    with (
        enabled(model, spill_dir=tmp_path, recompute=False, memory_limit=5 * MIB) as handle,
        caplog.at_level(logging.INFO, "offload"),
    ):
        plans = []

        def noted(number):
            watched(number)
            plans.append(handle.plan)

        found = train(model, sizes, noted)
        counts = handle._counts
    assert_equal(found, expected)
    assert counts.profiled_steps == (2 if is_left_out else 4)
    assert counts.borrowed_steps == 4
    assert plans[-1] is plans[grows_in]
    assert "planned again" not in caplog.text


def in_two_parts(model, steps=24, watched=lambda number: None):
    """Two forward passes before both backward passes."""
    found = []
    for number in range(steps):
        model.zero_grad()
        xs = [torch.randn(256, 128, generator=torch.Generator().manual_seed(2 * number + k)) for k in range(2)]
        losses = [model(x).square().mean() for x in xs]
        watched(number)
        for loss in losses:
            loss.backward()
        found.extend(each.grad.clone() for each in model.parameters())
    return found


def test_a_second_graph_is_no_growth(monkeypatch, tmp_path, peak, caplog):
    """Its memory counts in no comparison: none of three profiles can be compared."""
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, replans=0))

    def watched(number):
        peak.return_value = 64 * MIB if number >= 12 else 0

    expected, model = in_two_parts(make_model()), make_model()
    caplog.set_level(logging.INFO, "offload")
    with enabled(model, spill_dir=tmp_path, recompute=False, memory_limit=6 * MIB) as handle:
        found = in_two_parts(model, watched=watched)
        assert handle._counts.profiled_steps == 1 + LIMITS.incomplete_profiles
    assert_equal(found, expected)
    assert "needs up to" not in caplog.text
    assert "could not be compared" in caplog.text


SCRIPT = """
import json, sys
sys.path.insert(0, {folder!r})
from dataclasses import replace
import torch, offload
from live_bytes import Peak, tell_blocks_of_all
from offload import handle as making
from offload.control.peak_watch import PeakWatch
from torch import nn

if {is_left_out}:
    PeakWatch.begin = lambda _: None
making.LIMITS = replace(making.LIMITS, replans=0)
tell_blocks_of_all()
torch.manual_seed(0)
model = nn.Sequential(*[each for _ in range(8) for each in (nn.Linear(128, 128), nn.GELU())])
held_bytes = 2 * sum(each.nbytes for each in model.parameters())
peaks, profiled = [], []
with offload.enable(model, memory_limit={limit_bytes}, recompute=False) as handle:
    for number in range(28):
        model.zero_grad(set_to_none=False)

        def step():
            y = model(torch.randn(16384, 128))
            loss = y.square().mean()
            if number >= 10 and number % {every} == 0:
                loss = loss + sum(torch.relu(y + shift).square().mean() for shift in range(6))
            loss.backward()

        if number in (7, 16, 24):  # not in the step after the one that is profiled again
            peak = Peak()
            with peak.watch():
                step()
            peaks.append(held_bytes + peak.nbytes)
        else:
            step()
        profiled.append(handle._counts.profiled_steps)
    print(json.dumps([peaks, profiled]))
"""


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_limit_is_kept_again_after_a_loss_has_begun_to_need_more(is_left_out):
    """In a fresh process, whose resident set has not been larger before. Left out: it is exceeded from then on."""
    about = {"folder": str(Path(__file__).parent), "limit_bytes": 120 * MIB}
    ran = run_python("-c", SCRIPT.format(is_left_out=is_left_out, every=1, **about))
    assert ran.returncode == 0, ran.stderr
    (before, soon, later), profiled = json.loads(ran.stdout)
    assert before <= 1.01 * about["limit_bytes"]
    assert (max(soon, later) <= 1.01 * about["limit_bytes"]) != is_left_out
    assert (min(soon, later) > 1.2 * about["limit_bytes"]) == is_left_out
    assert ("memory_limit (120.00 MiB) may have been exceeded; it is planned again" in ran.stderr) != is_left_out
    assert profiled[10] == 1
    assert profiled[-1] == (1 if is_left_out else 2)


def test_steps_that_need_more_now_and_then_may_be_missed_but_the_others_go_on():
    """The step after the one that needed more is profiled, and needs no more than the profiled one."""
    about = {"folder": str(Path(__file__).parent), "limit_bytes": 120 * MIB}
    ran = run_python("-c", SCRIPT.format(is_left_out=False, every=6, **about))
    assert ran.returncode == 0, ran.stderr
    (before, _, heavy), profiled = json.loads(ran.stdout)
    assert before <= 1.01 * about["limit_bytes"]
    assert heavy > 1.2 * about["limit_bytes"]
    assert profiled[-1] == 2
    assert "planned again" not in ran.stderr
