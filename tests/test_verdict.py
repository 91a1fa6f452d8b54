"""The report's first lines: which steps they are about, and their words for given figures."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.inject import inject_fault
from live_bytes import end_copies_at_once
from planned_rig import enabled, known_link, make, plain_run, train  # noqa: F401
from torch import nn

import offload
from offload.diagnostics.verdict import Verdict

MIB = 1 << 20


def test_the_error_is_public_and_a_mistake_of_the_caller(tmp_path: Path) -> None:
    model, optimizer = make()
    with enabled(model, memory_limit="100KiB", spill_dir=tmp_path) as handle, handle.explain_oom():
        train(model, optimizer, [512])
        with pytest.raises(offload.InfeasibleLimitError) as refused:
            train(model, optimizer, [512])
    error = refused.value
    assert isinstance(error, ValueError)
    assert not isinstance(error, MemoryError)
    assert not hasattr(error, "offload_explanation")
    again = pickle.loads(pickle.dumps(error))
    assert (again.limit_bytes, again.least_limit_bytes, str(again)) == (100 << 10, error.least_limit_bytes, str(error))
    to_write = re.search(r'Write memory_limit="(\w[\w.]*)"', str(error))
    assert to_write is not None
    model, optimizer = make()
    with enabled(model, memory_limit=to_write[1], spill_dir=tmp_path) as handle:
        train(model, optimizer, [512] * 3)
        assert handle.report().verdict.kind == "planned"


def test_it_is_about_the_shape_with_most_steps(tmp_path: Path) -> None:
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [512] * 5)
        alone = handle.report().verdict
        train(model, optimizer, [100])
        verdict = handle.report().verdict
        assert (verdict.kind, verdict.tensors) == ("planned", alone.tensors)
        assert verdict.step_bytes_unswapped == alone.step_bytes_unswapped, "not of the ragged last batch"


def test_two_rounds_at_a_time_are_not_weighed(tmp_path: Path) -> None:
    """What is in memory is both's: it cannot be told apart, and the plan's figure is told as a prediction."""
    model, _ = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        for _ in range(4):
            losses = [model(torch.randn(512, 32)).sum() for _ in range(2)]
            for loss in losses:
                loss.backward()
        verdict = handle.report().verdict
        assert verdict.activation_bytes is None
        assert verdict.activation_bytes_planned
        assert "at peak (predicted) instead of" in verdict.memory()


def test_what_a_reference_step_waits_for_is_not_late(tmp_path: Path) -> None:
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [512] * 3)  # the third one is the first reference step
        report = handle.report()
        assert report.reference_steps == 1
        assert report.loaded_late == 0
    assert dict(report.rows())["slow profiling steps"].startswith("1; reference steps: 1; ")


def test_late_is_what_a_schedule_brought_back_too_late(tmp_path: Path) -> None:
    """A profiled step loads everything on demand, as it should: that is no delay of a planned one."""
    _, plain_peak = plain_run([512] * 4)
    model, optimizer = make()
    with enabled(model, memory_limit=int(0.4 * plain_peak), spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [512])
        report = handle.report()
        assert report.misses > 0
        assert (report.loaded_late, report.prefetched_late) == (0, 0)
        train(model, optimizer, [512] * 5)
        later = handle.report()
        assert later.loaded_late == later.misses - report.misses
        assert later.unmeasured_steps == 0
    rows = dict(later.rows())
    assert rows["slow profiling steps"] == "1; steps that reuse a larger shape's plan: 0"
    assert rows["prefetched in time"].startswith(f"{later.prefetched - later.prefetched_late}; loaded late: ")


def test_by_hand_a_few_steps_are_measured_and_that_is_said() -> None:
    model, optimizer = make()
    with offload.enable(model, n_tensors=-1, lb=2, min_tensor_bytes=1) as handle:
        end_copies_at_once(handle._engine)
        train(model, optimizer, [256] * 12)
        report = handle.report()
        verdict = report.verdict
        assert (verdict.kind, verdict.steps_measured, report.unmeasured_steps) == ("by hand", 5, 12 - 1 - 5)
        assert verdict.step_seconds
        assert verdict.compute_seconds
        assert " as far as measured; loaded late: " in dict(report.rows())["prefetched in time"]
        assert verdict.activation_bytes is not None
        assert verdict.activation_bytes_unswapped is not None
        assert 0 < verdict.activation_bytes <= verdict.activation_bytes_unswapped


def test_what_could_not_leave_is_in_memory_and_said(tmp_path: Path) -> None:
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path) as handle:
        train(model, optimizer, [512] * 3)
        before = handle.report().verdict
        assert before.activation_bytes is not None
        inject_fault(handle._engine.store, "write", "error", nth=1, error_number=28, persistent=True)
        train(model, optimizer, [512] * 2)
        verdict = handle.report().verdict
        assert verdict.activation_bytes is not None
        assert verdict.activation_bytes_unswapped is not None
        assert verdict.activation_bytes > before.activation_bytes
        assert verdict.activation_bytes >= 0.8 * verdict.activation_bytes_unswapped
        assert re.match(
            r"off plan: \d+ of \d+ tensors to be swapped, .*; \d+ tensors stayed, since writing them failed; "
            r".* more activations",
            verdict.state(),
        )


def test_what_others_have_found_is_in_the_verdict_once() -> None:
    model = nn.Linear(4, 1)
    with offload.enable(model) as handle:
        for _ in range(2):
            handle._enabled.misplaced = "the model has moved <away>"
        report = handle.report()
    assert report.verdict.state() == "no training step has run yet; the model has moved <away>"
    assert "moved &lt;away&gt;" in report._repr_html_()
    assert handle.report().verdict.state().endswith("; disabled now")


def test_nothing_to_swap_says_why() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    with offload.enable(model) as handle:
        for _ in range(6):
            model(torch.randn(8, 64)).sum().backward()
        verdict = handle.report().verdict
    state = r"nothing to swap: no saved tensor can be swapped \(kept: small\)(; hooks are off)?"
    assert re.fullmatch(state, verdict.state()), verdict.state()
    assert verdict.memory().startswith("whole step ")
    assert "activations" not in verdict.memory()


def test_a_handle_of_a_freed_model_has_a_report() -> None:
    handle = offload.enable(nn.Linear(4, 1), n_tensors=0)
    assert repr(handle) == "<offload.Session of a freed model on cpu: off: n_tensors=0 swaps no saved tensor>"
    memory, time, _ = str(handle.report().verdict).splitlines()
    assert memory == "memory  activations as without offload"  # state and parameters may still move
    assert time == "time    not measured: n_tensors=0 needs no plan"


# -- words, with figures given ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "memory", "time", "state"),
    [
        (
            {
                "kind": "planned",
                "activation_bytes": 111 * MIB,
                "activation_bytes_unswapped": 325 * MIB,
                "step_bytes_planned": 431 * MIB,
                "step_bytes_unswapped": 645 * MIB,
                "step_seconds": 1.02,
                "step_seconds_planned": 1.01,
                "compute_seconds": 0.98,
                "tensors": 24,
                "tensors_swapped": 20,
            },
            "activations 111 MiB at peak instead of 325 MiB (-66 %); whole step 431 MiB (predicted) instead of 645 MiB",
            "step 1.02 s, predicted 1.01 s, without offload about 0.98 s (+4 %)",
            "on plan: 20 of 24 tensors swapped, none late",
        ),
        (
            {
                "kind": "planned",
                "activation_bytes_planned": 3 << 30,
                "activation_bytes_unswapped": 12 << 30,
                "step_seconds_planned": 0.0214,
                "compute_seconds": 0.02,
                "tensors": 24,
                "tensors_swapped": 20,
                "late_tensors": 2,
                "late_seconds": 0.0123,
                "late_seconds_planned": 0.0051,
                "problems": ("4 tensors stayed",),
            },
            "activations 3.0 GiB at peak (predicted) instead of 12.0 GiB (-75 %)",
            "step 21.4 ms predicted (not measured yet), without offload about 20.0 ms (+7 %)",
            "off plan: 20 of 24 tensors swapped, 2 late (12.3 ms a step, 5.1 ms planned); 4 tensors stayed",
        ),
        ({"kind": "no step"}, "not known yet", "no planned step has been measured yet", "no training step has run yet"),
        (
            {"kind": "profiling", "reason": "why", "activation_bytes_unswapped": 7 << 20, "compute_seconds": 2.0},
            "activations 7.00 MiB at peak without offload",
            "without offload about 2.00 s",
            "profiling: why",
        ),
    ],
)
def test_words(figures: dict[str, Any], memory: str, time: str, state: str) -> None:
    verdict = Verdict(device="cpu", **figures)
    assert (verdict.memory(), verdict.time(), verdict.state()) == (memory, time, state)
    assert str(verdict) == f"memory  {memory}\ntime    {time}\nstate   {state}"


def test_every_field_has_a_meaning() -> None:
    for kind in (offload.Report, Verdict):
        documented = re.findall(r"^(\w[\w, ]*) : ", inspect.cleandoc(kind.__doc__ or ""), re.M)
        names = {name for group in documented for name in group.split(", ")}
        assert names == set(kind.__dataclass_fields__), kind
