"""torch.export and TorchScript on an enabled model: they see the plain one, or say what to call first."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from forked_python import run_python
from torch import nn

import offload
from offload.torch_compat.allocation_profile import AllocationProfile

BEGIN = """
import torch, offload
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
x = torch.randn(8, 64)

def exported(module):
    return [str(node.target) for node in torch.export.export(module, (x,)).graph.nodes]

def traced(module):
    return [node.kind() for node in torch.jit.trace(module, x).inlined_graph.nodes()]

def step():
    model.zero_grad()
    model(x).sum().backward()
    return model[0].weight.grad.clone()

plain_export, plain_trace, plain, gradient = exported(model), traced(model), model(x), step()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own."""
    return run_python("-c", script, timeout=250)


@pytest.mark.long
@pytest.mark.parametrize("knobs", [pytest.param("n_tensors=-1", marks=pytest.mark.full), "max_slowdown=0.05"])
def test_export_and_trace_see_the_plain_model(knobs: str) -> None:
    """Before the first step, in the midst of the one that is profiled, and when there is a plan."""
    script = f"""{BEGIN}
for moment in ("cold", "profiling", "planned"):
    handle = offload.enable(model, min_tensor_bytes=1, {knobs})
    loss = model(x).sum() if moment == "profiling" else None
    for _ in range(3 if moment == "planned" else 0):
        step()
    steps = handle.report().steps
    assert exported(model) == plain_export
    assert torch.equal(torch.export.export(model, (x,)).module()(x), plain)
    assert traced(model) == plain_trace
    assert torch.equal(torch.jit.trace(model, x)(x), plain)
    assert handle.report().steps == steps, "what is traced is no step"
    assert all(torch.equal(step(), gradient) for _ in range(3))
    assert handle.report().steps == steps + 3
    assert handle.report().swapped.tensors > 0
    handle.disable()
"""
    ran = run(script)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.long
def test_what_does_not_work_says_what_to_call_first() -> None:
    script = f"""{BEGIN}
handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
for call in (
    lambda: torch.jit.script(model),
    lambda: torch.jit.script(nn.Sequential(model)),
    lambda: torch.export.export(model, (x,), strict=True),
):
    try:
        call()
    except Exception as error:
        assert "offload.disable(model)" in str(error), error
    else:
        raise SystemExit("it worked")
    assert torch.equal(step(), gradient)
assert handle.report().steps == 3 and handle.report().swapped.tensors > 0
handle.disable()
assert torch.equal(torch.jit.script(model)(x), plain)
assert torch.equal(torch.export.export(model, (x,), strict=True).module()(x), plain)
"""
    ran = run(script)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "made",
    [pytest.param(each, marks=pytest.mark.long) for each in ("torch.jit.script(model)", "torch.jit.trace(model, x)")],
)
def test_a_compiled_model_is_refused(made: str) -> None:
    """Its forward cannot be replaced. The module that it was made of can be enabled, and it is left as it was."""
    script = f"""{BEGIN}
made = {made}
try:
    offload.enable(made, n_tensors=-1)
except ValueError as error:
    assert "torch.jit.script or torch.jit.trace" in str(error), error
else:
    raise SystemExit("it was enabled")
assert torch.equal(made(x), plain)
handle = offload.enable(model, n_tensors=-1, min_tensor_bytes=1)
assert torch.equal(step(), gradient)
assert handle.report().swapped.tensors > 0
"""
    ran = run(script)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.long
def test_a_forward_of_the_module_s_own_is_exported_too() -> None:
    """One that was put on the instance, as accelerate does: a function, or a partial."""
    script = """
import functools, torch, offload
from torch import nn
for wrap in (lambda forward: functools.wraps(forward)(lambda *args: 2 * forward(*args)), functools.partial):
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    model.forward = wrap(model.forward)
    outcomes = []
    for enabled in (False, True):
        handle = offload.enable(model, n_tensors=-1) if enabled else None
        try:
            outcomes.append([str(node.target) for node in torch.export.export(model, (x,)).graph.nodes])
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1], outcomes
"""
    ran = run(script)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("parameters", ["frozen", "all"])
def test_trace_refuses_parameters_that_leave_memory(parameters: str, tmp_path: Path) -> None:
    """Its result would compute with the memory that they have left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(8, 64)
    plain = model(x)
    handle = offload.enable(model, parameters=parameters, min_tensor_bytes=1024, spill_dir=tmp_path)
    for _ in range(2):
        model(x).sum().backward()
        with pytest.raises(ValueError, match=r"torch\.jit\.trace keeps the memory of parameters"):
            torch.jit.trace(model, x, check_trace=False)
        with pytest.raises(ValueError, match="keeps the memory of parameters"):
            torch.jit.trace(model[0], x, check_trace=False)
        assert torch.equal(model(x), plain)
    handle.disable()
    assert torch.equal(torch.jit.trace(model, x)(x), plain)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_trace_right_after_the_step_that_is_profiled(
    is_guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording of its allocations ends at the next forward that is not traced."""
    if not is_guarded:
        monkeypatch.setattr("offload.profiling.allocations.is_script_tracing", lambda: False)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(8, 64)
    plain = model(x)
    with offload.enable(model, min_tensor_bytes=1024, spill_dir=tmp_path):
        model(x).sum().backward()
        if not is_guarded:
            with pytest.raises(RuntimeError, match="_RecordFunction"):
                torch.jit.trace(model, x)
            return
        assert torch.equal(torch.jit.trace(model, x)(x), plain)
        for _ in range(2):
            model(x).sum().backward()
        assert not AllocationProfile.is_recording()
