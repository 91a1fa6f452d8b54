"""Models of which everything is dropped that has a recipe: gradients, buffers and random numbers as without."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from some_rows import one_in

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
import models
from forced import gradients


def step_of(family, size, autocast):
    def step(model, number):
        x, y = models.batch_of(family, size, seed=0, step=number, device="cpu", dtype=torch.float32)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = models.loss_of(model(x), y)
        loss.backward()
        return [loss.detach(), *gradients(model), *(each.clone() for each in model.buffers())]

    return step


@pytest.mark.parametrize("swaps", [False, True], ids=["kept", "swapped"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("family", one_in(2, models.FAMILIES))
def test_families(forcing, family, autocast, swaps):
    size = models.FAMILIES[family].tiny

    def make():
        return models.build(family, size, seed=0, device="cpu", dtype=torch.float32)

    step = step_of(family, size, autocast)
    if family == "lstm" and autocast:
        try:
            step(make(), 0)
        except RuntimeError as error:  # a processor without AVX-512 has no kernel for an LSTM in bfloat16
            pytest.skip(f"torch itself cannot do it here: {error}")
    forcing.compare(make, step, swaps=swaps)
