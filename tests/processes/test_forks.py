"""Forked children: one that touches the engine gets a clear error, one that does not is unharmed."""

import pytest

REFUSED = (
    "DriverError: offload: fork() does not copy the engine's threads: in this process call offload.disable(model), and "
    "then offload.enable(model) to swap here too (with moved parameters, call offload.disable(model) before the fork); "
    "or start the process with multiprocessing"
)
CHILD = """
import os, warnings, torch, offload
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
x = torch.randn(8, 256)

def gradient():
    model.zero_grad()
    model(x).sum().backward()
    return model[0].weight.grad.clone()

plain = gradient()
handle = offload.enable(model, min_tensor_bytes=1, {knobs})
pending = model(x).sum()
warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: a fork with other threads may deadlock
if os.fork() == 0:
    status = 1
    try:
        try:
            gradient()
        except offload.DriverError as error:
            assert "offload.disable(model)" in str(error), error
        else:
            raise AssertionError("not refused")
        offload.disable(model)
        assert torch.equal(gradient(), plain)
        with offload.enable(model, min_tensor_bytes=1, {knobs}) as own:
            assert torch.equal(gradient(), plain)
            assert own.report().swapped.tensors
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
pending.backward()
assert torch.equal(model[0].weight.grad, 2 * plain)
assert torch.equal(gradient(), plain)
"""


@pytest.mark.timeout(3600)
def test_child_that_touches_the_engine(processes, spill_directory, tier, is_full, campaign_counts):
    times = 100 if is_full else 4
    found = processes.ask("fork_and_touch", directory=str(spill_directory), tier=tier, times=times)
    equal = found.pop("equal")
    assert found.pop("drop", [""]) == [""]
    for texts in found.values():
        assert all(text.startswith(REFUSED) for text in texts), found
    assert equal, "the parent trains on"
    campaign_counts["forks"] += 5 * times


def test_child_that_leaves_the_engine_alone(processes, spill_directory, tier):
    """Data loaders' workers; a child that ends like any interpreter, with the engine's objects in its hands."""
    found = processes.ask("fork_and_leave_alone", directory=str(spill_directory), tier=tier)
    assert found == {"equal": True, "status": 0}


@pytest.mark.parametrize("knobs", [pytest.param("n_tensors=-1", marks=pytest.mark.full), "max_slowdown=0.05"])
def test_what_the_error_says_to_do_helps(processes, knobs):
    processes.ask("run_code", code=CHILD.replace("{knobs}", knobs))
