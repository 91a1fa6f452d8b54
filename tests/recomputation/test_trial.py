"""The trial: what it finds out, what it leaves alone, and how it keeps to a limit."""

from contextlib import nullcontext

import pytest
import torch
from forced import Calls, gradients
from test_workspaces import OPERATOR, Recurrent
from test_workspaces import step as recurrent_step
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from offload.profiling.allocations import AllocatedPeak
from offload.recomputation.slicing import Cut
from offload.torch_compat.allocation_profile import AllocationProfile
from offload.torch_compat.modules import is_sharded

CPU = torch.device("cpu")


def step(model, number):
    model.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    return gradients(model)


def long_step(model, number):
    """The first layer's weight is small beside the result, so that a copy is worth it."""
    model.zero_grad()
    model(torch.randn(1024, 64)).square().mean().backward()
    return gradients(model)


def make():
    return Calls(lambda h: functional.silu(functional.gelu(h)))


def trial_of(handle):
    (trial,) = handle._on_device.controller.trials.values()
    return trial


def sizes_of(handle):
    (known,) = handle._on_device.controller.known.values()
    return {index: entry.nbytes for index, entry in known.order.entries.items()}


def test_what_a_recipe_says(forcing):
    handle = forcing.compare(make, long_step)
    trial = trial_of(handle)
    entries = next(iter(handle._on_device.controller.known.values())).order.entries
    recipes = trial.recipes()
    assert trial.is_as_recorded
    assert recipes.keys() | trial.refusals().keys() == entries.keys()
    for index, recipe in recipes.items():
        assert recipe.seconds > 0
        assert all(source < index and source in entries for source in recipe.sources)
        assert recipe.opens < index
    names = {recipe.operators: recipe.is_heavy for recipe in recipes.values()}
    assert names == {("aten.addmm.default",): True, ("aten.gelu.default",): False, ("aten.silu.default",): False}


def sorted_values(h):
    """Gelu saves the values. Sorting again makes the indices too, which take twice the bytes."""
    return functional.gelu(h.sort().values)


@pytest.mark.parametrize("by", ["measured", "counted", "counted: no allocation is reported"])
def test_memory_of_a_recipe_includes_results_that_it_does_not_need(forcing, monkeypatch, by):
    h_bytes = 1024 * 256 * 4
    measured, end = [], AllocatedPeak.end

    def noted_end(peak):
        end(peak)
        measured.append(peak.nbytes)

    monkeypatch.setattr(AllocatedPeak, "end", noted_end)
    if by == "measured":
        monkeypatch.setattr(Cut, "_peak_bytes", lambda *_: 0)
    elif by != "counted":
        monkeypatch.setattr("offload.profiling.allocations._highest", lambda _: 0)

    def watched_step(model, number):
        is_watched = by == "counted" and number == 1  # a profiler of the program's own runs in the trial
        with torch.profiler.profile() if is_watched else nullcontext():
            return long_step(model, number)

    handle = forcing.compare(lambda: Calls(sorted_values), watched_step)
    sizes = sizes_of(handle)
    found = {
        sizes[index]: recipe.workspace_bytes
        for index, recipe in trial_of(handle).recipes().items()
        if recipe.operators[-1] == "aten.sort.default"
    }
    besides = {h_bytes: 3 * h_bytes, 2 * h_bytes: 2 * h_bytes}  # h and the indices, or h and the values
    assert found.keys() == besides.keys()
    assert all(found[nbytes] >= least for nbytes, least in besides.items())
    assert by == "measured" or found == besides
    assert all((nbytes is None) == (by == "counted") for nbytes in measured)
    assert measured


def sums_with_indices(h):
    """Sort saves the indices, and gelu four copies of the sums."""
    values, indices = h.sort()
    return functional.gelu((values + indices).repeat(4, 1))


def test_counted_memory_of_a_recipe_that_reads_a_source_made_by_one_of_its_operators(forcing, monkeypatch):
    h_bytes = 1024 * 256 * 4
    monkeypatch.setattr("offload.profiling.allocations._highest", lambda _: 0)  # so results are counted
    handle = forcing.compare(lambda: Calls(sums_with_indices), long_step)
    sizes = sizes_of(handle)
    found = {
        recipe.operators[1:]: (sizes[index], recipe.workspace_bytes)
        for index, recipe in trial_of(handle).recipes().items()
    }
    # The sums exist while they are repeated. The indices are a source, so running `add` frees only the values.
    repeated = ("aten.sort.default", "aten.add.Tensor", "aten.repeat.default")
    assert found[repeated] == (4 * h_bytes, h_bytes)


class OneOperator(TorchDispatchMode):
    """Finds the peak of what one operator allocates."""

    nbytes = result_nbytes = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) != OPERATOR:
            return func(*args, **(kwargs or {}))
        with AllocatedPeak(CPU) as peak:
            results = func(*args, **(kwargs or {}))
        self.nbytes = peak.nbytes
        self.result_nbytes = sum(result.untyped_storage().nbytes() for result in results)
        return results


def test_memory_of_a_recipe_includes_what_kernels_allocate(forcing):
    """The layer's output takes little memory; its workspace and what its kernel needs take more."""
    with OneOperator() as alone:
        Recurrent()(torch.randn(4, 12, 32))
    if alone.result_nbytes is None:
        pytest.skip("this torch was built without oneDNN's recurrent layers")
    handle = forcing.compare(Recurrent, recurrent_step)
    assert alone.nbytes > alone.result_nbytes
    sizes = sizes_of(handle)
    recipes = {i: each for i, each in trial_of(handle).recipes().items() if each.operators == (OPERATOR,)}
    assert recipes
    assert {sizes[i] + each.workspace_bytes for i, each in recipes.items()} == {alone.nbytes}


def test_an_interrupt_ends_the_measurement(forcing, monkeypatch):
    """A signal may arrive as soon as `__exit__` is entered."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(AllocatedPeak, "__exit__", interrupted)
    model = make()
    forcing.enable(model)
    long_step(model, 0)
    with pytest.raises(KeyboardInterrupt):
        long_step(model, 1)
    assert not AllocationProfile.is_recording()
    assert not torch.autograd._profiler_enabled()


def test_nothing_is_tried_that_does_not_fit(forcing):
    h_bytes = 32 * 256 * 4
    limit = {"base_bytes": [0] * 100, "limit_bytes": 2 * h_bytes}
    handle = forcing.compare(make, step, limit=limit, recomputes=None)
    assert "too large to be tried within the memory limit" in forcing.refused(handle)


@pytest.mark.parametrize(("there", "is_tried"), [(90, True), (103, False)])
def test_what_is_packed_later_counts_at_the_pack_of_a_recipe_that_is_tried(forcing, there, is_tried):
    """Of the limit of 104 tensors, the recipe needs its own, its result and a part of a third for the comparison."""
    h_bytes = 32 * 256 * 4
    limit = {"base_bytes": [0] * 100, "limit_bytes": 104 * h_bytes, "unpacked_bytes": [there * h_bytes] * 100}
    handle = forcing.compare(make, step, limit=limit, recomputes=None)
    assert bool(trial_of(handle).recipes()) is is_tried


class SineAndCosine(torch.autograd.Function):
    """Saves both at once: no operator runs between the two packs."""

    @staticmethod
    def forward(ctx, h):
        both = h.sin(), h.cos()
        ctx.save_for_backward(*both)
        return both[0]

    @staticmethod
    def backward(ctx, grad):
        sine, cosine = ctx.saved_tensors
        return grad * (sine.square() * cosine + cosine.pow(3))


@pytest.mark.parametrize("needed", ["before the operators", "where the operators ran", "after the packs"])
def test_what_kernels_allocate_belongs_to_the_node_in_which_they_ran(forcing, needed):
    def make():
        return Calls(lambda h: SineAndCosine.apply(functional.gelu(functional.gelu(h))))

    def refusals(**options):
        handle = forcing.compare(make, long_step, **options)
        refused = trial_of(handle).refusals()
        (known,) = handle._on_device.controller.known.values()
        *_, sine, cosine = sorted(index for index, entry in known.order.entries.items() if entry.nbytes == h_bytes)
        return known.order.entries[sine].packed, [refused.get(index) for index in (sine, cosine)]

    h_bytes = 1024 * 256 * 4
    node, refused = refusals()
    assert refused == [None, None]
    base_bytes = [0] * 100
    base_bytes[node + {"before the operators": -2, "where the operators ran": 0, "after the packs": 2}[needed]] = (
        100 * h_bytes
    )
    _, refused = refusals(limit={"base_bytes": base_bytes, "limit_bytes": 100 * h_bytes}, recomputes=None)
    too_large = "too large to be tried within the memory limit"
    assert refused == ([too_large] * 2 if needed == "where the operators ran" else [None, None])


def test_a_trial_that_takes_another_branch_says_so(forcing):
    model = make()
    handle = forcing.enable(model)
    step(model, 0)
    model.function = torch.tanh
    step(model, 1)
    assert not trial_of(handle).is_as_recorded


def test_compiled_parts_are_left_alone(forcing):
    def compiled():
        model = make()
        model.function = torch.compile(model.function, backend="aot_eager")
        return model

    model = compiled()
    plain = make()
    plain.load_state_dict(model.state_dict())
    handle = forcing.enable(model)
    for number in range(4):
        torch.manual_seed(number)
        expected = step(plain, number)
        torch.manual_seed(number)
        assert all(map(torch.equal, step(model, number), expected))
    assert not trial_of(handle).recipes()
    assert forcing.refused(handle) == {"torch.compile made a part of the step"}


def test_sharded_parameters_are_no_sources():
    class FSDPModule:
        pass

    class Sharded(FSDPModule, nn.Linear):
        pass

    assert is_sharded(nn.Sequential(nn.ReLU(), Sharded(2, 2)))
    assert not is_sharded(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


@pytest.mark.parametrize("swaps", [False, True], ids=["kept", "swapped"])
def test_chains_of_dropped_tensors(forcing, swaps):
    """Each is made of the one before: asked for the last, backward makes them all, and each waits for its own use."""

    def function(h):
        for _ in range(6):
            h = torch.sin(functional.gelu(h) * 2)
        return h

    handle = forcing.compare(lambda: Calls(function), step, swaps=swaps)
    steps = 4
    assert handle._counts.recomputed.tensors == steps * len(trial_of(handle).recipes())
