"""Compiled parts that run again in backward as a whole: the same bits, whatever changes."""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from region_rig import BLOCKS, WIDTH, Block, Calling, batch, check, check_calls, enabled, make, rig, step, train  # noqa: F401
from torch import nn

import offload
from offload.control.regions import CompiledRegions
from offload.runtime import regions


@pytest.mark.parametrize("style", ["in place", pytest.param("wrapper", marks=pytest.mark.full)])
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


@pytest.mark.long
def test_tensors_inside_containers_are_inputs(tmp_path):
    class Scaled(Block):
        def forward(self, given, *, masks):
            return {"result": super().forward(given[0]) * masks["all"].sign()}

    def call(block, x):
        return block((x, 1), masks={"all": torch.ones(512, WIDTH)})["result"]

    check_calls(tmp_path, Scaled, call)


@pytest.mark.long
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


class Scale:
    """An object that is neither a tensor nor a constant."""

    def __init__(self):
        self.factor = torch.ones(WIDTH)

    def grow(self, _):
        self.factor = self.factor + 1


@pytest.mark.long
def test_objects_that_come_after_the_trial(tmp_path):
    """Such calls run once: what the object holds may be another tensor in backward."""

    class Scaled(Block):
        def forward(self, x, scale=None):
            return super().forward(x) if scale is None else super().forward(x * scale.factor)

    def run(model):
        results, scale = train(model), Scale()
        model.call = lambda block, x: block(x, scale)
        return results + train(model, 2, between=scale.grow)

    expected = run(Calling(Scaled, lambda block, x: block(x)))
    torch._dynamo.reset()
    model = Calling(Scaled, lambda block, x: block(x))
    with enabled(model, tmp_path) as handle:
        found = run(model)
        assert handle._controller.regions.chosen
    assert all(map(torch.equal, found, expected))


@pytest.mark.long
def test_the_trial_ends_with_its_step(tmp_path):
    """A step of another shape follows it, whose parts run once, and whose calls do not count."""
    model = make()
    with enabled(model, tmp_path) as handle:
        train(model, 2)
        model(torch.randn(300, WIDTH)).sum().backward()
        assert {region.trial.calls for region in handle._controller.regions._regions} == {1}
        train(model, 3)
        assert handle._controller.regions.chosen


@pytest.mark.parametrize("is_first", [True, False])
def test_a_part_that_two_enabled_models_share(is_first):
    block = Block()
    block.compile(backend="aot_eager")
    plain = block._compiled_call_impl
    both = [regions.Region("0", block, "_compiled_call_impl", lambda: False) for _ in range(2)]
    for region in both if is_first else reversed(both):
        region.close()
    assert block._compiled_call_impl is plain


@pytest.mark.parametrize("how", ["in place", pytest.param("data", marks=pytest.mark.full)])
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
