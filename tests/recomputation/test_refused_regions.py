"""Compiled parts that cannot run twice: each is refused, for its reason, and training goes on."""

import random
from dataclasses import replace

import pytest
import torch
from region_rig import BLOCKS, WIDTH, Block, Calling, batch, check, check_calls, enabled, make, rig, step, train  # noqa: F401
from torch import nn
from torch.nn import functional

from offload.control.planned_step import PlannedStep
from offload.plan import InfeasibleLimitError
from offload.runtime import regions


def count_calls(block, x):
    block.calls += 1


def count_in_buffer(block, x):
    block.seen.add_(1)


def write_to_input(block, x):
    x.detach().mul_(0.5)


@pytest.mark.long
def test_a_region_that_changes_an_attribute(tmp_path):
    check(tmp_path, count_calls, refused="it changes a buffer, an attribute")


@pytest.mark.long
def test_a_region_that_changes_a_buffer(tmp_path):
    check(tmp_path, count_in_buffer, refused="it changes a buffer, an attribute")


@pytest.mark.long
def test_a_region_that_writes_to_its_input(tmp_path):
    check(tmp_path, write_to_input, refused="it writes to its inputs")


def test_a_region_with_a_hook(tmp_path):
    expected = train(make())
    torch._dynamo.reset()
    model, calls = make(), []
    for block in model[:BLOCKS]:
        block.norm.register_forward_hook(lambda module, args, result: calls.append(1))
    with enabled(model, tmp_path) as handle:
        found = train(model)
        assert not handle._controller.regions.chosen
        assert all("one of its modules has a hook" in why for why in handle._controller.regions.refusals.values())
    assert len(calls) == (1 + 4) * BLOCKS
    assert all(map(torch.equal, found, expected))


def test_a_region_that_gives_other_bits(tmp_path):
    """No number of a generator decides here, but the count of calls."""
    calls = []

    class Fickle(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            calls.append(1)
            return x * (1 + 1e-3 * len(calls))

        @staticmethod
        def backward(ctx, grad):
            return grad

    @torch._dynamo.disable
    def fickle(x):
        return Fickle.apply(x)

    class Odd(Block):
        def forward(self, x):
            return super().forward(fickle(x))

    model = nn.Sequential(*[Odd() for _ in range(BLOCKS)], nn.Linear(WIDTH, 4))
    for block in model[:BLOCKS]:
        block.compile(backend="aot_eager")
    with enabled(model, tmp_path) as handle:
        train(model, 4)
        assert not handle._controller.regions.chosen
        assert set(handle._controller.regions.refusals.values()) == {"its second run gave other bits"}


def keep_a_loss(block, x):
    block.loss = x.square().mean()


def append_a_loss(block, x):
    block.__dict__.setdefault("losses", []).append(x.square().mean())


def draw_a_python_number(block, x):
    torch._dynamo.graph_break()
    random.random()


@pytest.mark.parametrize(
    "change",
    [draw_a_python_number, *(pytest.param(each, marks=pytest.mark.full) for each in (keep_a_loss, append_a_loss))],
)
def test_a_region_with_side_effects_runs_once(change, tmp_path):
    def run(model, steps=4):
        results = []
        for number in range(steps):
            random.seed(number)
            torch.manual_seed(number)
            model.zero_grad()
            loss = model(batch(number)).square().mean()
            for block in model[:BLOCKS]:
                loss = loss + sum([*block.__dict__.pop("losses", []), block.__dict__.get("loss", torch.zeros(()))])
            loss.backward()
            results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            results += [torch.get_rng_state(), torch.tensor(random.random())]
        return results

    change = torch._dynamo.disable(change)
    expected = run(make(change))
    torch._dynamo.reset()
    model = make(change)
    with enabled(model, tmp_path, probe=run) as handle:
        found = run(model)
        refusals = handle._controller.regions.refusals.values()
        assert refusals
        assert all("it changes a buffer, an attribute" in why for why in refusals)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class Wrapped:
    """An object that torch's trees do not look into."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        raise RuntimeError("not to be compared")

    __hash__ = None


@pytest.mark.long
def test_a_region_that_returns_an_object(tmp_path):
    class Returning(Block):
        def forward(self, x):
            return Wrapped(super().forward(x))

    check_calls(tmp_path, Returning, lambda block, x: block(x).value, "neither a tensor nor a constant")


@pytest.mark.long
def test_a_region_that_is_given_a_list_to_fill(tmp_path):
    class Filling(Block):
        def forward(self, x, results):
            results.append(super().forward(x))

    def call(block, x):
        results = []
        block(x, results)
        (result,) = results
        return result

    check_calls(tmp_path, Filling, call, "it changes a buffer, an attribute of a module, a container")


class Sigmoid(nn.Module):
    """Autograd does not save what it is given."""

    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.narrow(functional.gelu(self.widen(x.sigmoid())))


def test_inputs_that_are_changed_after_the_region(tmp_path):
    def call(block, x):
        x = x * 1.0
        x += block(x)
        return x

    check_calls(tmp_path, Sigmoid, call, "its inputs are written to after it has run")


@pytest.mark.long
def test_a_region_that_raises_when_run_again(tmp_path):
    calls = []

    @torch._dynamo.disable
    def count(block):
        assert id(block) not in calls, "ran twice"
        calls.append(id(block))

    class Asserting(Block):
        def forward(self, x):
            count(self)
            return super().forward(x)

    def run(model, steps=4):
        results = []
        for number in range(steps):
            calls.clear()
            results += step(model, number)
        return results

    model = Calling(Asserting, lambda block, x: block(x))
    with enabled(model, tmp_path, probe=run) as handle:
        run(model)
        refusals = handle._controller.regions.refusals.values()
        assert any(why.startswith("it failed when run again: ran twice") for why in refusals)


def test_an_interrupted_trial_proves_nothing(tmp_path, monkeypatch):
    def interrupt(result, again):
        raise KeyboardInterrupt

    model = make()
    with enabled(model, tmp_path) as handle:
        train(model, 1)
        with monkeypatch.context() as patch:
            patch.setattr(regions, "_have_same_bits", interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(model, 1)
        assert not handle._controller.regions.chosen
        assert next(iter(handle._controller.regions._regions)).trial.refusal == "its trial was interrupted"


@pytest.mark.long
def test_a_part_that_runs_twice(tmp_path):
    def build():
        torch.manual_seed(0)
        block = Block()
        block.compile(backend="aot_eager")
        return nn.Sequential(block, block, nn.Linear(WIDTH, 4))

    expected = train(build())
    torch._dynamo.reset()
    model = build()
    with enabled(model, tmp_path, share=0.9) as handle:
        found = train(model)
        assert set(handle._controller.regions.refusals.values()) == {"it ran 2 times in the step"}
    assert all(map(torch.equal, found, expected))


@pytest.mark.long
def test_excluded_parts_and_those_that_may_not_be_heavy(tmp_path):
    inside = [f"{number}.narrow" for number in range(BLOCKS)]
    for options in (
        {"exclude": [str(number) for number in range(BLOCKS)]},
        {"exclude": inside},
        {"recompute": "cheap"},
    ):
        model = make()
        with enabled(model, tmp_path, share=0.6, **options) as handle:
            train(model)
            assert not handle._controller.regions.chosen


@pytest.mark.long
def test_no_room_to_try(tmp_path, monkeypatch):
    class Full(regions.RegionTrial):
        def __init__(self, engine, room_bytes, saved_bytes):
            super().__init__(engine, saved_bytes, saved_bytes)  # the outputs come on top

    monkeypatch.setattr("offload.control.regions.RegionTrial", Full)
    check(tmp_path, refused="memory_limit leaves no room to try it")


def test_a_trial_that_deviates_is_repeated(tmp_path):
    """The step that runs every region twice takes another branch: it tells of other tensors."""
    branches = []

    def call(block, x):
        x = block(x)
        return x.tanh().exp() if branches else x

    def run(model):
        results = []
        for number in range(6):
            branches[:] = [number] if number == 1 else []
            results += step(model, number)
        return results

    expected = run(Calling(Block, call))
    torch._dynamo.reset()
    model = Calling(Block, call)
    with enabled(model, tmp_path) as handle:
        found = run(model)
        assert handle._controller.regions.chosen
        assert handle.report().trial_steps == 2
    assert all(map(torch.equal, found, expected))


@pytest.mark.long
def test_a_smaller_shape_for_which_no_plan_with_regions_is_feasible(tmp_path, monkeypatch):
    """More memory is in use before it: it is profiled by itself, without regions, and does not fail."""

    def run(model):
        torch.manual_seed(9)
        model.zero_grad()
        model(batch(9)[:300]).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def refuse(*args):
        refused.append(args)
        raise InfeasibleLimitError(1, 2, ())

    refused = []
    expected = run(make())
    torch._dynamo.reset()
    model = make()
    with enabled(model, tmp_path) as handle:
        train(model)
        controller = handle._controller
        assert controller.regions.chosen
        monkeypatch.setattr(controller, "_limits", replace(controller._limits, borrow_from=1))
        monkeypatch.setattr(PlannedStep, "exceeds", lambda *_: True)
        with monkeypatch.context() as patch:
            patch.setattr(controller, "_plan", refuse)
            found = run(model)
        assert refused
        assert not controller.regions.chosen
    assert all(map(torch.equal, found, expected))
