"""Inputs that only the graph holds, on the simulated accelerator: they count once, with all of their storage."""

import pytest
import torch
from torch import nn

import offload

ROWS, WIDTH = 2048, 256
BYTES = ROWS * WIDTH * 4


class Layers(nn.Sequential):
    def __init__(self):
        super().__init__(*[each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.to("sim")


def named(model):
    x = torch.ones(ROWS, WIDTH, device="sim")
    loss = model(x).square().mean()
    loss.x = x  # as a variable of the training loop would hold it
    return loss


def inline(model):
    return model(torch.ones(ROWS, WIDTH, device="sim")).square().mean()


def sliced(model):
    return model(torch.ones(2 * ROWS, WIDTH, device="sim")[:ROWS]).square().mean()


def base_bytes(step):
    model = Layers()
    with offload.enable(model, memory_limit="1GiB", min_tensor_bytes=1 << 16) as handle:
        for _ in range(2):
            step(model).backward()
            model.zero_grad()
            torch.sim.synchronize()
        return handle.trace().base_bytes[0]


@pytest.mark.parametrize("step", [inline, sliced])
def test_they_are_subtracted_from_what_is_in_memory_before_the_step(step):
    assert base_bytes(step) == base_bytes(named) - BYTES
