"""Where `optimizer_state="auto"` plans nothing, and what is counted where state and frozen parameters move."""

from collections import defaultdict

import pytest
import torch
from optimizer_state import loops

import offload

LIMIT = {"memory_limit": "64MiB", "min_tensor_bytes": 1024}


def train(model, optimizer, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 60)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("given", [False, True])
def test_it_is_not_the_default(given, tmp_path):
    model = loops.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    asked = {"optimizer": optimizer} if given else {}
    with offload.enable(model, spill_dir=tmp_path, **LIMIT, **asked) as handle:
        train(model, optimizer)
        assert handle.plan.state is None
        assert handle.report().optimizer_state == ()
        assert type(optimizer.state) is defaultdict


@pytest.mark.parametrize("choice", ["auto", False])
def test_with_steps_in_backward_state_stays(choice, tmp_path):
    model = loops.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    asked = {"optimizer": optimizer, "optimizer_state": choice, "step_in_backward": True}
    with offload.enable(model, spill_dir=tmp_path, **LIMIT, **asked) as handle:
        train(model, optimizer)
        assert handle.plan.state is None
        assert handle.report().optimizer_state == ()
        assert handle.report().step_in_backward[0].freed_bytes > 0
        assert type(optimizer.state) is defaultdict


def test_with_steps_in_backward_an_error_does_not_advise_it(tmp_path, monkeypatch):
    monkeypatch.setattr("offload.control.refusal._WORTH_BYTES", 1)

    def refusal(**asked):
        model = loops.make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        knobs = {"memory_limit": "2KiB", "min_tensor_bytes": 1024, "recompute": False, "spill_dir": tmp_path}
        handle = offload.enable(model, optimizer=optimizer, **knobs, **asked)
        with pytest.raises(offload.InfeasibleLimitError) as refused:
            train(model, optimizer)
        handle.disable()
        return refused.value.knobs

    assert [knob.text.split("=")[0] for knob in refusal()] == ["optimizer_state"]
    assert refusal(step_in_backward=True) == ()


def test_updates_that_backward_leaves_to_step_are_timed_once(tmp_path):
    """The times of one step are read when the next one begins."""
    model = loops.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    asked = {"optimizer": optimizer, "optimizer_state": True, "step_in_backward": True}
    knobs = {"n_tensors": 0, "min_tensor_bytes": 1024, "spill_dir": tmp_path}
    with offload.enable(model, **knobs, **asked) as handle:
        (mover,) = handle._states._alive()
        found = []
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            found.append(len(mover.share._marks))
        assert found[0] == found[3] > 0
        assert mover.share.updates == 4


def test_what_is_away_and_frozen_is_counted(tmp_path):
    with offload.enable(loops.make_model(), spill_dir=tmp_path, **LIMIT) as handle:
        held = handle._on_device.held
        before = held.look()
        held.count_moving(lambda: (100, 30), lambda: 40, in_backward=bool)
        held.count_parameters(lambda: 7, lambda: 3)
        after = held.look()
    assert (after.state - before.state, after.kept - before.kept, after.away) == (107, 47, 60)


def test_an_optimizer_cannot_be_added_to_what_a_plan_moves(tmp_path):
    model = loops.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with offload.enable(model, spill_dir=tmp_path, optimizer_state="auto", **LIMIT) as handle:
        with pytest.raises(ValueError, match="a plan moves the state of every optimizer"):
            handle.add_optimizer(optimizer)
        train(model, optimizer)
        assert len(handle.report().optimizer_state) == 1
