"""Guards of gradients that are away left out, one at a time: a program that uses gradients notices each."""

import sys

import pytest
import torch
from core.store_rig import make_store
from optimizer_state.gradient_rig import MOVED, USES, gradients
from optimizer_state.state_rig import assert_equal
from optimizer_state.users_rig import Momentum, On, both, everything, loss_of, make_model
from torch.optim import AdamW

from offload.optimizer_state import chunks, gradient_mover, gradients_in_step, stored_gradient
from offload.optimizer_state.away_gradient import AwayGradient
from offload.optimizer_state.counts import GradientCounts
from offload.optimizer_state.stored_gradient import GradientPlace, StoredGradient
from offload.runtime.engine import Engine
from offload.torch_compat import tensors


def using(name):
    """A program that uses gradients between backward and step."""

    def scenario(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        on(model, optimizer)
        found = []
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            found.append(USES[name](model))
            optimizer.step()
        return *everything(model, optimizer), gradients(model), found

    return scenario


def held_by_a_hook(take):
    """A hook holds a gradient, or a view of it, and the program changes it later."""

    def scenario(on):
        model = make_model()
        optimizer = AdamW(model.parameters())
        held = []
        model[2].weight.register_post_accumulate_grad_hook(lambda p: held.append(take(p.grad)))
        on(model, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            held.pop().mul_(3)
            optimizer.step()
        return *everything(model, optimizer), gradients(model)

    return scenario


def unscaled_by_the_kernel(on):
    model = make_model()
    optimizer = AdamW(model.parameters(), fused=True)
    on(model, optimizer)
    found = []
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number).mul(4).backward()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)  # as a GradScaler sets them
        optimizer.step()
        found.append(gradients(model))
    return *everything(model, optimizer), found


class KeepsGradients(Momentum):
    """Its state has the gradient itself, which later backward passes add to."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for parameter in self.with_gradient:
            parameter.sub_(self.state[parameter].get("last", torch.zeros_like(parameter)), alpha=0.01)
            self.state[parameter]["last"] = parameter.grad
        return loss


class ChangesGradients(Momentum):
    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for parameter in self.with_gradient:
            parameter.grad.mul_(0.5)
            parameter.sub_(parameter.grad, alpha=0.01)
        return loss


def changed_by_the_optimizer(on):
    model = make_model()
    optimizer = ChangesGradients(model.parameters())
    on(model, optimizer)
    for number in range(3):
        loss_of(model, number).backward()
        optimizer.step()
    return *everything(model, optimizer), gradients(model)


def kept_by_the_optimizer(on):
    model = make_model()
    optimizer = KeepsGradients(model.parameters())
    on(model, optimizer)
    for number in range(4):
        loss_of(model, number).backward()
        optimizer.step()
    return *everything(model, optimizer), gradients(model)


def read_for_a_change(self, why):
    return self.read()


def norm_before_factors(self, order, param):
    self.place.asked.add(order)
    known = self._norms.get(order)
    return known.clone() if known is not None else torch.linalg.vector_norm(self.read(param), order)


def factor_as_it_will_be(self, multiply, factor):
    return self.record.scale(multiply, factor)


def not_unscaled(each, *, is_unscaled, take_back=gradients_in_step._take_back):
    take_back(each, is_unscaled=False)


GUARDS = {
    "what other code holds stays": (
        [(gradient_mover, "_HELD_ONCE", sys.maxsize >> 1)],
        held_by_a_hook(lambda gradient: gradient),
    ),
    "what other code has a view of stays": (
        [(gradient_mover, "holds_alone", lambda tensor: True)],
        held_by_a_hook(lambda gradient: gradient.view(-1)),
    ),
    "what an operator changes comes back": (
        [(AwayGradient, "bring", read_for_a_change)],
        using("written_through_a_view"),
    ),
    "a factor is applied when the gradient comes back": (
        [(StoredGradient, "scale", lambda self, multiply, factor: True)],
        using("clipped"),
    ),
    "a factor is the number that was given": (
        [(AwayGradient, "_scale", factor_as_it_will_be)],
        using("scaled_by_a_number_that_changes"),
    ),
    "a norm from before a factor is not used": (
        [(StoredGradient, "norm", norm_before_factors)],
        using("clipped_twice"),
    ),
    "a gradient that an update changed is written again": (
        [(gradients_in_step, "version_of", lambda tensor: 0)],
        changed_by_the_optimizer,
    ),
    "a gradient that a kernel unscaled is written again": (
        [(gradients_in_step, "_take_back", not_unscaled)],
        unscaled_by_the_kernel,
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.long
def test_a_guard_that_is_left_out_is_missed(guard, tmp_path, monkeypatch):
    left_out, scenario = GUARDS[guard]
    monkeypatch.setattr(chunks, "_KNOWN", chunks._KNOWN | {ChangesGradients})
    plain, moved, on = both(scenario, tmp_path, **MOVED)
    assert_equal(moved, plain)
    on.off()
    leave = gradient_mover.GradientMover.leave

    def leave_at_once(self):
        leave(self)
        self._mover.engine.drain()  # else a change may come before the disk has the bytes, and be kept by chance

    monkeypatch.setattr(gradient_mover.GradientMover, "leave", leave_at_once)
    for each in left_out:
        monkeypatch.setattr(*each)
    plain, moved, on = both(scenario, tmp_path, **MOVED)
    with pytest.raises(AssertionError):
        assert_equal(moved, plain)
    monkeypatch.undo()
    on.off()


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_factor_is_not_applied_to_bytes_that_are_being_written(is_left_out, tmp_path, monkeypatch):
    """In the stepped schedule nothing is copied before somebody waits: the copy-out is surely under way."""
    engine = Engine(make_store("direct", tmp_path, "stepped", host_bytes_max=2 << 20), torch.device("cpu"))
    gradient = torch.randn(64, 64)
    expected = gradient * 0.5
    record = StoredGradient(gradient, GradientPlace(engine, GradientCounts("AdamW"), str))
    del gradient
    record.leave()
    assert record.scale(torch.ops.aten.mul_.Scalar, 0.5)
    if is_left_out:
        monkeypatch.setattr(stored_gradient, "holds_alone", lambda tensor: True)
    found = [torch.equal(record.read(None), expected) for _ in range(2)]
    assert found == [True, not is_left_out]
    engine.drain()


@pytest.mark.parametrize("is_left_out", [False, True])
def test_code_that_asks_for_an_address_gets_an_error(is_left_out, tmp_path, monkeypatch):
    if is_left_out:
        monkeypatch.setattr(tensors, "forbid_writes", None)
    on = On(True, tmp_path, **MOVED)
    model = make_model()
    optimizer = AdamW(model.parameters())
    on(model, optimizer)
    loss_of(model, 0).backward()
    if is_left_out:
        assert torch.Tensor.data_ptr(model[0].weight.grad) == 0, "which a program would read from"
    else:
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.Tensor.data_ptr(model[0].weight.grad)
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(model[0].weight.grad)
    assert model[0].weight.grad.data_ptr() != 0
    on.off()


def test_an_optimizer_that_keeps_gradients(tmp_path):
    plain, moved, on = both(kept_by_the_optimizer, tmp_path, **MOVED)
    assert_equal(moved, plain)
    on.off()


def test_torch_chooses_kernels_as_for_plain_gradients():
    assert AwayGradient in torch.utils._foreach_utils._foreach_supported_types
