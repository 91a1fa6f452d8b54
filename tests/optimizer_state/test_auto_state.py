"""Where `optimizer_state="auto"` plans nothing, and what is counted where state and frozen parameters move."""

from collections import defaultdict

import pytest
import torch
from optimizer_state import loops
from some_rows import one_in

import offload
from offload.optimizer_state.streamed_state import StreamedState

LIMIT = {"memory_limit": "64MiB", "min_tensor_bytes": 1024}


def train(model, optimizer, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 60)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("given", [False, True])
def test_it_is_the_default(given, tmp_path):
    model = loops.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    asked = {"optimizer": optimizer} if given else {}
    with offload.enable(model, spill_dir=tmp_path, **LIMIT, **asked) as handle:
        train(model, optimizer)
        assert handle.plan.state.moved == frozenset()  # the limit is kept without moving state
        assert "stays in memory" in str(handle.report().optimizer_state[0])
        assert type(optimizer.state) is defaultdict


@pytest.mark.parametrize("choice", [{"memory_limit": None}, {"optimizer_state": False}])
def test_without_a_limit_or_with_false_state_stays(choice, tmp_path):
    model = loops.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with offload.enable(model, spill_dir=tmp_path, optimizer=optimizer, **{**LIMIT, **choice}) as handle:
        train(model, optimizer)
        assert handle.plan is None or handle.plan.state is None
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
        return {knob.text.split("=")[0] for knob in refused.value.knobs}

    assert "optimizer_state" in refusal(optimizer_state=False)
    assert refusal(step_in_backward=True) == {"parameters"}


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
        held.count_parameters(lambda _: 7, lambda _: 3)
        after = held.look()
    assert (after.state - before.state, after.kept - before.kept, after.away) == (107, 47, 60)


class Halves:
    """A model whose halves have an optimizer each, and how it is trained."""

    def __init__(self):
        self.model = loops.make_model()
        layers = [module for module in self.model.modules() if isinstance(module, torch.nn.Linear)]
        halves = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        self.optimizers = [torch.optim.AdamW(p for each in half for p in each.parameters()) for half in halves]

    def train(self, steps):
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.model(torch.ones(4, 60)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()

    def values(self):
        saved = [each.state_dict()["state"] for each in self.optimizers]
        states = [state[number] for state in saved for number in sorted(state)]
        return [*self.model.state_dict().values(), *(value for state in states for value in state.values())]


CHOICES = [{"optimizer_state": True}, {"optimizer_state": False}, {"step_in_backward": True}]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("before", one_in(3, [1, 0, 4]))
@pytest.mark.parametrize("is_given", [False, True])
def test_a_choice_for_one_optimizer_ends_what_a_plan_moves(choice, before, is_given, tmp_path):
    moved, plain = Halves(), Halves()
    first, second = moved.optimizers
    asked = {"optimizer": moved.optimizers} if is_given else {}  # without a plan all of their state moves
    with offload.enable(moved.model, spill_dir=tmp_path, **LIMIT, **asked) as handle:
        moved.train(before)
        plain.train(before)
        handle.add_optimizer(first, **choice)
        moved.train(4)
        plain.train(4)
        assert all(map(torch.equal, moved.values(), plain.values()))
        moves_state = choice.get("optimizer_state", True)
        goes_on = is_given and before < 4  # the plan, once there is one, moves nothing
        assert isinstance(first.state, StreamedState) == moves_state
        assert isinstance(second.state, StreamedState) == goes_on
        away = [*(large(first) if moves_state else ()), *(large(second) if goes_on else ())]
        assert handle._states.away_bytes()[0] == sum(2 * p.nbytes for p in away)
        assert sum(not row.stays for row in handle.report().optimizer_state) == moves_state + goes_on
    assert all(map(torch.equal, moved.values(), plain.values()))


def large(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.nbytes >= LIMIT["min_tensor_bytes"]]


def trains_within(limit, knobs):
    """Return whether a plan keeps this limit, and the least limit that it names otherwise."""
    halves = Halves()
    try:
        with offload.enable(halves.model, memory_limit=limit, **knobs):
            halves.train(4)
        return True, limit
    except offload.InfeasibleLimitError as error:
        return False, error.least_limit_bytes


def test_state_that_a_plan_has_moved_is_counted_once_after_a_choice(tmp_path):
    knobs = {"min_tensor_bytes": 1024, "spill_dir": tmp_path, "recompute": False}
    is_kept, limit = False, 4096
    while not is_kept:  # the least limit is known only after the first update
        is_kept, limit = trains_within(limit, knobs)
    moved, plain = Halves(), Halves()
    with offload.enable(moved.model, memory_limit=limit, **knobs) as handle:
        moved.train(4)
        plain.train(4)
        assert handle.plan.state.moved
        verdict = handle.report().verdict
        assert verdict.step_bytes_unswapped > limit >= verdict.step_bytes_planned
        assert "as without offload" not in verdict.memory().split("whole step")[1]
        before = handle._states.away_bytes()[0]
        handle.add_optimizer(moved.optimizers[0])
        assert handle._states.away_bytes()[0] >= before, "no state comes back"
        moved.train(1)
        plain.train(1)
        assert handle._states.away_bytes()[0] >= before
        handle.add_optimizer(moved.optimizers[1])
        moved.train(4)
        plain.train(4)
        held = handle._on_device.held.look()
        away = [p for each in moved.optimizers for p in large(each)]
        assert handle._states.away_bytes()[0] == sum(2 * p.nbytes for p in away)
        stepped = [p for each in moved.optimizers for group in each.param_groups for p in group["params"]]
        states = sum(2 * p.nbytes + 4 for p in stepped)  # each also has its number of steps, in float32
        left = sum(2 * 4 for _ in away)  # one element in place of each tensor that is away
        assert held.state == sum(p.nbytes for p in moved.model.parameters()) + states + left
        assert handle.plan.state is None
    assert all(map(torch.equal, moved.values(), plain.values()))


def test_another_models_optimizer_does_not_end_it(tmp_path):
    moved, other = Halves(), Halves()
    with (
        offload.enable(moved.model, spill_dir=tmp_path, **LIMIT) as handle,
        offload.enable(other.model, n_tensors=0, optimizer=other.optimizers, optimizer_state=True, spill_dir=tmp_path),
    ):
        other.train(1)
        with pytest.raises(ValueError, match=r"has no parameter of this model|is already used by an enabled model"):
            handle.add_optimizer(other.optimizers[0])
        assert handle._states.is_planned
