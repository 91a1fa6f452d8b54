"""A gradient that is read before its copy-out has ended leaves again as soon as it has, however slow the disk is."""

import pytest
import torch
from torch import nn

import offload
from offload.optimizer_state import gradient_mover, gradients_in_step, stored_gradient
from offload.optimizer_state.gradient_mover import GradientMover
from offload.runtime.engine import Engine

NBYTES = 4 << 20  # of the only gradient


class SlowDisk:
    """The first copy-out seems not to have ended until `end` is called."""

    def __init__(self, monkeypatch):
        self.is_writing = False
        alone, in_flight = gradient_mover.holds_alone, Engine.in_flight_bytes.__get__
        for module in (gradient_mover, stored_gradient):
            monkeypatch.setattr(module, "holds_alone", lambda tensor: not self.is_writing and alone(tensor))
        monkeypatch.setattr(
            Engine, "in_flight_bytes", property(lambda engine: NBYTES if self.is_writing else in_flight(engine))
        )

    def end(self):
        self.is_writing = False


@pytest.fixture
def accumulated(tmp_path, monkeypatch):
    """Model, handle, optimizer and disk after two backward passes, the second during the copy-out of the first."""
    torch.manual_seed(0)
    disk = SlowDisk(monkeypatch)
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload.enable(
        model, n_tensors=0, optimizer=optimizer, optimizer_state=True, gradients=True, spill_dir=tmp_path
    ) as handle:
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.state.engine.drain()
        disk.is_writing = True
        model(torch.ones(1, 1024)).sum().backward()
        yield model, handle, optimizer, disk


def moved(handle):
    return handle.report().gradients[0]


def test_it_leaves_in_the_next_backward_pass(accumulated):
    model, handle, optimizer, disk = accumulated
    assert moved(handle).out_bytes == NBYTES  # the second copy-out has to wait for the first
    disk.end()
    model(torch.ones(1, 1024)).sum().backward()
    assert moved(handle).out_bytes == 2 * NBYTES
    optimizer.step()
    assert moved(handle).out_bytes == 2 * NBYTES
    assert torch.equal(model.weight.grad, torch.full((1024, 1024), 3.0))
    assert moved(handle).held == 0


def test_it_leaves_before_the_next_step(accumulated):
    _, handle, optimizer, disk = accumulated
    disk.end()
    optimizer.step()
    assert moved(handle).out_bytes == 2 * NBYTES


def test_it_is_counted_while_its_copy_out_delays_the_next(accumulated):
    model, handle, optimizer, _ = accumulated
    optimizer.step()
    assert (moved(handle).tensors, moved(handle).nbytes) == (1, NBYTES)
    assert torch.equal(model.weight.grad, torch.full((1024, 1024), 2.0))
    assert moved(handle).held == 0


def test_clipping_leaves_it_a_gradient_that_leaves(accumulated):
    model, handle, optimizer, _ = accumulated
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    expected = nn.Parameter(torch.zeros(1024, 1024))
    expected.grad = torch.full((1024, 1024), 2.0)
    assert torch.equal(norm, nn.utils.clip_grad_norm_([expected], 1.0))
    assert torch.equal(model.weight.grad, expected.grad)
    optimizer.step()
    assert (moved(handle).tensors, moved(handle).brought, moved(handle).held) == (1, 0, 0)


def test_it_stays_once_the_program_has_its_address(accumulated):
    model, handle, optimizer, disk = accumulated
    address = model.weight.grad.data_ptr()
    disk.end()
    optimizer.step()
    assert model.weight.grad.data_ptr() == address
    assert moved(handle).out_bytes == NBYTES


def test_one_whose_address_is_known_leaves_without_the_guard(accumulated, monkeypatch):
    """A mutant."""
    monkeypatch.setattr(gradient_mover, "_was_left_alone", lambda reference: True)
    with pytest.raises(AssertionError):
        test_it_stays_once_the_program_has_its_address(accumulated)


def test_without_another_try_it_stays(request, monkeypatch):
    """A mutant."""
    leave = GradientMover._leave
    monkeypatch.setattr(GradientMover, "_leave", lambda self, param: leave(self, param) or True)
    with pytest.raises(AssertionError):
        test_it_leaves_before_the_next_step(request.getfixturevalue("accumulated"))


def test_a_count_of_what_is_away_depends_on_the_disk(accumulated, monkeypatch):
    """A mutant."""
    monkeypatch.setattr(gradients_in_step, "nbytes_moved", gradients_in_step.nbytes_of)
    with pytest.raises(AssertionError):
        test_it_is_counted_while_its_copy_out_delays_the_next(accumulated)


def test_a_gradient_that_other_code_holds_is_not_counted_as_moved(accumulated):
    model, handle, optimizer, disk = accumulated
    disk.end()
    held = []
    model.weight.register_post_accumulate_grad_hook(lambda param: held.append(param.grad.view(-1)))
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    assert moved(handle).tensors == 0
    assert moved(handle).held == 1


def test_a_view_of_one_that_is_clipped(accumulated):
    """Clipping multiplies the gradient where it is, and the program writes through its view after that."""
    model, _, optimizer, disk = accumulated
    view = model.weight.grad.view(-1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    view.add_(1.0)
    disk.end()
    expected = nn.Parameter(torch.zeros(1024, 1024))
    expected.grad = torch.full((1024, 1024), 2.0)
    nn.utils.clip_grad_norm_([expected], 1.0)
    assert torch.equal(model.weight.grad, expected.grad + 1.0)
    optimizer.step()
    assert torch.equal(view.view(1024, 1024), expected.grad + 1.0)


LAYERS = 12


def tries(tmp_path, monkeypatch):
    """How often each of several backward passes tries to move a gradient out while no copy-out ends."""
    found, leave = [0], GradientMover._leave

    def counted(self, param):
        found[-1] += 1
        return leave(self, param)

    monkeypatch.setattr(GradientMover, "_leave", counted)
    disk = SlowDisk(monkeypatch)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    knobs = {"n_tensors": 0, "min_tensor_bytes": 1024, "spill_dir": tmp_path}
    with offload.enable(model, optimizer=optimizer, optimizer_state=True, gradients=True, **knobs):
        for _ in range(4):
            model(torch.ones(1, 64)).sum().backward()
            disk.is_writing = True
            found.append(0)
    return found[:-1]


def test_each_backward_pass_tries_each_gradient_twice_at_most(tmp_path, monkeypatch):
    assert max(tries(tmp_path, monkeypatch)) <= 2 * LAYERS


def test_delayed_gradients_would_be_tried_for_each_gradient(tmp_path, monkeypatch):
    """A mutant."""
    monkeypatch.setattr(GradientMover, "leave", GradientMover._leave_late)
    with pytest.raises((AssertionError, RecursionError)):
        test_each_backward_pass_tries_each_gradient_twice_at_most(tmp_path, monkeypatch)
