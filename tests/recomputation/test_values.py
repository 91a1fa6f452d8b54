"""What a recipe computes: random numbers, casts, changes in place, scalars, and which operators it may not trust."""

import pytest
import torch
from forced import Calls, gradients, made, plain_step, silu_twice
from torch import nn
from torch.nn import functional

from offload.recomputation import slicing


def test_random_numbers_are_drawn_again(forcing):
    def function(h):
        return functional.dropout(functional.gelu(functional.dropout(h, 0.3)), 0.2) * torch.rand_like(h)

    forcing.compare(made(function), plain_step)


def test_random_numbers_of_a_generator_of_its_own(forcing):
    def step(model, number):
        generator = torch.Generator().manual_seed(number)
        model.function = lambda h: functional.gelu(h + torch.rand(h.shape, generator=generator))
        return [*plain_step(model, number), generator.get_state()]

    forcing.compare(made(None), step)


@pytest.mark.parametrize("draw", [torch.poisson, lambda h, g: torch.binomial(h, h.new_full((), 0.5), generator=g)])
def test_a_generator_that_an_operator_takes_by_position(forcing, draw):
    """It outlives the step: the trial, too, must leave it as without offload."""
    generators = {}

    def step(model, number):
        generator = generators.setdefault(model, torch.Generator().manual_seed(0))
        model.function = lambda h: functional.gelu(h * draw(h.detach().abs().round() + 1, generator))
        model.zero_grad()
        model(torch.randn(512, 64, requires_grad=True)).square().mean().backward()
        return [*gradients(model), generator.get_state()]

    forcing.compare(made(None), step)


def test_casts_of_autocast_are_operators(forcing):
    def step(model, number):
        with torch.autocast("cpu", torch.bfloat16):
            return plain_step(model, number)

    forcing.compare(made(), step)


def test_backward_within_autocast(forcing):
    def function(h):
        with torch.autocast("cpu", enabled=False):
            return silu_twice(h.float()) @ torch.ones(256, 256).tril()  # in half precision, were it cast

    def step(model, number):
        with torch.autocast("cpu", torch.bfloat16):  # also around the operators that are run again
            return plain_step(model, number)

    forcing.compare(made(function), step)


def test_random_numbers_in_a_batched_backward(forcing):
    """Torch refuses random operators there. Those of a recipe are no part of the backward pass."""

    def function(h):
        return silu_twice(functional.dropout(h, 0.3))

    def step(model, number):
        x = torch.randn(32, 64, requires_grad=True)
        return torch.autograd.grad(model(x).mean(0)[:3], x, torch.eye(3), is_grads_batched=True)

    forcing.compare(made(function), step)


def test_chains_of_changes_in_place(forcing):
    def function(h):
        h = h.relu_()
        h = h * torch.sigmoid(h)
        h = (h + 1).mul_(2)
        h[:, :7].add_(3)
        return h.sigmoid_()

    forcing.compare(made(function), plain_step)


def test_bytes_that_changed_while_they_were_copied(forcing):
    """A tensor that autograd saves and never asks for may be changed: what is copied of it is no source."""

    class Aside(Calls):
        def forward(self, x):
            h = functional.gelu(self.a(x)) * 2
            self.aside = h.sin()  # saves h
            out = functional.silu(h + 1)
            with torch.no_grad():
                h.exp_()
            return self.b(out)

    def step(model, number):
        found = plain_step(model, number)
        model.aside = None
        return found

    forcing.compare(lambda: Aside(None), step, swaps=True, wanted=lambda index, recipe: not recipe.is_heavy)


def test_running_statistics_are_updated_once(forcing):
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3)

        def forward(self, x):
            return self.b(functional.silu(self.norm(functional.gelu(self.a(x)))))

    def step(model, number):
        model.zero_grad()
        model(torch.randn(4, 3, 16, 16)).square().mean().backward()
        return [*gradients(model), *(each.clone() for each in model.buffers())]

    handle = forcing.compare(Normalized, step)
    assert "aten.native_batch_norm.default" in forcing.operators(handle)


def test_statistics_that_are_only_read(forcing):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3)

        def forward(self, x):
            self.norm.eval()
            return self.b(functional.silu(self.norm(functional.gelu(self.a(x)))))

    def step(model, number):
        model.zero_grad()
        model(torch.randn(4, 3, 16, 16)).square().mean().backward()
        return gradients(model)

    forcing.compare(Frozen, step)


def test_a_scalar_that_changes_every_step(forcing):
    class Scaled(Calls):
        count = 0

        def forward(self, x):
            self.count += 1
            return self.b(functional.gelu(self.a(x)) * self.count)

    forcing.compare(lambda: Scaled(None), plain_step)


def test_branches_that_data_decide(forcing):
    def function(h):
        return silu_twice(h) if h.sum().item() > 0 else torch.tanh(functional.gelu(h) * 3)

    forcing.compare(made(function), plain_step, steps=12)


def test_views_share_one_storage(forcing):
    def function(h):
        made = functional.gelu(h)
        left, right = made.chunk(2, 1)
        return torch.cat((left * right, left.t().contiguous().t() * right.sigmoid()), 1)

    forcing.compare(made(function), plain_step)


def test_several_results_of_one_operator(forcing):
    def function(h):
        values, indices = h.sort(1)
        return functional.silu(values) * functional.layer_norm(values, values.shape[1:]) + indices

    forcing.compare(made(function), plain_step)


def test_bytes_written_behind_torchs_back(forcing):
    def function(h):
        h = functional.gelu(h)
        h.detach().numpy()[:] *= 2
        return h

    handle = forcing.compare(made(function), plain_step, recomputes=None)
    assert "its bytes came out differently" in forcing.refused(handle)


def test_blank_memory_is_no_source(forcing):
    def function(h):
        blank = torch.empty(h.shape)
        blank.numpy()[:] = 3
        return functional.silu(h + blank)

    handle = forcing.compare(made(function), plain_step, recomputes=None)
    assert "written by a kernel that recording does not see" in forcing.refused(handle)


def test_operators_that_add_up_in_any_order(forcing):
    def function(h):
        index = torch.arange(32).flip(0)
        return functional.silu(torch.zeros(h.shape).index_add(0, index, h))

    handle = forcing.compare(made(function), plain_step, recomputes=None)
    assert "made by index_add, which may not repeat itself" in forcing.refused(handle)


def test_convolutions_whose_kernel_is_chosen_by_timing(forcing, monkeypatch):
    def convolutions():
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.SiLU(), nn.Conv2d(16, 4, 3))

    def step(model, number):
        model.zero_grad()
        model(torch.randn(4, 3, 16, 16)).square().mean().backward()
        return gradients(model)

    assert "aten.convolution.default" in forcing.operators(forcing.compare(convolutions, step))
    monkeypatch.setattr(slicing, "may_choose_otherwise", lambda: True)
    handle = forcing.compare(convolutions, step)
    assert "aten.convolution.default" not in forcing.operators(handle)
    assert any("cudnn.benchmark may choose another kernel" in text for text in forcing.refused(handle))


def test_operators_of_others(forcing):
    @torch.library.custom_op("recomputed::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        double.calls += 1
        return x * 2

    double.calls = 0
    double.register_autograd(lambda context, grad: grad * 2)
    handle = forcing.compare(made(lambda h: functional.silu(double(h))), plain_step, recomputes=None)
    assert "made by recomputed::double, which is not torch's own" in forcing.refused(handle)
    assert double.calls == 12  # six steps, each with and without


def test_tensors_that_are_no_plain_ones(forcing):
    def function(h):
        masked = torch.func.vmap(lambda row: row.sigmoid() * row)(h)
        return silu_twice(masked) + (h.to_sparse() * 2).to_dense()

    forcing.compare(made(function), plain_step)
