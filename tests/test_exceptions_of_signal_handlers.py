"""An OSError that a signal handler raises during a copy-out reaches the program: the store's own errors do not."""

import pytest
import torch
from torch import nn

import offload
from offload import _core
from offload.runtime.engine import Engine

SITES = {
    "a saved tensor": {"n_tensors": -1},
    "optimizer state": {"optimizer_state": True},
    "a gradient": {"gradients": True, "optimizer_state": True},
    "a frozen parameter": {"parameters": "frozen"},
    "a trained parameter": {"parameters": "all"},
}


def train(options, folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad])
    moved = {"optimizer": optimizer} if "optimizer_state" in options else {}
    with offload.enable(model, min_tensor_bytes=1024, spill_dir=folder, **moved, **options):
        for _ in range(3):
            model(torch.ones(64, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("site", SITES)
def test_a_time_limit_that_ends_a_copy_out_reaches_the_program(site, tmp_path, monkeypatch):
    expected = train(SITES[site], tmp_path)
    asked = []

    def fail_with(error):
        def swap_out(self, *args, **kwargs):
            asked.append(1)
            raise error

        monkeypatch.setattr(Engine, "swap_out", swap_out)

    fail_with(TimeoutError("time is up"))
    with pytest.raises(TimeoutError, match="time is up"):
        train(SITES[site], tmp_path)
    for error in (offload.PoolExhausted("full"), offload.SpillError(28, "full"), _core.PinningFailed("refused")):
        fail_with(error)
        asked.clear()
        assert all(map(torch.equal, train(SITES[site], tmp_path), expected)), "what cannot leave stays"
        assert asked
