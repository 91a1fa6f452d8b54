"""Compiled parts that run again in backward as a whole: the same bits, and refused where they cannot run twice."""

import copy
import gc
import pickle
import random
import warnings
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_guards import left_out
from torch import nn
from torch.nn import functional

import offload
from offload.control.regions import CompiledRegions
from offload.plan import Link, least_feasible_limit, unswapped_bytes
from offload.runtime import regions

WIDTH = 32
BLOCKS = 3
SLOW = Link(2e6, 2e6)


@pytest.fixture(autouse=True)
def rig(monkeypatch):
    """Plans are made for a link so slow that recomputation pays, whatever this machine's disk does."""
    monkeypatch.setattr("offload.session.measure_link", lambda device, options: SLOW)
    monkeypatch.setattr("offload.control.promise.measured_link", lambda engine, link: link)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A residual block with dropout. `change` is called in its forward."""

    def __init__(self, change=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))
        self.change = change

    def forward(self, x):
        if self.change is not None:
            self.change(self, x)
        inner = functional.dropout(functional.gelu(self.widen(self.norm(x))), 0.1, self.training)
        return x + self.narrow(inner)


def make(change=None, style="in place", backend="aot_eager"):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(change) for _ in range(BLOCKS)], nn.Linear(WIDTH, 4))
    for number in range(BLOCKS):
        if style == "in place":
            model[number].compile(backend=backend)
        else:
            model[number] = torch.compile(model[number], backend=backend)
    return model


def batch(number):
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(number))


def step(model, number, between=lambda model: None, **how):
    """Loss, gradients, buffers and the random state of one step."""
    torch.manual_seed(number)
    model.zero_grad()
    loss = model(batch(number)).square().mean()
    between(model)
    loss.backward(**how)
    if how.get("retain_graph"):
        loss.backward()
    held = [*(parameter.grad.clone() for parameter in model.parameters()), *map(torch.clone, model.buffers())]
    return [loss.detach(), *held, torch.get_rng_state()]


def train(model, steps=4, **how):
    return [each for number in range(steps) for each in step(model, number, **how)]


@contextmanager
def enabled(model, spill_dir, share=0.35, probe=train, **options):
    """The model under a limit some way above the least, where swapping alone makes the step wait."""
    options = {"min_tensor_bytes": 4096, "spill_dir": spill_dir, **options}
    with offload.enable(model, max_slowdown=1e9, **options) as handle:
        own = copy.deepcopy([parameter.detach() for parameter in model.parameters()])
        state = {name: each.clone() for name, each in model.named_buffers()}
        calls = [getattr(part, "calls", None) for part in model.modules()]
        probe(model, 1)
        trace = handle.trace()
        for parameter, before in zip(model.parameters(), own, strict=True):
            parameter.grad = None
            assert torch.equal(parameter, before)
        for name, each in model.named_buffers():
            each.copy_(state[name])
        for part, count in zip(model.modules(), calls, strict=True):
            if count is not None and isinstance(part, Block):
                part.calls = count
    least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace))
    limit = int(least + share * (peak - least))
    with offload.enable(model, memory_limit=limit, **options) as handle:
        yield handle


def check(spill_dir, change=None, refused="", share=0.35, **how):
    """Train plain and enabled; the bits are the same, and regions are chosen, or refused for the reason given."""
    expected = train(make(change), **how)
    torch._dynamo.reset()
    model = make(change)
    with enabled(model, spill_dir, share, partial(train, **how)) as handle:
        found = train(model, **how)
        about = handle._controller.regions
        assert bool(about.chosen) == (not refused)
        if refused:
            assert about.refusals
            assert all(refused in why for why in about.refusals.values())
            assert refused in " ".join(handle.report().notes)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("style", ["in place", pytest.param("wrapper", marks=pytest.mark.long)])
def test_compiled_blocks_run_again_and_give_the_same_bits(style, tmp_path):
    expected = train(make(style=style), 6)
    torch._dynamo.reset()
    model = make(style=style)
    with enabled(model, tmp_path) as handle:
        found = train(model, 4)
        chosen = handle._controller.regions.chosen
        assert chosen
        report = handle.report()
        assert report.regions == chosen
        assert dict(report.rows())["compiled parts run again"] == ", ".join(chosen)
        assert f"{len(chosen)} compiled parts run again" in str(report.verdict)
        assert report.trial_steps == 1
        assert not any("nothing is recomputed" in note for note in report.notes)
        assert report.verdict.step_bytes_unswapped > handle._options.memory_limit
        before = handle._controller.regions.before.plan
        assert handle.plan.expected_seconds < before.expected_seconds
        assert handle.plan.peak_bytes <= handle._options.memory_limit
    found += [each for number in (4, 5) for each in step(model, number)]  # disabled: plain again
    assert all(map(torch.equal, found, expected))
    held = [getattr(model[number], "_compiled_call_impl", None) for number in range(BLOCKS)]
    held += [model[number].__dict__.get("forward") for number in range(BLOCKS)]
    assert not any(isinstance(each, regions.Region) for each in held)


@pytest.mark.long
def test_inductor(tmp_path):
    expected = train(make(backend="inductor"))
    torch._dynamo.reset()
    model = make(backend="inductor")
    with enabled(model, tmp_path) as handle:
        found = train(model)
        assert handle._controller.regions.chosen
    assert all(map(torch.equal, found, expected))


def count_calls(block, x):
    block.calls += 1


def count_in_buffer(block, x):
    block.seen.add_(1)


def write_to_input(block, x):
    x.detach().mul_(0.5)


def test_a_region_that_changes_an_attribute(tmp_path):
    check(tmp_path, count_calls, refused="it changes a buffer or an attribute")


@pytest.mark.long
def test_a_region_that_changes_a_buffer(tmp_path):
    check(tmp_path, count_in_buffer, refused="it changes a buffer or an attribute")


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
        assert all("a hook is registered" in why for why in handle._controller.regions.refusals.values())
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
        assert set(handle._controller.regions.refusals.values()) == {"run again, it gave other bits"}


def test_a_mode_that_is_switched_between_forward_and_backward(tmp_path):
    """`eval()` before backward: what runs again draws its dropout all the same."""

    def switch(model):
        model.eval()

    def run(model):
        results = []
        for number in range(4):
            model.train()
            results += step(model, number, switch)
        return results

    expected = run(make())
    torch._dynamo.reset()
    model = make()
    with enabled(model, tmp_path) as handle:
        found = run(model)
        assert handle._controller.regions.chosen
        assert not any(part.training for part in model.modules())
    assert all(map(torch.equal, found, expected))


def keep_a_loss(block, x):
    block.loss = x.square().mean()


def append_a_loss(block, x):
    block.__dict__.setdefault("losses", []).append(x.square().mean())


def draw_a_python_number(block, x):
    torch._dynamo.graph_break()
    random.random()


@pytest.mark.parametrize(
    "change",
    [draw_a_python_number, *(pytest.param(each, marks=pytest.mark.long) for each in (keep_a_loss, append_a_loss))],
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
        assert all("it changes a buffer or an attribute" in why for why in refusals)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class Calling(nn.Module):
    """Compiled blocks that `call` calls, in order."""

    def __init__(self, kind, call):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[kind() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 4)
        self.call = call
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def check_calls(spill_dir, kind, call, refused=""):
    expected = train(Calling(kind, call))
    torch._dynamo.reset()
    model = Calling(kind, call)
    with enabled(model, spill_dir) as handle:
        found = train(model)
        assert bool(handle._controller.regions.chosen) == (not refused)
        assert all(refused in why for why in handle._controller.regions.refusals.values())
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

    check_calls(tmp_path, Filling, call, "it changes a buffer or an attribute of a module, a container")


@pytest.mark.long
def test_tensors_inside_containers_are_inputs(tmp_path):
    class Scaled(Block):
        def forward(self, given, *, masks):
            return {"result": super().forward(given[0]) * masks["all"].sign()}

    def call(block, x):
        return block((x, 1), masks={"all": torch.ones(512, WIDTH)})["result"]

    check_calls(tmp_path, Scaled, call)


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


def test_modes_and_hooks_that_come_after_the_trial(tmp_path):
    """Such calls run once."""
    calls = []

    def run(model):
        results = train(model)
        for block in model.blocks:
            block.norm.train()
            block.widen.register_forward_hook(lambda module, args, result: calls.append(1))
        torch._dynamo.reset()
        return results + train(model, 2)

    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH).eval()

    expected = run(Calling(Normed, lambda block, x: block(x)))
    calls.clear()
    torch._dynamo.reset()
    model = Calling(Normed, lambda block, x: block(x))
    with enabled(model, tmp_path) as handle:
        found = run(model)
        assert handle._controller.regions.chosen
    assert len(calls) == 2 * BLOCKS
    assert all(map(torch.equal, found, expected))


def test_the_trial_ends_with_its_step(tmp_path):
    """A step of another shape follows it, whose parts run once, and whose calls do not count."""
    model = make()
    with enabled(model, tmp_path) as handle:
        train(model, 2)
        model(torch.randn(300, WIDTH)).sum().backward()
        assert {region.trial.calls for region in handle._controller.regions._regions} == {1}
        train(model, 3)
        assert handle._controller.regions.chosen


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
        train(model, 3)
        assert not handle._controller.regions.chosen
        assert next(iter(handle._controller.regions._regions)).trial.refusal == "its trial was interrupted"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_part_that_two_enabled_models_share(is_first):
    block = Block()
    block.compile(backend="aot_eager")
    plain = block._compiled_call_impl
    both = [regions.Region("0", block, "_compiled_call_impl", lambda: False) for _ in range(2)]
    for region in both if is_first else reversed(both):
        region.close()
    assert block._compiled_call_impl is plain


@pytest.mark.parametrize("how", ["in place", pytest.param("data", marks=pytest.mark.long)])
def test_a_parameter_that_changes_before_backward(tmp_path, how):
    def change(model):
        with torch.no_grad():
            for number in range(BLOCKS):
                weight = model[number].narrow.bias  # which autograd does not save
                if how == "in place":
                    weight.add_(1)
                else:
                    weight.data = weight.data + 1

    model = make()
    with enabled(model, tmp_path) as handle:
        train(model)
        assert handle._controller.regions.chosen
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(model, 9, change)


@pytest.mark.long
def test_a_retained_graph(tmp_path):
    with torch._functorch.config.patch(donated_buffer=False):  # as torch asks for, without offload too
        expected = [*train(plain := make()), *step(plain, 9, retain_graph=True), *step(plain, 10)]
        torch._dynamo.reset()
        model = make()
        with enabled(model, tmp_path) as handle:
            found = train(model)
            assert handle._controller.regions.chosen
            found += [*step(model, 9, retain_graph=True), *step(model, 10)]
        assert all(map(torch.equal, found, expected))


@pytest.mark.long
def test_autocast(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        check(tmp_path)


def test_settings_of_torch_are_those_of_forward(tmp_path):
    """Read where the region runs: what kernels make of them differs between machines."""
    seen = []

    def look(block, x):
        torch._dynamo.graph_break()
        seen.append(torch.backends.mkldnn.enabled)

    def run(model):
        for number in range(4):
            torch.manual_seed(number)
            model.zero_grad()
            with torch.backends.mkldnn.flags(enabled=False):
                loss = model(batch(number)).square().mean()
            loss.backward()

    look = torch._dynamo.disable(look)
    model = make(look)
    with enabled(model, tmp_path) as handle:
        seen.clear()
        run(model)
        assert handle._controller.regions.chosen
    assert len(seen) > (4 + 1) * BLOCKS  # some ran again
    assert not any(seen)


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
    for options in ({"exclude": [str(number) for number in range(BLOCKS)]}, {"recompute": "cheap"}):
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


@pytest.mark.long
def test_copies_of_the_model_are_free_of_regions(tmp_path):
    model = make()
    with enabled(model, tmp_path) as handle:
        train(model)
        assert handle._controller.regions.chosen
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert getattr(other[0], "_compiled_call_impl", None) is None
            assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.long
def test_a_model_with_regions_is_freed(tmp_path):
    model = make()
    with enabled(model, tmp_path) as handle:
        train(model)
        assert handle._controller.regions.chosen
        store = handle._engine.store
    del handle, model
    gc.collect()
    assert store.stats()["pool_used_bytes"] == 0
    assert not [each for each in gc.get_objects() if type(each) is regions.Region]


def test_a_handle_does_not_keep_the_model(tmp_path):
    with enabled(make(), tmp_path) as handle:
        limit = handle._options.memory_limit
    model = make()
    with offload.enable(model, memory_limit=limit, min_tensor_bytes=4096, spill_dir=tmp_path) as handle:
        train(model)
        assert handle._controller.regions.chosen
        parameter = weakref.ref(model[0].widen.weight)
        del model
        gc.collect()
        assert parameter() is None


def test_regions_that_turn_out_slower_are_given_up():
    about = CompiledRegions(None, None, None, lambda: True)
    assert not about.are_given_up(None)  # none is chosen
    for expected, given_up in ((0.9, False), (1.0, True), (None, True)):
        about.before, about._is_new = SimpleNamespace(plan=SimpleNamespace(expected_seconds=1.0)), True
        plan = None if expected is None else SimpleNamespace(expected_seconds=expected)
        assert about.are_given_up(plan) == given_up
        assert not about.are_given_up(SimpleNamespace(plan=None, expected_seconds=9.0))  # judged once
        assert about.are_given_up(None) != given_up  # a later plan that no limit allows, if they are still there


# Guard: where it stands, its text, what stands there instead, and the test that misses it.
GUARDS = {
    "what changes the module runs once": (
        (regions, "_why_not", "not is_held or not before.is_same()", "False"),
        test_a_region_that_changes_an_attribute,
    ),
    "what writes to its inputs runs once": (
        (regions, "_why_not", "list(now) == then", "True"),
        test_a_region_that_writes_to_its_input,
    ),
    "hooks are called once": (
        (regions, "_why_not", "_calls_hooks(part)", "False"),
        test_a_region_with_a_hook,
    ),
    "results are compared": (
        (regions.RegionTrial, "_run_again", "_have_same_bits(result, again)", "True"),
        test_a_region_that_gives_other_bits,
    ),
    "the trial leaves the random state as it is": (
        (regions.RegionTrial, "_run_again", "stack.enter_context(as_before(generator, state))", "pass"),
        partial(test_compiled_blocks_run_again_and_give_the_same_bits, "in place"),
    ),
    "a changed parameter is an error": (
        (regions._Rerun, "__call__", "self._before.check()", "pass"),
        partial(test_a_parameter_that_changes_before_backward, how="in place"),
    ),
    "modules run as in forward": (
        (regions._Snapshot, "in_force", "own.get(name, value) != value", "False"),
        test_a_mode_that_is_switched_between_forward_and_backward,
    ),
    "settings of torch are put in force": (
        (regions._Rerun, "__call__", "put_in_force(self._settings)", "pass"),
        test_settings_of_torch_are_those_of_forward,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_is_missed(guard, tmp_path):
    where, test = GUARDS[guard]
    with left_out(*where), pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        test(tmp_path=tmp_path)
