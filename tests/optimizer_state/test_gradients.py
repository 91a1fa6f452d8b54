"""Gradients that leave in backward and come back for the step: weights, states and gradients as in plain training.

Loops, and those of frameworks, are compared in tests/integrations.
"""

import copy
import io

import pytest
import torch
from optimizer_state import test_kinds_of_state, test_own_optimizers, test_users_state, test_wrapped_steps
from optimizer_state.state_rig import OPTIMIZERS, TORCH_DIFFERS, assert_equal
from optimizer_state.users_rig import On, both, everything, loss_of, make_model, train
from torch import nn
from torch.optim import AdamW

import offload
from offload.optimizer_state.away_gradient import AwayGradient

MOVED = {"optimizer_state": True, "gradients": True}
STEPS = 20


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(run, folder):
    """That `run` returns the same with gradients that leave. Returns the counters."""
    plain, moved, on = both(run, folder, **MOVED)
    assert_equal(moved, plain)
    [counts] = on.handles[0].report().gradients
    on.off()
    return counts


@pytest.mark.parametrize("variant", ["default", "foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
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


# -- what programs do with gradients between backward and step --------------------------------------------------------

USES = {}


def use(function):
    USES[function.__name__] = function
    return function


@use
def norms(model):
    return [p.grad.norm() for p in model.parameters()] + [
        torch.linalg.vector_norm(p.grad, 1) for p in model.parameters()
    ]


@use
def copies(model):
    found = [p.grad.detach().clone() for p in model.parameters()]
    return found + [copy.deepcopy(p.grad) for p in model.parameters()] + [p.grad.double() for p in model.parameters()]


@use
def arithmetic(model):
    return [p.grad * 2 + p.detach() for p in model.parameters()] + [
        p.detach().addcmul(p.grad, p.grad) for p in model.parameters()
    ]


@use
def clipped(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@use
def clipped_twice_by_other_norms(model):
    found = [nn.utils.clip_grad_norm_(model.parameters(), 0.1, order) for order in (1.0, float("inf"))]
    return [*found, nn.utils.clip_grad_norm_(model.parameters(), 0.05)]


@use
def clipped_twice(model):
    return [nn.utils.clip_grad_norm_(model.parameters(), norm) for norm in (0.1, 0.05, 1e-5)]


@use
def scaled_and_read(model):
    for p in model.parameters():
        p.grad.mul_(0.5)
    return [p.grad.sum() for _ in range(3) for p in model.parameters()]


@use
def clipped_by_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


@use
def scaled_many_times(model):
    for number in range(20):
        for p in model.parameters():
            p.grad.mul_(1.01 if number % 2 else 0.99)
    return [p.grad.sum() for p in model.parameters()]


@use
def scaled_by_a_number_that_changes(model):
    factor = torch.tensor(0.5)
    for p in model.parameters():
        p.grad.mul_(factor)
    factor.fill_(7.0)


@use
def written_through_a_view(model):
    for p in model.parameters():
        p.grad.view(-1)[:3] = 1.0
        p.grad[..., 0] += 2.0


@use
def written_through_data(model):
    for p in model.parameters():
        p.grad.data.mul_(0.5).add_(p.data, alpha=0.1)


@use
def written_through_numpy(model):
    for p in model.parameters():
        p.grad.numpy()[...] *= 2


@use
def held_and_written(model):
    held = [p.grad for p in model.parameters()]
    for each in held:
        each.add_(1.0)
        each.mul_(0.5)
    return [p.grad is not None for p in model.parameters()]


@use
def foreach(model):
    found = [p.grad for p in model.parameters()]
    torch._foreach_mul_(found, 0.5)
    return torch._foreach_norm(found)


@use
def replaced(model):
    for p in model.parameters():
        p.grad = p.grad.sign()


@use
def removed(model):
    model[2].weight.grad = None


@use
def added_to_each_other(model):
    for p in model.parameters():
        p.grad.add_(p.grad)
        p.grad.sub_(p.grad * 0.25)


@use
def zeroed_in_place(model):
    model[0].weight.grad.zero_()


@use
def moved_to_double_and_back(model):
    model.double()
    model.float()


@use
def saved(model):
    file = io.BytesIO()
    torch.save([p.grad for p in model.parameters()], file)
    file.seek(0)
    return torch.load(file)


@use
def printed_and_listed(model):
    return [repr(p.grad) for p in model.parameters()], model[4].weight.grad.tolist(), model[0].weight.grad.max().item()


@use
def stacked(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]), torch.stack([model[4].weight.grad] * 2)


@use
def under_inference_mode(model):
    with torch.inference_mode():
        return [p.grad.abs().sum().item() for p in model.parameters()]


@use
def weights_changed_by_hand(model):
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.01)
            p.data.add_(p.grad, alpha=-0.01)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", USES)
def test_uses_between_backward_and_step(name, fused, tmp_path):
    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters(), fused=fused)
        on(model, optimizer)
        found = []
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            found.append(USES[name](model))
            optimizer.step()
            found.append(gradients(model))
            found.append(USES[name](model))
        return *everything(model, optimizer), gradients(model), found

    assert_same(run, tmp_path)


@pytest.mark.parametrize("name", ["clipped", "arithmetic", "written_through_data", "weights_changed_by_hand"])
def test_beside_parameters_that_leave(name, tmp_path):
    def run(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        on(model, optimizer)
        found = []
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            found.append(USES[name](model))
            optimizer.step()
            found.append(gradients(model))
        on.off()
        return *everything(model, optimizer), gradients(model), found

    plain, moved, _ = both(run, tmp_path, **MOVED, parameters="all")
    assert_equal(moved, plain)


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
