"""Optimizers of other models that step between a model's forward and its backward, as in a GAN."""

import pytest
import torch
from torch import nn

import offload
from offload.control.controller import PlanController
from offload.profiling import model_state

MIB = 1 << 20
LIMIT = 4 * MIB
WIDTH, ROWS = 64, 128


class NeedsMemory(torch.autograd.Function):
    """The identity. Its backward makes a temporary of 8 MiB."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        assert len(ctx.saved_tensors) == 1
        return gradient + 0 * gradient.repeat(1, 8 * MIB // gradient.nbytes)[:, :WIDTH]


def layers():
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = layers(), layers()

    def forward(self, x):
        return self.second(NeedsMemory.apply(self.first(x)))


def train(generator, steps, kind=torch.optim.Adam, width=WIDTH):
    """A GAN's loop, in which the generator's one forward serves both."""
    critic = nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, 1))
    own, other = kind(generator.parameters()), kind(critic.parameters())
    for _ in range(steps):
        made = generator(torch.randn(ROWS, WIDTH))
        other.zero_grad()
        critic(made.detach()).mean().backward()
        other.step()
        own.zero_grad()
        critic(made).mean().backward()
        own.step()


@pytest.mark.parametrize("is_guarded", [True, False])
def test_what_backward_needs_after_another_optimizers_step_is_known(is_guarded, monkeypatch):
    if not is_guarded:  # every optimizer's step ends the profile
        monkeypatch.setattr(PlanController, "end_finished_profiles", PlanController.end_profiles)
    generator = Generator()
    with offload.enable(generator, memory_limit=LIMIT, min_tensor_bytes=1 << 12) as handle:
        if is_guarded:
            with pytest.raises(offload.InfeasibleLimitError) as refused:
                train(generator, 6)
            assert refused.value.least_limit_bytes > 8 * MIB
        else:
            train(generator, 6)
            assert handle.plan.peak_bytes < LIMIT


@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_other_optimizers_state_is_no_memory_of_the_step(is_guarded, monkeypatch):
    """Adam makes it in the profiled step; from then on it exists before each step. SGD makes none."""
    if not is_guarded:
        monkeypatch.setattr(model_state, "mark_apart", lambda **_: None)
    least = []
    for kind in (torch.optim.Adam, torch.optim.SGD):
        generator = nn.Sequential(layers(), layers())
        with offload.enable(generator, memory_limit="64MiB", min_tensor_bytes=1 << 12) as handle:
            train(generator, 1, kind, width=4096)
            least.append(handle.trace().base_bytes)
    assert (least[0] == least[1]) is is_guarded, "in every node, that of the step included"
