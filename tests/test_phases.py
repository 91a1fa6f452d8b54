"""What the controller does from step to step: refused limits, measurements that a report has read, borrowed plans."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from planned_rig import assert_equal, batch, enabled, known_link, make, told_blocks, train  # noqa: F401

import offload
from offload.control.limits import LIMITS
from offload.control.phase import SignatureState, SignatureStates
from offload.control.promise import SlowdownPromise
from offload.control.signature import Signature
from offload.control.trials import Trials
from offload.devices.allocator import LargeBlocks
from offload.plan import make_plan


def test_a_limit_that_cannot_be_kept_any_more_is_refused_until_it_can(tmp_path):
    model, optimizer = make()
    expected = train(model, optimizer, [512] * 6)[0] + train(model, optimizer, [512] * 6)[0]
    model, optimizer = make()
    with enabled(model, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [512] * 2)
        limit_bytes = int(0.7 * handle.plan.unswapped_peak_bytes)
    model, optimizer = make()
    with enabled(model, memory_limit=limit_bytes, spill_dir=tmp_path, recompute=False) as handle:
        results, _ = train(model, optimizer, [512] * 6)
        assert handle.plan.swaps
        model.register_buffer("large", torch.zeros(limit_bytes, dtype=torch.uint8))
        for _ in range(3):
            with pytest.raises(offload.InfeasibleLimitError):
                model(batch(512, 6)[0])
        del model.large
        results += train(model, optimizer, [512] * 6)[0]
        assert handle.plan.peak_bytes <= limit_bytes
    assert_equal(results, expected)


@pytest.mark.parametrize("reports", [False, True])
def test_measurements_that_a_report_has_read_are_judged(reports, tmp_path, monkeypatch):
    monkeypatch.setattr("offload.handle.LIMITS", replace(LIMITS, steady_measured_every=2))
    needs_plan, judged = SlowdownPromise.needs_plan, []

    def judging(promise, planned):
        judged.append(planned.steps)
        return needs_plan(promise, planned)

    monkeypatch.setattr(SlowdownPromise, "needs_plan", judging)
    model, optimizer = make()
    with enabled(model, memory_limit="8GiB", spill_dir=tmp_path, recompute=False) as handle:
        for _ in range(24):
            train(model, optimizer, [512])
            if reports:
                handle.report()
    assert [steps for steps in judged if steps > 12]


def test_a_plan_that_was_made_for_a_smaller_step_may_have_a_trial_step(tmp_path, monkeypatch):
    begin_due, asked = Trials.begin_due, []

    def asking(trials, state, planned, model):
        asked.append(planned.signature)
        return begin_due(trials, state, planned, model)

    monkeypatch.setattr(Trials, "begin_due", asking)
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [512, 500, 490, 480, 600, 590])
        assert handle.report().borrowed_steps == 1
        lender = handle._controller.latest()
        assert lender.plan is not None
        assert lender.signature not in asked
        train(model, optimizer, [600])
        assert lender.signature in asked


def test_a_search_that_ends_with_nothing_swapped_ends_the_return_of_large_blocks(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(LargeBlocks, "return_at_once", lambda blocks, *, wanted: asked.append(wanted))

    def settle(promise, planned):
        if planned.is_measured and planned.plan.swaps:
            planned.search.is_settled = True
            planned.follow(make_plan(planned.trace(), planned.link, ()), None)
        return False

    monkeypatch.setattr(SlowdownPromise, "needs_plan", settle)
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, memory_limit="8GiB", spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [512] * 3)
        assert handle.plan.swaps
        assert asked[-1]
        train(model, optimizer, [512] * 12)
        assert not handle.plan.swaps
        assert not asked[-1]


def test_no_plan_is_borrowed_from_a_profile_without_temporaries():
    def state(incomplete):
        return SignatureState(planned=SimpleNamespace(is_incomplete=incomplete))

    def signature(rows):
        return Signature(((rows, 4),), (torch.float32,), 16 * rows)

    states = SignatureStates({signature(rows): state(rows == 600) for rows in (500, 400, 550, 600)})
    states |= {signature(rows): SignatureState() for rows in (300, 580)}
    assert states.lender(signature(300), 3) is states[signature(550)]
    assert states.lender(signature(580), 3) is None
    assert states.lender(signature(300), 4) is None


def test_a_first_limit_that_cannot_be_kept_is_refused_until_it_can(tmp_path):
    model, optimizer = make()
    with enabled(model, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [512] * 2)
        limit_bytes = int(0.7 * handle.plan.unswapped_peak_bytes)
    model, optimizer = make()
    with enabled(model, memory_limit=limit_bytes, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [512])
        model.register_buffer("large", torch.zeros(limit_bytes, dtype=torch.uint8))
        for _ in range(2):
            with pytest.raises(offload.InfeasibleLimitError):
                model(batch(512, 6)[0])
        del model.large
        train(model, optimizer, [512] * 3)
        assert handle.plan.swaps
