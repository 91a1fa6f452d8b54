"""Backward passes that fail or are interrupted, and ends: what was updated stays updated, and that is said."""

import copy
import errno
import gc
import sys
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
from faults.inject import inject_fault
from optimizer_state.state_rig import assert_equal
from optimizer_state.test_interrupts import PRIME, Interrupt, is_same
from optimizer_state.users_rig import Momentum, On, both, everything, loss_of, make_model, train
from torch import nn
from torch.optim import AdamW

import offload
from offload.optimizer_state import begun_step, in_backward

IN_BACKWARD = {"step_in_backward": True}
MOVED = {"step_in_backward": True, "optimizer_state": True}
BOTH = pytest.mark.parametrize("asked", [IN_BACKWARD, MOVED], ids=["in memory", "moved"])


def prepared(on, steps=2):
    torch.set_grad_enabled(True)
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    on(model, optimizer)
    train(model, optimizer, steps)
    optimizer.zero_grad()
    return model, optimizer


def parts(model, optimizer):
    """What belongs to each parameter."""
    state = optimizer.state_dict()["state"]
    return [
        [p.detach().clone(), *(value.clone() for value in state[n].values())] for n, p in enumerate(model.parameters())
    ]


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("of the caller")


@BOTH
def test_what_was_updated_before_an_error_stays_updated(asked, tmp_path):
    on = On(True, tmp_path, **asked)
    (model, optimizer), (plain, plain_optimizer) = prepared(on), prepared(On(False, tmp_path))
    before = parts(plain, plain_optimizer)
    loss_of(plain, 2).backward()
    plain_optimizer.step()
    after = parts(plain, plain_optimizer)
    x = torch.randn(16, 60, generator=torch.Generator().manual_seed(2))
    loss = model[2:](FailsInBackward.apply(model[:2](x))).square().mean()
    with pytest.raises(MemoryError, match="of the caller"):
        loss.backward()
    found = parts(model, optimizer)
    assert [is_same(each, was) for each, was in zip(found, before, strict=True)] == [True] * 2 + [False] * 6
    assert [is_same(each, will) for each, will in zip(found, after, strict=True)] == [False] * 2 + [True] * 6
    optimizer.zero_grad()
    with pytest.raises(offload.StepInBackwardError, match=r"its updates cannot be undone: load the latest checkpoint"):
        loss_of(model, 2).backward()
    assert_equal(parts(model, optimizer), found)
    optimizer.zero_grad()
    with pytest.raises(offload.StepInBackwardError, match="was removed or replaced"):
        optimizer.step()
    on.off()


@BOTH
def test_training_goes_on_after_an_error(asked, tmp_path):
    """As after a step of plain torch in which only some parameters had a gradient."""
    on = On(True, tmp_path, **asked)
    (model, optimizer), (plain, plain_optimizer) = prepared(on), prepared(On(False, tmp_path))
    x = torch.randn(16, 60, generator=torch.Generator().manual_seed(2))
    with pytest.raises(MemoryError):
        model[2:](FailsInBackward.apply(model[:2](x))).square().mean().backward()
    optimizer.step()
    plain[2:](plain[:2](x).detach()).square().mean().backward()
    plain_optimizer.step()
    for each in ((model, optimizer), (plain, plain_optimizer)):
        train(*each, 2, begin=3)
    assert_equal(everything(model, optimizer), everything(plain, plain_optimizer))
    on.off()


@BOTH
def test_a_checkpoint_is_a_new_beginning(asked, tmp_path):
    on = On(True, tmp_path, **asked)
    (model, optimizer), (plain, plain_optimizer) = prepared(on), prepared(On(False, tmp_path))
    weights, states = copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict()))
    with pytest.raises(MemoryError):
        model[2:](FailsInBackward.apply(model[:2](torch.ones(16, 60)))).square().mean().backward()
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    for each in ((model, optimizer), (plain, plain_optimizer)):
        train(*each, 2, begin=2)
    assert_equal(everything(model, optimizer), everything(plain, plain_optimizer))
    on.off()


def test_state_that_cannot_be_read_in_backward(tmp_path):
    on = On(True, tmp_path, **MOVED)
    (model, optimizer), (plain, plain_optimizer) = prepared(on), prepared(On(False, tmp_path))
    store = optimizer.state.engine.store
    optimizer.state.engine.drain()
    inject_fault(store, "read", "error", 1, errno.EIO, persistent=True)
    with pytest.raises(offload.OptimizerStateError, match="cannot be read back; load the"):
        loss_of(model, 2).backward()
    inject_fault(store, "read", "error", 0)
    failed = [p for p in model.parameters() if p.grad is not None and type(p.grad) is torch.Tensor]
    assert len(failed) == 1, "its gradient is whole, and step() uses it"
    optimizer.step()
    loss_of(plain, 2).backward()
    updated = {n for n, p in enumerate(model.parameters()) if p.grad is not None}
    for n, p in enumerate(plain.parameters()):
        p.grad = p.grad if n in updated else None
    plain_optimizer.step()
    assert_equal(everything(model, optimizer), everything(plain, plain_optimizer))
    on.off()


@pytest.mark.parametrize(
    "asked", [pytest.param(IN_BACKWARD, id="in memory", marks=pytest.mark.full), pytest.param(MOVED, id="moved")]
)
@pytest.mark.parametrize("call", ["backward", "step"])
@pytest.mark.parametrize("stride", [17 * PRIME, pytest.param(PRIME, marks=pytest.mark.full)])
def test_an_interrupt_at_any_line(call, stride, asked, tmp_path):
    model, optimizer = prepared(On(False, tmp_path))
    before = parts(model, optimizer)
    loss_of(model, 2).backward()
    optimizer.step()
    after = parts(model, optimizer)
    number, interrupted = 1, 0
    while number is not None:
        on = On(True, tmp_path, **asked)
        model, optimizer = prepared(on)
        loss = loss_of(model, 2)
        if call == "step":
            loss.backward()
        trace = Interrupt(number)
        sys.settrace(trace.calls)
        try:
            loss.backward() if call == "backward" else optimizer.step()
            number = None  # it has ended before
        except KeyboardInterrupt:
            interrupted += 1
            number += stride if call == "backward" else max(stride // 4, PRIME)
        finally:
            sys.settrace(None)
            torch.set_grad_enabled(True)
        for was, will_be, found in zip(before, after, parts(model, optimizer), strict=True):
            assert is_same(found, will_be) or (call == "backward" and is_same(found, was)), (number, interrupted)
        # A second step, where the first one was over, would use gradients a second time.
        with nullcontext() if call == "backward" else suppress(offload.StepInBackwardError):
            optimizer.step()
        for was, will_be, found in zip(before, after, parts(model, optimizer), strict=True):
            assert is_same(found, will_be) or (call == "backward" and is_same(found, was)), "none is updated twice"
        optimizer.zero_grad()
        train(model, optimizer, 1, begin=3)
        on.off()
        assert not any(value.isnan().any() for state in optimizer.state.values() for value in state.values())
    assert interrupted > 1


def test_no_update_is_made_twice_after_an_interrupt(tmp_path, monkeypatch):
    """The guard is left out: an update that was made is not known."""
    on = On(True, tmp_path, **IN_BACKWARD)
    interrupts = []

    class Interrupted(begun_step.ChunkedStep):
        def run(self, chunk):
            super().run(chunk)
            if interrupts:
                raise interrupts.pop()

    monkeypatch.setattr(begun_step, "ChunkedStep", Interrupted)
    found = []
    for is_known in (True, False):
        model, optimizer = prepared(on)
        interrupts.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 2).backward()
        [known] = [each() for each in on.handles[-1]._states._steppers]
        if not is_known:
            known._begun.updated.clear()
        optimizer.step()
        found.append(everything(model, optimizer))
    with pytest.raises(AssertionError):
        assert_equal(*found)
    on.off()


@BOTH
def test_disabled_between_backward_and_step(asked, tmp_path, caplog):
    on = On(True, tmp_path, **asked)
    model, optimizer = prepared(on)
    loss_of(model, 2).backward()
    on.off()
    assert "8 parameters were updated in backward, but optimizer.step() was not called" in caplog.text
    with pytest.raises(offload.StepInBackwardError, match="need step_in_backward=False"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(offload.StepInBackwardError, match="a backward pass adds to a gradient"):
        loss_of(model, 2).backward()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


@BOTH
def test_a_hook_that_reads_a_gradient(asked, tmp_path):
    """Before the update of its parameter it can be read, after it no more."""
    on = On(True, tmp_path, **asked)
    model, _ = prepared(on)
    parameter = next(model.parameters())
    parameter.register_post_accumulate_grad_hook(lambda each: each.grad.norm())
    with pytest.raises(offload.StepInBackwardError, match="this gradient was used in backward and is gone"):
        loss_of(model, 2).backward()
    on.off()


def steps(model, optimizer, on):
    optimizer.step()


def steps_with_a_closure(model, optimizer, on):
    assert optimizer.step(lambda: 3) == 3


def steps_twice_with_other_gradients(model, optimizer, on):
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1, begin=7)
    optimizer.step()


def disables_within_the_step(model, optimizer, on):
    hook = optimizer.register_step_pre_hook(lambda *_: on.off())
    optimizer.step()
    hook.remove()


def moves_first(model, optimizer, on):
    optimizer.step()
    model.double()


def enables_again(model, optimizer, on):
    on(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1, begin=8)
    on.off()
    optimizer.zero_grad()


class CountsInItsGroup(Momentum):
    def extra(self):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


AFTER_DISABLE = [steps, steps_with_a_closure, steps_twice_with_other_gradients, enables_again, disables_within_the_step]
KINDS = {"AdamW": lambda params: AdamW(params, lr=0.01, weight_decay=0.5), "own": CountsInItsGroup}


@BOTH
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("what", [*AFTER_DISABLE, moves_first], ids=lambda each: each.__name__)
def test_a_step_after_disable_updates_each_parameter_once(what, kind, asked, tmp_path):
    def run(on):
        model = make_model()
        optimizer = kind(model.parameters())
        on(model, optimizer)
        train(model, optimizer, 2)
        optimizer.zero_grad()
        x = torch.randn(16, 60, generator=torch.Generator().manual_seed(2))
        model[4](model[:4](x).detach()).square().mean().backward()  # of the last layer alone
        for param in model[0].parameters():
            param.grad = torch.ones_like(param)  # not complete in backward
        if what is not disables_within_the_step:
            on.off()
        what(model, optimizer, on)
        optimizer.zero_grad()
        train(model.float(), optimizer, 2, begin=3)
        return everything(model, optimizer)

    plain, stepped, on = both(run, tmp_path, **asked)
    assert_equal(stepped, plain)
    on.off()


@BOTH
def test_a_gradient_that_is_gone_is_not_used_a_second_time_after_disable(asked, tmp_path):
    on = On(True, tmp_path, **asked)
    model, optimizer = prepared(on, 0)
    train(model, optimizer, 2)
    on.off()
    before = parts(model, optimizer)
    for _ in range(2):
        with pytest.raises(offload.StepInBackwardError, match="a second time, and it is gone"):
            optimizer.step()
    model.double()
    model.float()
    with pytest.raises(offload.StepInBackwardError, match="a second time, and it is gone"):
        optimizer.step()
    assert_equal(parts(model, optimizer), before)


@BOTH
def test_options_that_change_after_disable(asked, tmp_path):
    on = On(True, tmp_path, **asked)
    model, optimizer = prepared(on)
    loss_of(model, 2).backward()
    on.off()
    before = parts(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(offload.StepInBackwardError, match="lr of parameter group 0 changed"):
        optimizer.step()
    assert_equal(parts(model, optimizer), before)
    optimizer.zero_grad()
    train(model, optimizer, 1)


def test_a_step_after_disable_whose_guard_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(in_backward, "leave_gradients", lambda *_: None)
    on = On(True, tmp_path, **IN_BACKWARD)
    model, optimizer = prepared(on)
    loss_of(model, 2).backward()
    on.off()
    before = parts(model, optimizer)
    with pytest.raises(offload.StepInBackwardError, match="need step_in_backward=False"):
        optimizer.step()
    with pytest.raises(AssertionError):
        assert_equal(parts(model, optimizer), before)


@BOTH
@pytest.mark.parametrize("when", ["after a step", "within one"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_optimizer_that_goes(kind, when, asked, tmp_path):
    on = On(True, tmp_path, **asked)
    model = make_model()
    optimizer = kind(model.parameters())
    on(model, optimizer)
    train(model, optimizer, 2)
    model.zero_grad()
    if when == "within one":
        loss_of(model, 2).backward()
    gone = [weakref.ref(optimizer), on.handles[0]._states._steppers[0]]
    gc.disable()
    try:
        del optimizer
        assert [each() for each in gone] == [None, None], "no collection is needed"
    finally:
        gc.enable()
    model.zero_grad()
    loss_of(model, 2).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters()), "nobody uses them"
    on.off()


def test_a_parameter_that_goes(tmp_path):
    on = On(True, tmp_path, **MOVED)
    model, optimizer = prepared(on)
    optimizer.param_groups[0]["params"].pop(0)
    optimizer.state.pop(model[0].weight)
    gone = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.ones(120, 60))
    train(model, optimizer, 2)
    assert gone() is None
    optimizer.add_param_group({"params": [model[0].weight]})
    train(model, optimizer, 1)
    assert on.handles[0].report().step_in_backward[0].at_step == 1
    train(model, optimizer, 1)
    assert on.handles[0].report().step_in_backward[0].at_step == 0
    on.off()
