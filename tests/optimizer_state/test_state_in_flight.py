"""State that comes back before it has been written leaves again after its update, however slow the disk is."""

import pytest
import torch
from torch import nn

import offload
from offload.optimizer_state import mover
from offload.runtime.engine import Engine

STEPS = 4


def moved_tensors(folder, monkeypatch):
    """After each step, how many tensors have left or are leaving, and how many stay."""
    monkeypatch.setenv("OFFLOAD_THROTTLE", "20MB/s")  # 0.2 s for a tensor, and the step takes less
    monkeypatch.setattr(mover, "BEHIND_BYTES", 64 << 20)  # so that a step ends before its state is written
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    with offload.enable(model, n_tensors=0, optimizer=optimizer, optimizer_state=True, spill_dir=folder) as handle:
        for _ in range(STEPS):
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            counts = handle.report().optimizer_state[0]
            found.append((counts.tensors, counts.held))
    return found


def test_what_comes_back_during_its_copy_out_leaves_again(tmp_path, monkeypatch):
    assert moved_tensors(tmp_path, monkeypatch) == [(2, 0)] * STEPS


def test_without_waiting_for_the_copy_out_it_stays(tmp_path, monkeypatch):
    """A mutant."""
    monkeypatch.setattr(Engine, "drain", lambda self: None)
    with pytest.raises(AssertionError):
        test_what_comes_back_during_its_copy_out_leaves_again(tmp_path, monkeypatch)
