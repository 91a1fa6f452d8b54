"""Disks that fail and interrupts while gradients are away: nothing is lost, and nothing wrong is used."""

import errno
import sys

import pytest
import torch
from faults.inject import inject_fault
from optimizer_state.gradient_rig import MOVED, gradients
from optimizer_state.state_rig import assert_equal
from optimizer_state.test_interrupts import PRIME, Interrupt
from optimizer_state.users_rig import On, everything, loss_of, make_model, train

import offload


def prepared(is_moved, folder):
    """The third step is about to begin, after backward. Returns the model, the optimizer, and `on`."""
    on = On(is_moved, folder, **MOVED)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    on(model, optimizer)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    return model, optimizer, on


def store_of(on):
    [mover] = on.handles[0]._states._alive()
    mover.engine.drain()
    return mover.engine.store


def go_on(model, optimizer):
    optimizer.step()
    train(model, optimizer, 2, begin=3)
    return everything(model, optimizer)


def test_a_write_that_fails_keeps_the_gradient_in_memory(tmp_path):
    plain, stepped, _ = prepared(False, tmp_path)
    model, optimizer, on = prepared(True, tmp_path)
    expected, found = go_on(plain, stepped), go_on(model, optimizer)
    assert_equal(found, expected)
    inject_fault(store_of(on), "write", "error", 1, errno.ENOSPC, persistent=True)
    for each, of in ((plain, stepped), (model, optimizer)):
        train(each, of, 3, begin=5)
    assert_equal([everything(model, optimizer), gradients(model)], [everything(plain, stepped), gradients(plain)])
    on.off()


@pytest.mark.parametrize("kind", ["error", "wrong_block"])
def test_a_read_that_fails_once_is_repeated(kind, tmp_path):
    model, optimizer, on = prepared(True, tmp_path)
    inject_fault(store_of(on), "read", kind, 2, errno.EIO)
    expected = go_on(*prepared(False, tmp_path)[:2])
    assert_equal(go_on(model, optimizer), expected)
    on.off()


@pytest.mark.parametrize("kind", ["error", "wrong_block"])
def test_a_read_that_fails_names_the_parameter(kind, tmp_path):
    model, optimizer, on = prepared(True, tmp_path)
    store = store_of(on)
    inject_fault(store, "read", kind, 1, errno.EIO, persistent=True)
    with pytest.raises(
        offload.GradientError, match=r"parameter 2\.weight cannot be read back; call zero_grad"
    ) as raised:
        model[2].weight.grad.norm()
    assert (raised.value.parameter, raised.value.errno) == ("2.weight", errno.EIO)
    for use in (lambda grad: grad.add_(1), lambda grad: grad.numpy(), repr):
        with pytest.raises(offload.GradientError):
            use(model[2].weight.grad)
    with pytest.raises((offload.GradientError, offload.OptimizerStateError)):
        on.handles[0].disable()
    inject_fault(store, "read", kind, 0)
    assert_equal(go_on(model, optimizer), go_on(*prepared(False, tmp_path)[:2]))
    on.off()


def test_a_gradient_that_cannot_be_read_in_the_step_can_be_computed_again(tmp_path, monkeypatch):
    from offload.optimizer_state.stored_gradient import StoredGradient

    model, optimizer, on = prepared(True, tmp_path)
    before = everything(model, optimizer)
    with monkeypatch.context() as patch:

        def failing(self, stored, param):
            raise offload.GradientError(errno.EIO, "it cannot be read")

        patch.setattr(StoredGradient, "_filled", failing)
        with pytest.raises(offload.GradientError):
            optimizer.step()
    assert_equal(everything(model, optimizer), before)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    assert_equal(go_on(model, optimizer), go_on(*prepared(False, tmp_path)[:2]))
    on.off()


def test_an_exception_between_backward_and_step(tmp_path):
    """A backward pass that fails half-way, and one that is given up."""

    def run(is_moved):
        model, optimizer, on = prepared(is_moved, tmp_path)

        def fail(gradient):
            raise ValueError("of the caller")

        handle = model[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="of the caller"):
            loss_of(model, 7).backward()
        handle.remove()
        found = gradients(model)
        loss_of(model, 8).backward()
        found += gradients(model)
        found.append(go_on(model, optimizer))
        on.off()
        return found

    assert_equal(run(True), run(False))


CALLS = {
    "backward": lambda model, optimizer, on: loss_of(model, 9).backward(),
    "clip": lambda model, optimizer, on: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "step": lambda model, optimizer, on: optimizer.step(),
    "disable": lambda model, optimizer, on: on.handles[0].disable(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stride", [5 * PRIME, pytest.param(PRIME, marks=pytest.mark.full)])
def test_an_interrupt_at_any_line(call, stride, tmp_path):
    """Each gradient is afterwards as before the call or as after it."""
    model, optimizer, on = prepared(False, tmp_path)
    before = gradients(model)
    if call != "disable":
        CALLS[call](model, optimizer, on)
    after = gradients(model)
    number, interrupted = 1, 0
    while number is not None:
        model, optimizer, on = prepared(True, tmp_path)
        trace = Interrupt(number)
        sys.settrace(trace.calls)
        try:
            CALLS[call](model, optimizer, on)
            number = None
        except KeyboardInterrupt:
            interrupted += 1
            number += stride
        finally:
            sys.settrace(None)
            torch.set_grad_enabled(True)
        for was, will_be, found in zip(before, after, gradients(model), strict=True):
            assert torch.equal(found, was) or torch.equal(found, will_be), (number, interrupted)
        on.off()
    assert interrupted > 2
