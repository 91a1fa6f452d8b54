"""A gradient that is read before its copy-out has ended leaves again as soon as it has, however slow the disk is."""

import pytest
import torch
from torch import nn

import offload
from offload.optimizer_state import gradients_in_step
from offload.optimizer_state.gradient_mover import GradientMover

NBYTES = 4 << 20  # of the only gradient


@pytest.fixture
def accumulated(tmp_path, monkeypatch):
    """Model, handle and optimizer after two backward passes, the second during the copy-out of the first."""
    monkeypatch.setenv("OFFLOAD_THROTTLE", "20MB/s")  # 0.2 s for the gradient; a backward pass takes less
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload.enable(
        model, n_tensors=0, optimizer=optimizer, optimizer_state=True, gradients=True, spill_dir=tmp_path
    ) as handle:
        for _ in range(2):
            model(torch.ones(1, 1024)).sum().backward()
        yield model, handle, optimizer


def moved(handle):
    return handle.report().gradients[0]


def test_it_leaves_in_the_next_backward_pass(accumulated):
    model, handle, optimizer = accumulated
    assert moved(handle).out_bytes == NBYTES  # the second copy-out has to wait for the first
    optimizer.state.engine.drain()
    model(torch.ones(1, 1024)).sum().backward()
    assert moved(handle).out_bytes == 2 * NBYTES
    optimizer.step()
    assert moved(handle).out_bytes == 2 * NBYTES
    assert torch.equal(model.weight.grad, torch.full((1024, 1024), 3.0))
    assert moved(handle).held == 0


def test_it_leaves_before_the_next_step(accumulated):
    _, handle, optimizer = accumulated
    optimizer.state.engine.drain()
    optimizer.step()
    assert moved(handle).out_bytes == 2 * NBYTES


def test_it_is_counted_while_its_copy_out_delays_the_next(accumulated):
    model, handle, optimizer = accumulated
    optimizer.step()
    assert (moved(handle).tensors, moved(handle).nbytes) == (1, NBYTES)
    assert torch.equal(model.weight.grad, torch.full((1024, 1024), 2.0))
    assert moved(handle).held == 0


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
