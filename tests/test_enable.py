"""`offload.enable`: on and off, the true no-op, what the report counts."""

import copy
import pickle
import re

import pytest
import torch
from forked_python import run_python
from torch import nn

import offload


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def step(model, rows=32):
    """One step from a seed: loss and gradients."""
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(torch.randn(rows, 64)).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_disable_twice_and_of_a_plain_model():
    model = Net()
    assert offload.disable(model) is None
    handle = offload.enable(model)
    offload.disable(model)
    handle.disable()
    offload.disable(model)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("use", [copy.deepcopy, copy.copy, pickle.dumps])
def test_handle_cannot_be_copied_or_pickled(use):
    handle = offload.enable(Net())
    with pytest.raises(TypeError, match="a session cannot be copied or saved: keep it out of modules"):
        use(handle)


def test_context_manager():
    model = Net()
    expected = step(model)
    with offload.enable(model, min_tensor_bytes=1) as handle:
        assert_same(step(model), expected)
        assert "forward" in model.__dict__
    assert "forward" not in model.__dict__
    assert_same(step(model), expected)
    assert handle.report().steps == 1
    with pytest.raises(RuntimeError, match="as asked"), offload.enable(model):
        raise RuntimeError("as asked")
    assert "forward" not in model.__dict__


def test_step_after_disable_does_nothing():
    model = Net()
    handle = offload.enable(model, min_tensor_bytes=1)
    handle.disable()
    with handle.step():
        result = step(model)
    assert_same(result, step(model))
    assert handle.report().steps == 0


def test_zero_tensors_is_a_true_no_op():
    model = Net()
    packs = torch._C._autograd._top_saved_tensors_default_hooks
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append(packs(False)))
    before = dict(model.__dict__)
    expected = step(model)
    handle = offload.enable(model, n_tensors=0)
    assert model.__dict__ == before
    with handle.step():
        assert_same(step(model), expected)
    assert seen == [None, None]
    about = handle.report()
    assert (about.steps, about.swapped.tensors, about.misses, about.kept) == (0, 0, 0, {})
    assert about.notes == ("NO SAVED TENSOR IS SWAPPED: n_tensors=0",)
    assert "NO SAVED TENSOR IS SWAPPED: n_tensors=0" in str(about)
    handle.disable()


def test_zero_effect_is_said_loudly():
    model = Net()
    with offload.enable(model) as handle:
        assert "NOTHING WAS SWAPPED: no training step has run yet" in str(handle.report())
        step(model)
        about = handle.report()
    assert about.swapped.tensors == 0
    assert "NOTHING WAS SWAPPED: every saved tensor was kept" in str(about)
    assert "small" in str(about.notes), "with the reason"
    assert about.to_dict()["notes"] == list(about.notes)


class Counted(nn.Module):
    """Saves, in this order, what the tests below count."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(100, 100))
        self.register_buffer("mask", torch.rand(100, 100))
        self.left_alone = nn.Tanh()

    def forward(self, x):
        big = x * 2  # saves nothing: the factor is a number
        result = big.sin().sum()  # 40,000 bytes: moves
        result = result + big.cos().sum() + big.t().tan().sum()  # tan saves its own result; cos the same storage again
        result = result + (big * self.weight).sum()  # the storage once more; a parameter
        result = result + (big[:10] * self.mask[:10]).sum()  # a view of the storage once more; a view of a buffer
        result = result + self.left_alone(big).sum()  # its result is left alone
        return result + big[0, :5].exp().sum()  # 20 bytes: small


def test_report_counts_what_was_moved_and_what_was_not():
    model = Counted()
    torch.manual_seed(0)
    x = torch.rand(100, 100).requires_grad_()
    with offload.enable(model, min_tensor_bytes=1000, exclude=("left_alone",)) as handle:
        model(x).backward()
        about = handle.report()
    counted = about.to_dict()
    # big, and what tan returns.
    assert counted["swapped"] == {"tensors": 2, "bytes": 2 * 40_000}
    # cos's input, the two factors.
    assert counted["deduplicated"]["tensors"] >= 2
    assert counted["kept"]["excluded"] == {"tensors": 1, "bytes": 40_000}
    assert counted["kept"]["parameter"]["tensors"] == 2
    assert counted["kept"]["small"] == {"tensors": 1, "bytes": 20}
    assert set(counted["kept"]) == {"excluded", "parameter", "small"}
    assert counted["steps"] == 1
    assert counted["verdict"]["activation_bytes_unswapped"] == 2 * 40_000
    lines = str(about).splitlines()
    assert any(line.startswith("kept: excluded") and "1 tensors" in line for line in lines)
    assert any(line.startswith("swapped") and "2 tensors" in line for line in lines)


def test_report_counts_bytes_that_went_and_came():
    model = Net()
    with offload.enable(model, n_tensors=-1, lb=1, min_tensor_bytes=1) as handle:
        for _ in range(2):
            loss = model(torch.rand(500, 64).requires_grad_() * 2).sum()
            handle._engine.drain()
            loss.backward()
        counted = handle.report().to_dict()
    # The first linear layer's input, and what tanh returns (the second one's input is the same).
    assert counted["swapped"] == {"tensors": 4, "bytes": 4 * 500 * 64 * 4}
    assert counted["deduplicated"]["tensors"] == 2
    for direction in ("copy_out", "copy_in"):
        assert counted[direction]["bytes"] == 4 * 500 * 64 * 4
        assert counted[direction]["copies"] == 4
        assert counted[direction]["bytes_per_second"] > 0
    assert counted["prefetched"] + counted["misses"] == 4
    assert counted["prefetched"] >= 1
    assert counted["failed"] == counted["cancelled"] == 0
    assert counted["spilled_bytes"] <= 4 * 500 * 64 * 4
    assert counted["spill_file_bytes"] > 0


def test_view_of_a_larger_storage_is_a_reason():
    data = torch.rand(1000, 100)

    class Sliced(nn.Module):
        def forward(self, x):
            return (data[3:4] * x).sum()

    model = Sliced()
    with offload.enable(model, min_tensor_bytes=1000) as handle:
        model(torch.rand(100).requires_grad_()).backward()
        about = handle.report()
    assert about.kept["view of a larger storage"].to_dict() == {"tensors": 1, "bytes": 400}
    assert about.swapped.tensors == 0


def test_a_storage_that_stays_counts_its_bytes_once():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1, exclude=("1", "2")) as handle:
        model(torch.randn(32, 64)).sum().backward()
        kept = handle.report().kept["excluded"]
    assert (kept.tensors, kept.nbytes) == (2, 32 * 64 * 4)  # tanh's result, which is the last layer's input too


def test_the_postfix_of_a_progress_bar():
    model = Net()
    with offload.enable(model, n_tensors=-1, min_tensor_bytes=1) as handle:
        assert handle.postfix()["swapped"] == "0 B"
        step(model)
        postfix = handle.postfix()
        assert handle.postfix() == postfix, "the latest step, as long as there is no other"
        for _ in range(3):
            step(model)
        later = handle.postfix()
    assert {"peak", "swapped", "stalled"} <= set(postfix) <= {"peak", "swapped", "stalled", "slowdown"}
    assert postfix["swapped"] == later["swapped"] == "16.00 KiB", "of one step, not the sum of four"
    assert postfix["peak"].endswith("iB")
    assert postfix["stalled"].endswith("s")


def test_the_postfix_has_the_slowdown_once_it_is_known():
    model = Net()
    with offload.enable(model, "smallest", min_tensor_bytes=1) as handle:
        slowdowns = set()
        for _ in range(40):
            step(model)
            slowdowns.add(handle.postfix().get("slowdown"))
    known = slowdowns - {None}
    assert None in slowdowns, "the first step is profiled"
    assert known
    assert all(re.fullmatch(r"[+-]\d+\.\d %", each) for each in known)


def test_the_plan_says_when_there_will_be_one():
    script = """
import torch, offload
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
handle = offload.enable(model, min_tensor_bytes=1)
for _ in range(2):
    assert handle.plan is None
    loss = model(torch.randn(8, 64)).sum()
    print(handle.plan is None)
    loss.backward()
assert handle.plan.peak_bytes > 0
offload.disable(model)
handle = offload.enable(model, n_tensors=1)
assert handle.plan is None
"""
    ran = run_python("-c", script)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True", "False"]
    not_yet, by_hand = ran.stderr.splitlines()
    assert "its plan is made before the second" in not_yet
    assert "with n_tensors (manual mode) no plan is made" in by_hand
