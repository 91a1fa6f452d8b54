"""`parameters="auto"`: frozen parameters move only if no plan could keep the limit otherwise."""

import pytest
import torch
from parameters import frozen_rig
from torch import nn

import offload
from offload.parameters.choice import which_move

MIB = 1 << 20


def make_model(depth=8, width=256):
    """`depth` frozen layers of 256 KiB and a small head that is trained."""
    torch.manual_seed(0)
    frozen = (nn.Linear(width, width, bias=False).requires_grad_(False) for _ in range(depth))
    return nn.Sequential(*(each for layer in frozen for each in (layer, nn.Tanh())), nn.Linear(width, 4))


def train(model, steps=4):
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for number in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 256), 0.01 * number)).square().mean().backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(("limit", "moves"), [("1MiB", True), ("4MiB", False), (None, False)])
def test_a_frozen_base_larger_than_the_limit(limit, moves, tmp_path, caplog):
    expected = train(make_model())
    model = make_model()
    caplog.set_level("INFO", "offload")
    goal = {"memory_limit": limit} if limit else {"n_tensors": 0}
    with offload.enable(model, min_tensor_bytes="64KiB", spill_dir=tmp_path, recompute=None, **goal) as handle:
        found = train(model)
        report = handle.report()
        assert (report.moved_parameters is not None) == moves
        assert ("more than memory_limit; frozen parameters are swapped out" in caplog.text) == moves
        if moves:
            assert report.moved_parameters.tensors == 8
            assert report.verdict.step_bytes_unswapped > 2 * MIB > MIB >= report.verdict.step_bytes_planned
            assert handle.plan.peak_bytes <= MIB
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_false_keeps_them_and_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("offload.control.refusal._WORTH_BYTES", 1)
    model = make_model()
    with (
        offload.enable(model, memory_limit="1MiB", min_tensor_bytes="64KiB", parameters=False, spill_dir=tmp_path),
        pytest.raises(offload.InfeasibleLimitError, match=r'parameters="frozen" lets frozen') as refused,
    ):
        train(model)
    one = 256 << 10  # the layer that runs
    assert next(knob.bytes for knob in refused.value.knobs if "frozen" in knob.text) == 2 * MIB - one


def counted_bytes(model, **how):
    """Return the bytes that count: the least limit at which no parameter moves."""
    low, high = 0, 64 * MIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if which_move(model, "auto", middle, min_nbytes=1, **how) else (low, middle)
    return low + 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_counts(device):
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64, affine=False), nn.Linear(64, 64, bias=False)
        )
    weight, buffers = 64 * 64 * 4, 2 * 64 * 4 + 8
    model[0].requires_grad_(False)
    assert counted_bytes(model, keeps_gradients=False) == 2 * weight + buffers
    assert counted_bytes(model, keeps_gradients=True) == 3 * weight + buffers
    model[2].weight = model[0].weight  # tied weights count once
    assert counted_bytes(model, keeps_gradients=True) == weight + buffers


def test_nothing_is_frozen():
    assert (
        which_move(frozen_rig.make_model().requires_grad_(True), "auto", 1, min_nbytes=1, keeps_gradients=True) is False
    )


@pytest.mark.parametrize("parameters", ["all", "frozen", False])
def test_a_choice_of_the_caller_counts(parameters):
    assert which_move(make_model(), parameters, 1, min_nbytes=1, keeps_gradients=True) == parameters


def test_frozen_parameters_that_are_too_small_to_move():
    model = make_model()
    nbytes = model[0].weight.nbytes
    assert which_move(model, "auto", 1, min_nbytes=nbytes, keeps_gradients=True) == "frozen"
    assert which_move(model, "auto", 1, min_nbytes=nbytes + 1, keeps_gradients=True) is False
