"""Gradients that leave in backward and come back for the step: weights, states and gradients as in plain training.

Loops, and those of frameworks, are compared in tests/integrations.
"""

import copy

import pytest
import torch
from optimizer_state import test_kinds_of_state, test_own_optimizers, test_users_state, test_wrapped_steps
from optimizer_state.gradient_rig import MOVED, assert_same, gradients
from optimizer_state.state_rig import OPTIMIZERS, TORCH_DIFFERS, assert_equal
from optimizer_state.users_rig import On, both, everything, loss_of, make_model, train
from some_rows import one_in
from torch import nn
from torch.optim import AdamW

import offload
from offload.optimizer_state.away_gradient import AwayGradient

STEPS = 20


@pytest.mark.parametrize("variant", one_in(3, ["default", "foreach", "fused"]))
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, dtype, variant, tmp_path):
    if (name, variant, dtype) in TORCH_DIFFERS:
        pytest.skip("torch's own runs differ")
    kind, options = OPTIMIZERS[name]
    switch = {variant: True} if variant != "default" else {}

    def run(on):
        model = make_model().to(dtype)
        params = [p for p in model.parameters() if p.ndim == 2 or name != "Muon"]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]
        optimizer = kind(groups, **copy.deepcopy(options), **switch)
        on(model, optimizer)
        found = []
        for number in range(STEPS):
            optimizer.zero_grad()
            params[1].requires_grad_(number != 2)
            x = torch.randn(16, 60, generator=torch.Generator().manual_seed(number)).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
            found.append(gradients(model))
        return *everything(model, optimizer), found

    try:
        run(On(False, tmp_path))
    except (TypeError, RuntimeError, ValueError) as error:
        pytest.skip(f"torch refuses: {error}")
    counts = assert_same(run, tmp_path)
    assert counts.tensors == 3  # the weights; the biases are small
    assert counts.in_bytes >= STEPS * counts.nbytes
    assert (counts.held, counts.brought, counts.failed) == (0, 0, 0)


OTHERS = [*test_wrapped_steps.scenario, *test_users_state.scenario, *test_kinds_of_state.scenario]


@pytest.mark.parametrize("function", [*OTHERS, *test_own_optimizers.OWN], ids=lambda each: each.__name__)
def test_what_users_do_is_the_same(function, tmp_path):
    given = [function] if function in test_own_optimizers.OWN else []
    run = test_own_optimizers.trained_with if given else function
    plain, moved, on = both(run, tmp_path, *given, **MOVED)
    assert_equal(moved, plain)
    on.off()


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
def test_clipping_reads_no_gradient_back_before_the_step(order, tmp_path):
    """Norms are taken before gradients leave, and factors applied when they come back: the bits of torch's."""

    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        on(model, optimizer)
        found = []
        for number in range(5):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            before = on.handles[0].report().gradients[0].in_bytes if on.handles else 0
            clip = (
                on.handles[0].clip_grad_norm_
                if on.handles
                else lambda *a: nn.utils.clip_grad_norm_(model.parameters(), *a)
            )
            found.append(clip(1e-3, order))
            if on.handles:
                read = on.handles[0].report().gradients[0].in_bytes - before
                assert (read == 0) == (number > 0), "the first step does not know what is asked"
            optimizer.step()
        return *everything(model, optimizer), found

    counts = assert_same(run, tmp_path)
    assert counts.brought == 0
    assert counts.in_bytes == 6 * counts.nbytes


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_accumulation(micro_batches, set_to_none, tmp_path):
    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        on(model, optimizer)
        found = []
        for number in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in range(micro_batches):
                loss_of(model, micro_batches * number + part).backward()
                found.append(gradients(model))
            optimizer.step()
        return *everything(model, optimizer), found

    assert_same(run, tmp_path)


def test_gradients_that_are_never_zeroed(tmp_path):
    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        on(model, optimizer)
        for number in range(6):
            loss_of(model, number).backward()
            optimizer.step()
        return *everything(model, optimizer), gradients(model)

    assert_same(run, tmp_path)


def test_a_hook_that_holds_a_gradient(tmp_path):
    """It changes the gradient later through the object, or the view, that it holds."""

    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        held = []
        model[0].weight.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
        model[2].weight.register_post_accumulate_grad_hook(lambda p: held.append(p.grad.view(-1)))
        on(model, optimizer)
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            while held:
                held.pop().mul_(3)
            optimizer.step()
        return *everything(model, optimizer), gradients(model)

    counts = assert_same(run, tmp_path)
    assert counts.held == 2 * 4
    assert counts.tensors == 1


def test_gradients_with_a_graph_stay(tmp_path):
    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        on(model, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in model.parameters())
            penalty.backward()
            optimizer.step()
        return everything(model, optimizer)

    assert_same(run, tmp_path)


def test_disabled_between_backward_and_step(tmp_path):
    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        on(model, optimizer)
        train(model, optimizer, 2)
        optimizer.zero_grad()
        loss_of(model, 5).backward()
        on.off()
        assert not any(isinstance(p.grad, AwayGradient) for p in model.parameters())
        optimizer.step()
        train(model, optimizer, 2)
        return everything(model, optimizer)

    plain, moved, _ = both(run, tmp_path, **MOVED)
    assert_equal(moved, plain)


def test_they_are_away_after_backward_and_after_the_step(tmp_path):
    on = On(True, tmp_path, **MOVED)
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    weights = [p for p in model.parameters() if p.nbytes >= 1024]
    loss_of(model, 0).backward()
    assert all(isinstance(p.grad, AwayGradient) and p.grad.record.is_away for p in weights)
    optimizer.step()
    assert all(p.grad.record.is_away for p in weights)
    counts = on.handles[0].report().gradients[0]
    assert counts.out_bytes == counts.nbytes == sum(p.nbytes for p in weights), "none is written twice"
    assert "3 gradients" in str(on.handles[0].report())
    optimizer.zero_grad()
    engine = on.handles[0]._states._alive()[0].engine
    engine.drain()
    on.off()
    assert engine.store.stats()["live_tickets"] == 0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"gradients": True}, "add optimizer_state=True"),
        ({"gradients": True, "optimizer_state": "auto"}, "add optimizer_state=True"),
        ({"gradients": True, "optimizer_state": True, "step_in_backward": True}, "remove gradients=True"),
        ({"gradients": 1, "optimizer_state": True}, "takes True or False"),
    ],
)
def test_wrong_arguments_say_what_to_write(knobs, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        offload.enable(model, optimizer=AdamW(model.parameters()), **knobs)


def test_with_an_optimizer_whose_state_stays_gradients_stay(tmp_path):
    on = On(True, tmp_path, **MOVED)
    model = make_model()
    on(model, torch.optim.LBFGS(model.parameters()))
    loss_of(model, 0).backward()
    assert type(model[0].weight.grad) is torch.Tensor
    assert "gradients stay in memory: LBFGS" in str(on.handles[0].report())
    on.off()
