"""`memory_limit` holds on an accelerator in every step after the profiled one, whatever the loss and optimizer need."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offload
from offload import handle
from offload.profiling import allocations, calibration
from offload.torch_compat.autograd import backward_caller

STEPS = 6
CLASSES = 512  # the loss and its gradient are larger than any saved tensor of the model


def loss_of(kind, output):
    """Computed outside of the model, where no hook of this package sees what is saved."""
    if kind == "square":
        return output.square().mean()
    weight = torch.linspace(-1, 1, output.shape[1] * CLASSES).view(-1, CLASSES).to("sim")
    return F.cross_entropy(output @ weight, torch.arange(len(output)).to("sim") % CLASSES)


def peaks(kind, **knobs):
    """Peaks of forward and backward of each step, and weights at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(64, 64), nn.GELU()))).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    session = offload.enable(model, min_tensor_bytes=1024, recompute=False, **knobs) if knobs else None
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn((64, 64), generator=torch.Generator().manual_seed(step)).to("sim")
        torch.sim.synchronize()
        torch.sim.reset_peak_memory_stats()
        loss_of(kind, model(x)).backward()
        found.append(torch.sim.memory_stats()["allocated_bytes.all.peak"])
        optimizer.step()
    swaps = len(session.plan.swaps) if session is not None else 0
    if session is not None:
        session.disable()
    return found, swaps, [parameter.detach().cpu() for parameter in model.parameters()]


def peak_and_limit(kind, tmp_path, monkeypatch):
    """Largest peak of the steps after the profiled one, and the limit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that the link is measured, within the limit
    calibration.forget_disturbed()
    plain, _, expected = peaks(kind)
    limit = int(0.93 * max(plain))
    found, swaps, weights = peaks(kind, memory_limit=limit)
    assert swaps > 0
    assert all(map(torch.equal, weights, expected))
    return max(found[1:]), limit


@pytest.mark.parametrize("kind", ["square", "cross entropy"])
def test_a_loss_outside_of_the_model(kind, tmp_path, monkeypatch):
    peak, limit = peak_and_limit(kind, tmp_path, monkeypatch)
    assert peak <= limit


GUARDS = {
    "what backward allocates before it unpacks a tensor": (allocations, "backward_caller", lambda _: lambda _: None),
    "the link is measured within the limit": (
        handle,
        "measure_link",
        lambda device, options, _: calibration.measure_link(device, options),
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_is_left_out_is_missed(guard, tmp_path, monkeypatch):
    monkeypatch.setattr(*GUARDS[guard])
    peak, limit = peak_and_limit("square", tmp_path, monkeypatch)
    assert peak > limit


def surroundings():
    """What a program may have around the first step."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    return {
        "function mode": (Function(), seen),
        "dispatch mode": (Dispatch(), seen),
        "no grad": (torch.no_grad(), seen),
        "inference mode": (torch.inference_mode(), seen),
        "anomaly mode": (torch.autograd.set_detect_anomaly(True), seen),
        "compiled autograd": (compiled, seen),
    }


@pytest.mark.parametrize(
    "around", ["function mode", "dispatch mode", "no grad", "inference mode", "anomaly mode", "compiled autograd"]
)
def test_the_small_backward_is_called_once_and_seen_by_no_mode(around):
    import torch._dynamo.compiled_autograd

    context, seen = surroundings()[around]
    called, device = [], torch.device("sim")
    with context:
        backward_caller(device)(lambda: called.append(threading.current_thread()))
    assert len(called) == 1
    assert called[0] is not threading.main_thread()
    assert seen == []
