"""Runs with gradients that leave in backward, and what programs do with gradients between backward and step."""

import copy
import io

import pytest
import torch
from optimizer_state.state_rig import assert_equal
from optimizer_state.users_rig import both
from torch import nn

MOVED = {"optimizer_state": True, "gradients": True}


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(run, folder):
    """That `run` returns the same with gradients that leave. Returns the counters."""
    plain, moved, on = both(run, folder, **MOVED)
    assert_equal(moved, plain)
    [counts] = on.handles[0].report().gradients
    on.off()
    return counts


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
def refused_factors(model):
    """Torch's error comes at once, and the gradient stays as it was."""
    for factor in (1j, torch.tensor(1j)):
        for p in model.parameters():
            with pytest.raises(RuntimeError, match="can't be cast to"):
                p.grad.mul_(factor)
    return [p.grad.clone() for p in model.parameters()]


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
