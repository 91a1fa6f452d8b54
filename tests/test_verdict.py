"""The report's first lines, as a user's script sees them: each kind in a fresh process, beside counts of its own."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.inject import inject_fault
from live_bytes import end_copies_at_once
from page_check import check_page
from test_planned_training import enabled, known_link, make, plain_run, train  # noqa: F401
from torch import nn

import offload
from offload.devices import allocator
from offload.diagnostics.verdict import Verdict

MIB = 1 << 20
TENSOR_BYTES = 8 * MIB  # each activation of the script's model

# Counts on its own what is alive: the outputs of layers by their storages, and the blocks that came back.
SCRIPT = """
import json, sys, weakref
import torch, offload
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
sys.path.insert(0, {tests!r})
from live_bytes import Peak, end_copies_at_once, tell_blocks, told_blocks

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())))
optimizer = torch.optim.AdamW(model.parameters())
blocks, outputs, most = [0], [], [0]

def told(nbytes):
    blocks[0] += nbytes

def count(*_):
    outputs[:] = [row for row in outputs if not row[0].expired()]
    most[0] = max(most[0], blocks[0] + sum(nbytes for _, nbytes in outputs))

def came(module, inputs, output):
    outputs.append((StorageWeakRef(output.untyped_storage()), output.nbytes))
    count()
    output.register_hook(count)

def step(peak=None):
    x = torch.randn(8192, 256)
    with handle.step():
        loss = model(x).square().mean()
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

handle = offload.enable(model, {knobs})
if {is_manual}:
    end_copies_at_once(handle._engine)
result = dict(before=repr(handle))
try:
    for _ in range(7):
        step()
except offload.InfeasibleLimitError as error:
    result.update(error=str(error), least=error.least_limit_bytes, notes=getattr(error, "__notes__", []))
    result["is_out_of_memory"] = isinstance(error, MemoryError) or hasattr(error, "offload_explanation")
else:
    engine = handle._engine
    engine.new_storage = told_blocks(engine.store.alignment_bytes, told)
    hooks = [layer.register_forward_hook(came) for layer in model]
    step()
    for hook in hooks:
        hook.remove()
    engine.new_storage = None
    result["activations"] = most[0]
report = handle.report()
result.update(text=str(report), html=report._repr_html_(), told=repr(handle), about=report.to_dict())
if "error" not in result:
    tell_blocks(handle._engine)
    peak, x = Peak(), torch.randn(8192, 256)
    with peak.watch():
        model(x).square().mean().backward()
    state = [value for row in optimizer.state.values() for value in row.values()]
    result["whole"] = peak.nbytes + sum(tensor.nbytes for tensor in [*model.parameters(), *state, x])
print(json.dumps(result))
"""

KINDS = {
    "planned": 'memory_limit="80MiB"',
    "nothing to swap": 'memory_limit="100GiB"',
    "by hand": "n_tensors=6, lb=2",
    "refused": 'memory_limit="20MiB"',
    "glibc": 'memory_limit="80MiB"',
}


BY_DEFAULT = ("planned", "refused")


@pytest.fixture(
    scope="module",
    params=[each if each in BY_DEFAULT else pytest.param(each, marks=pytest.mark.long) for each in KINDS],
)
def told(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """What a script says that trains with these knobs."""
    kind = request.param
    environment = allocator.preload_environment()
    if kind == "glibc":
        environment = {**environment, "LD_PRELOAD": ""}
    program = SCRIPT.replace("{knobs}", KINDS[kind]).replace("{tests!r}", repr(str(Path(__file__).parent)))
    program = program.replace("{is_manual}", str(kind == "by hand"))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    assert "out of memory" not in done.stderr
    return kind, json.loads(done.stdout.splitlines()[-1])


def test_a_report_begins_with_three_lines(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    memory, time, state, fourth, *_ = said["text"].splitlines()
    words = {
        "planned": r"activations \d+ MiB at peak instead of 128 MiB \(-\d+ %\); whole step \d+ MiB \(predicted\) "
        r"instead of 174 MiB",
        "nothing to swap": "activations 128 MiB at peak, as without offload; whole step 174 MiB, as without offload",
        "by hand": r"activations \d+ MiB at peak instead of 128 MiB \(-\d+ %\)",
        "refused": "activations 128 MiB at peak without offload; whole step 174 MiB without offload; at least 54 MiB "
        "with every swap there is",
    }
    words["glibc"] = words["planned"]
    assert re.fullmatch(f"memory +{words[kind]}", memory), memory
    amount, change = r"[\d.]+ m?s", r" \([+±-]\d+ %\)"
    words = {
        "by hand": rf"step {amount}, without offload about {amount}{change}",
        "refused": rf"without offload about {amount}",
    }
    planned = rf"step {amount}, predicted {amount}, without offload about {amount}{change}"
    assert re.fullmatch(f"time +{words.get(kind, planned)}", time), time
    planned = r"(on|off) plan: \d+ of 16 tensors swapped, (none|\d+) late.*"
    words = {
        "nothing to swap": "nothing to swap: all 16 tensors stay, since the step fits within memory_limit as it is",
        "by hand": r"by hand \(n_tensors=6, lb=2\): 6 of 17 tensors swapped, (none|\d+) late.*",
        "refused": r'refused: no plan keeps 20\.00 MiB; write memory_limit="54\.1MiB" or more',
    }
    assert re.fullmatch(f"state +{words.get(kind, planned)}", state), state
    units = re.findall(r"[\d.]+ (\w?i?B)\b", memory), re.findall(r"\d (m?s)\b", time)
    assert all(len(set(each)) <= 1 for each in units), "one unit in each line"
    process = (
        r"process +resident set \d+ MiB now, \d+ MiB at most: glibc malloc keeps part of the freed memory\. "
        r"Start with `offload run -- python train\.py`\."
    )
    if kind == "glibc":
        assert re.fullmatch(process, fourth), fourth
    elif allocator.find_recycling_allocator() is not None:
        assert fourth == "", "where freed memory is used again, there is nothing to explain"


def test_the_figures_are_those_counted_outside(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    verdict = said["about"]["verdict"]
    assert verdict["activation_bytes_unswapped"] == 16 * TENSOR_BYTES
    if kind == "refused":
        return
    measured, counted = verdict["activation_bytes"], said["activations"]
    if kind == "by hand":
        assert abs(measured - counted) <= 2 * TENSOR_BYTES, "the most of five steps, and one: copies are never as fast"
        assert measured >= 10 * TENSOR_BYTES, "what n_tensors keeps is in memory"
        return
    planned = verdict["activation_bytes_planned"]
    assert counted <= planned
    assert measured <= planned
    assert min(measured, counted) >= planned - TENSOR_BYTES
    assert verdict["step_bytes_planned"] - TENSOR_BYTES <= said["whole"] <= verdict["step_bytes_planned"]
    if kind == "nothing to swap":
        assert measured == counted == 16 * TENSOR_BYTES


def test_the_same_as_html(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    page = said["html"]
    check_page(page)
    rows = [re.split(" {2,}", line, maxsplit=1) for line in said["text"].splitlines()[:3]]
    for name, words in rows:
        assert f"<tr><th>{name}</th><td>{escape(words)}</td></tr>" in page
    assert page.count("<svg") == (kind != "refused"), "two bars for each figure that is known with and without"
    assert "script" not in page
    assert "url(" not in page


def test_a_handle_says_what_it_is(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    wish = KINDS[kind]
    assert said["before"] == f"<offload.Session of Sequential on cpu, {wish}: no training step has run yet>"
    state = {"planned": "(on|off) plan: ", "glibc": "(on|off) plan: ", "by hand": r"by hand \("}.get(kind, kind)
    assert re.match(rf"<offload\.Session of Sequential on cpu(, {re.escape(wish)})?: {state}", said["told"]), said[
        "told"
    ]


def test_a_refused_limit_is_no_lack_of_memory(told: tuple[str, dict[str, Any]]) -> None:
    kind, said = told
    if kind != "refused":
        assert "error" not in said
        return
    assert said["notes"] == []
    assert not said["is_out_of_memory"]
    found = re.match(
        r"memory_limit: no plan keeps 20\.00 MiB; the least that works for this step is 54\.02 MiB\. Write "
        r'memory_limit="([\d.]+MiB)" or more, or make the batch smaller\. In the way: \d',
        said["error"],
    )
    assert found, said["error"]
    assert said["least"] <= offload.units.parse_bytes(found[1]) <= 1.01 * said["least"]


# -- in this process --------------------------------------------------------------------------------------------------


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


def test_what_a_reference_step_loads_on_demand_is_not_late(tmp_path: Path) -> None:
    model, optimizer = make()
    with enabled(model, max_slowdown=10.0, spill_dir=tmp_path, recompute=False) as handle:
        train(model, optimizer, [512] * 2)  # the second one is the first reference step
        report = handle.report()
        assert report.reference_steps == 1
        assert report.misses > 0
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
            r"off plan: .*; \d+ tensors stayed, since writing them failed; .* more activations", verdict.state()
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
    assert repr(handle) == "<offload.Session of a freed model on cpu: off: n_tensors=0 swaps nothing>"
    assert str(handle.report().verdict).splitlines()[:2] == ["memory  as without offload", "time    as without offload"]


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
        documented = re.findall(r"^ {4}(\w[\w, ]*) : ", kind.__doc__ or "", re.M)
        names = {name for group in documented for name in group.split(", ")}
        assert names == set(kind.__dataclass_fields__), kind
