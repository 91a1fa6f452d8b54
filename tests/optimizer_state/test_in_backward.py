"""Parameters that are updated in backward: weights, states and counts as in plain training, to the last bit.

Loops, and those of frameworks, are compared in tests/integrations.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from optimizer_state import test_kinds_of_state, test_own_optimizers, test_users_state, test_wrapped_steps
from optimizer_state.state_rig import OPTIMIZERS, assert_equal
from optimizer_state.users_rig import both, everything, loss_of, make_model, train
from recomputation.forced import Forced
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import offload
from offload.optimizer_state import in_backward as in_backward_module

IN_BACKWARD = {"step_in_backward": True}
MOVED = {"step_in_backward": True, "optimizer_state": True}
BOTH = pytest.mark.parametrize("asked", [IN_BACKWARD, MOVED], ids=["in memory", "moved"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, tmp_path):
    kind, options = OPTIMIZERS[name]

    def run(on):
        model = make_model()
        params = [p for p in model.parameters() if p.ndim == 2 or name != "Muon"]
        optimizer = kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.003}], **copy.deepcopy(options))
        on(model, optimizer)
        for number in range(4):
            model.zero_grad()
            params[1].requires_grad_(number != 2)
            loss_of(model, number).backward()
            optimizer.step()
        return everything(model, optimizer)

    plain, stepped, on = both(run, tmp_path, **MOVED)
    assert_equal(stepped, plain)
    assert on.handles[0].report().step_in_backward[0].at_step == 0
    on.off()


@pytest.mark.parametrize("switch", [{"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels(switch, dtype, tmp_path):
    def run(on):
        model = make_model().to(dtype)
        optimizer = AdamW(model.parameters(), **switch)
        on(model, optimizer)
        for number in range(4):
            model.zero_grad()
            x = torch.randn(16, 60, generator=torch.Generator().manual_seed(number)).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
        return everything(model, optimizer)

    plain, stepped, on = both(run, tmp_path, **MOVED)
    assert_equal(stepped, plain)
    on.off()


# What can only be said of the whole, or of steps that others have wrapped.
REFUSED = {
    *(each.__name__ for each in test_wrapped_steps.scenario if each.__name__ != "hooks_of_all_optimizers"),
    *(kind.__name__ for kind in test_own_optimizers.OWN if kind not in test_own_optimizers.CHUNKED),
    "a_parameter_twice_in_a_group",
    "an_optimizer_around_another_with_the_same_state",
    "sharpness_aware_minimization",
}
# `optimizer.state` lists parameters in the order of their first update.
IN_ANOTHER_ORDER = {"state_that_is_joined_with_another", "hooks_that_change_the_state_as_it_is_saved"}
OTHERS = [*test_wrapped_steps.scenario, *test_users_state.scenario, *test_kinds_of_state.scenario]


@pytest.mark.parametrize("function", [*OTHERS, *test_own_optimizers.OWN], ids=lambda each: each.__name__)
def test_what_users_do_is_the_same_or_refused(function, tmp_path):
    given = [function] if function in test_own_optimizers.OWN else []
    run = test_own_optimizers.trained_with if given else function
    if function.__name__ in REFUSED:
        with pytest.raises((ValueError, offload.StepInBackwardError), match="step_in_backward=True"):
            both(run, tmp_path, *given, **MOVED)
    elif function.__name__ not in IN_ANOTHER_ORDER:
        plain, stepped, on = both(run, tmp_path, *given, **MOVED)
        assert_equal(stepped, plain)
        on.off()


# -- models -----------------------------------------------------------------------------------------------------------


class Uses(nn.Module):
    """Uses parameters in ways of its own, on two layers that may share their weight."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embedding = nn.Embedding(50, 60)
        self.first, self.second, self.unused = nn.Linear(60, 60), nn.Linear(60, 60), nn.Linear(60, 60)
        self.head = nn.Linear(60, 50, bias=False)
        self.head.weight = self.embedding.weight

    def block(self, layer, x):
        return torch.tanh(layer(x)) * x

    def forward(self, x):
        x = self.embedding(x)
        for layer in (self.first, self.second, self.first):
            if self.way in ("checkpoint", "autocast"):
                x = checkpoint(self.block, layer, x, use_reentrant=False)
            elif self.way == "reentrant" and layer is self.second:
                x = checkpoint(self.block, layer, x, use_reentrant=True)
            else:
                x = self.block(layer, x)
        return self.head(x)


def trained(on, way):
    model = Uses(way)
    optimizer = AdamW(model.parameters(), lr=0.01)
    on(model, optimizer)
    for number in range(5):
        tokens = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", enabled=way == "autocast"):
            loss = model(tokens).float().logsumexp(-1).mean()
        optimizer.zero_grad()
        if way == "parts":
            loss.backward(inputs=[model.first.weight, model.embedding.weight])
        elif way == "penalty":
            [gradient] = torch.autograd.grad(loss, [model.first.weight], create_graph=True)
            (loss + gradient.square().sum()).backward()
        elif way == "by hand":
            params = [p for p in model.parameters() if p is not model.unused.weight and p is not model.unused.bias]
            for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = gradient
        else:
            loss.backward()
        optimizer.step()
    return everything(model, optimizer)


@BOTH
@pytest.mark.parametrize("way", ["tied", "checkpoint", "reentrant", "autocast", "parts", "penalty", "by hand"])
def test_parameters_that_are_tied_used_twice_or_not_at_all(way, asked, tmp_path):
    plain, stepped, on = both(trained, tmp_path, way, **asked)
    assert_equal(stepped, plain)
    [counts] = on.handles[0].report().step_in_backward
    updated = {"parts": (2, 0), "by hand": (0, 5)}.get(way, (5, 0))
    assert (counts.in_backward, counts.at_step) == updated
    on.off()


@pytest.mark.parametrize("knobs", [{"n_tensors": -1}, {"max_slowdown": 10.0}, {"memory_limit": "64MiB"}], ids=str)
def test_with_activations_that_swap(knobs, tmp_path):
    plain, stepped, on = both(trained, tmp_path, "tied", **MOVED, **{"n_tensors": None, **knobs})
    assert_equal(stepped, plain)
    on.off()


@pytest.mark.parametrize("way", ["tied", "penalty"])
def test_with_activations_that_are_recomputed(way, tmp_path):
    handles = []

    def run(on):
        def enable(model, optimizer):
            on(model, optimizer)
            for handle in on.handles:
                handle._on_device.controller = Forced(handle._on_device)
                handles.append(handle)

        return trained(enable if on.is_on else on, way)

    plain, stepped, on = both(run, tmp_path, **MOVED, n_tensors=-1, min_tensor_bytes=256)
    assert_equal(stepped, plain)
    assert handles[0]._counts.recomputed.tensors > 0
    on.off()


def test_memory_that_the_planner_counts(tmp_path, monkeypatch):
    """A step in backward needs what a plain one does, less the gradients, and one update's temporaries and state."""

    def base_bytes(**asked):
        torch.manual_seed(0)
        model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(300, 300), nn.GELU())))
        optimizer = AdamW(model.parameters(), foreach=False)
        knobs = {"memory_limit": "100MiB", "min_tensor_bytes": 1024, "spill_dir": tmp_path}
        with offload.enable(model, optimizer=optimizer, **knobs, **asked) as handle:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(64, 300)).square().mean().backward()
                optimizer.step()
            return handle.trace().base_bytes

    weight = 300 * 300 * 4
    plain, in_backward = base_bytes(optimizer_state=False), base_bytes(**IN_BACKWARD)
    assert len(plain) == len(in_backward)
    assert all(own <= other + 5 * weight for own, other in zip(in_backward, plain, strict=True))
    assert in_backward[-1] < plain[-1], "of six gradients one is there"
    assert in_backward[: len(plain) // 2] == plain[: len(plain) // 2]
    monkeypatch.setattr(in_backward_module, "apart", nullcontext)  # the guard is left out: state is counted twice
    assert base_bytes(**IN_BACKWARD)[-1] > plain[-1] + 2 * weight


def test_hooks_of_parameters_see_and_change_gradients(tmp_path):
    def run(on):
        model, seen = make_model(), []
        optimizer = AdamW(model.parameters())
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        on(model, optimizer)
        train(model, optimizer, 3)
        return everything(model, optimizer), seen

    plain, stepped, on = both(run, tmp_path, **IN_BACKWARD)
    assert_equal(stepped, plain)
    on.off()


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(backend, tmp_path):
    def run(on):
        model = torch.compile(make_model(), backend=backend)
        optimizer = AdamW(model.parameters())
        on(model, optimizer)
        train(model, optimizer, 4)
        return everything(model, optimizer)

    plain, stepped, on = both(run, tmp_path, **MOVED)
    assert_equal(stepped, plain)
    on.off()


@pytest.mark.parametrize("where", ["whole", "block", "forward"])
def test_compiled_while_gradients_are_gone(where, tmp_path):
    """What compiles describes each parameter with its `grad`: here in the evaluation between `step` and `zero_grad`."""

    def run(on):
        model = make_model()
        torch.compiler.reset()
        compiled = model
        if where == "whole":
            compiled = torch.compile(model, backend="aot_eager")
        elif where == "block":
            model[0] = torch.compile(model[0], backend="aot_eager")
        else:
            model[0].forward = torch.compile(model[0].forward, backend="aot_eager")
        optimizer = AdamW(model.parameters())
        on(compiled, optimizer)
        said = []
        for number in range(4):
            optimizer.zero_grad()
            loss_of(compiled, number).backward()
            optimizer.step()
            with torch.no_grad():
                said.append(loss_of(compiled, number))
        return everything(model, optimizer), said

    plain, stepped, on = both(run, tmp_path, **IN_BACKWARD)
    assert_equal(stepped, plain)
    on.off()


def test_exported_and_shared_while_gradients_are_gone(tmp_path):
    model = make_model()
    optimizer = AdamW(model.parameters())
    handle = offload.enable(model, optimizer=optimizer, n_tensors=0, spill_dir=tmp_path, **IN_BACKWARD)
    train(model, optimizer, 2)
    assert type(model[0].weight.grad).__name__ == "FreedGradient"
    x = torch.randn(16, 60)
    expected = model(x)
    for _ in range(2):
        assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
        handle.disable()
    assert type(model[0].weight.grad).__name__ == "FreedGradient"
    model.share_memory()
    assert model[0].weight.is_shared()


def test_a_module_is_moved_with_gradients_that_are_gone(tmp_path):
    plain, stepped = make_model(), make_model()
    for model, asked in ((plain, None), (stepped, IN_BACKWARD)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = offload.enable(model, optimizer=optimizer, n_tensors=0, **asked) if asked else None
        train(model, optimizer, 2)
        if handle is not None:
            handle.disable()
        model.double()
        assert copy.deepcopy(model)[0].weight.grad is None
    assert_equal(list(stepped.parameters()), list(plain.parameters()))
    assert stepped[0].weight.grad.dtype == torch.float64


def test_the_report_says_what_was_freed(tmp_path):
    model = make_model()
    optimizer = AdamW(model.parameters())
    handle = offload.enable(model, optimizer=optimizer, n_tensors=0, spill_dir=tmp_path, **IN_BACKWARD)
    train(model, optimizer, 3)
    report = handle.report()
    [counts] = report.step_in_backward
    nbytes = sum(p.nbytes for p in model.parameters())
    assert (counts.steps, counts.in_backward, counts.at_step, counts.freed_bytes) == (3, 8, 0, 3 * nbytes)
    assert report.to_dict()["step_in_backward"][0]["freed_bytes_per_step"] == nbytes
    assert ("gradients", "AdamW: 8 parameters updated in backward; 59.80 KiB freed per step") in report.rows()
    assert report.optimizer_state == ()
    assert type(optimizer.state).__name__ == "defaultdict"
    handle.disable()
