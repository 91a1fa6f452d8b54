"""Tensors that change before backward: what plain torch raises is raised, what it lets change may change."""

import threading
from functools import partial

import pytest
import torch
from forced import Calls, gradients, made, plain_step, silu_twice
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from offload.profiling.model_state import HeldMemory


def both_raise(forcing, make, spoil):
    plain, dropping = make(), make()
    dropping.load_state_dict(plain.state_dict())
    handle = forcing.enable(dropping)
    for _ in range(3):
        plain_step(dropping, 0)
    said = []
    for model in (plain, dropping):
        torch.manual_seed(5)
        loss = model(torch.randn(32, 64)).square().mean()
        spoil(model)
        try:
            loss.backward()
        except RuntimeError as error:  # whose traceback would keep the graph
            said.append(str(error).partition("[")[0])
        del loss
    assert len(said) == 2
    assert "modified by an inplace operation" in said[0]
    assert said[0] == said[1]
    assert handle._counts.recomputed.tensors > 0


def test_a_source_changed_later_raises_as_ever(forcing):
    class Keeping(Calls):
        def forward(self, x):
            self.h = self.a(x)
            return self.b(silu_twice(self.h))

    def spoil(model):
        with torch.no_grad():
            model.h.add_(1)

    both_raise(forcing, lambda: Keeping(None), spoil)


def test_a_dropped_tensor_changed_later_raises_as_ever(forcing):
    class Keeping(Calls):
        def forward(self, x):
            self.h = functional.gelu(self.a(x))
            return self.b(self.h)

    def spoil(model):
        with torch.no_grad():
            model.h.add_(1)

    both_raise(forcing, lambda: Keeping(None), spoil)


def test_a_weight_used_without_gradients_may_change(forcing):
    """Autograd saves no factor of such a product, whatever its other factor was computed from."""

    class Fixed(Calls):
        def __init__(self):
            super().__init__(None)
            self.w, self.scale = nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.ones(256))

        def forward(self, x):
            h = functional.gelu(self.a(x))
            with torch.no_grad():
                fixed = h @ self.w
            return self.b(functional.silu(functional.gelu(fixed.sin() * self.scale)))

    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        with torch.no_grad():
            model.w.add_(0.1)
        loss.backward()
        return gradients(model)

    forcing.compare(Fixed, step)


def test_a_parameter_changed_before_backward_raises_as_ever(forcing):
    def spoil(model):
        with torch.no_grad():
            model.b.weight.add_(1)

    both_raise(forcing, made(), spoil)


def test_what_plain_torch_lets_change(forcing):
    """A bias that autograd does not save, and a scale that it has taken a copy of."""

    class Biased(Calls):
        def __init__(self):
            super().__init__(None)
            self.bias = nn.Parameter(torch.ones(256))
            self.register_buffer("shift", torch.ones(256))

        def forward(self, x):
            return self.b(functional.silu(functional.gelu(self.a(x)) + self.bias + self.shift))

    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        with torch.no_grad():
            model.bias.add_(0.5)
            model.shift.mul_(2)
        loss.backward()
        return gradients(model)

    forcing.compare(Biased, step)


def test_a_source_changed_later_is_never_read(forcing):
    """Even where autograd does not ask for the source itself, and so would not notice."""

    class Keeping(Calls):
        def forward(self, x):
            self.h = self.a(x)
            return self.b(functional.gelu(self.h))

    model = Keeping(None)
    handle = forcing.enable(model, wanted=lambda index, recipe: not recipe.is_heavy)
    for number in range(3):
        plain_step(model, number)
    loss = model(torch.randn(32, 64)).square().mean()
    with torch.no_grad():
        model.h.add_(1)
    try:
        torch.autograd.grad(loss, [model.b.weight])
    except RuntimeError as error:
        said = str(error)
    else:
        said = ""
    del loss, model.h
    assert "modified by an inplace operation" in said
    assert handle._counts.recomputed.tensors > 0


def test_a_buffer_that_changes_within_forward(forcing):
    class Counting(Calls):
        steps = 0

        def __init__(self):
            super().__init__(None)
            self.register_buffer("count", torch.zeros(256))

        def forward(self, x):
            self.steps += 1
            h = functional.gelu(self.a(x)) + self.count
            if self.steps > 3:
                self.count.add_(1)
            return self.b(functional.silu(functional.gelu(h * 2)))

    forcing.compare(Counting, plain_step)


def test_changes_by_another_thread(forcing):
    class Threaded(Calls):
        steps = 0

        def forward(self, x):
            self.steps += 1
            h = functional.gelu(self.a(x)) * 2

            def change():
                with torch.no_grad():
                    h.add_(1)

            if self.steps > 3:
                thread = threading.Thread(target=change)
                thread.start()
                thread.join()
            return self.b(functional.silu(h + 1))

    forcing.compare(lambda: Threaded(None), plain_step)


def test_a_small_tensor_that_changes_before_backward(forcing):
    class Shifted(Calls):
        def __init__(self):
            super().__init__(None)
            self.offset = torch.ones(32, 1)

        def forward(self, x):
            return self.b(functional.silu(functional.gelu(self.a(x)) + self.offset))

    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        model.offset.add_(3)
        loss.backward()
        return gradients(model)

    forcing.compare(Shifted, step)


@pytest.mark.parametrize("change", ["in place", "data", "numpy"])
def test_a_tensor_below_the_least_that_swaps_changes_before_backward(forcing, change):
    """Of 100 KiB: nobody saves it, so plain torch need not notice."""

    class Shifted(Calls):
        def __init__(self):
            super().__init__(None)
            self.offset = torch.ones(1, 100 * 256)

        def forward(self, x):
            return self.b(functional.silu(functional.gelu(self.a(x)).view(-1, 100 * 256) + self.offset).view(-1, 256))

    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(1000, 64)).square().mean()
        if change == "in place":
            model.offset.add_(3)
        elif change == "data":
            model.offset.data.add_(3)
        else:
            model.offset.numpy()[:] += 3
        loss.backward()
        return gradients(model)

    forcing.compare(Shifted, step, min_tensor_bytes=1 << 18)


def test_settings_of_torch_are_those_of_forward(forcing):
    def step(model, number):
        model.zero_grad()
        with torch.backends.mkldnn.flags(enabled=False):
            loss = model(torch.randn(4, 3, 16, 16)).square().mean()
        loss.backward()
        assert torch.backends.mkldnn.enabled
        return gradients(model)

    def convolutions():
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.SiLU(), nn.Conv2d(16, 4, 3))

    forcing.compare(convolutions, step)


def test_denormal_numbers_are_flushed_as_in_forward(forcing):
    """Torch has no getter of this setting of a thread."""

    def step(model, number):
        model.zero_grad()
        torch.set_flush_denormal(True)
        try:
            loss = (model(torch.randn(32, 64)) * 1e-30).square().mean()
        finally:
            torch.set_flush_denormal(False)
        loss.backward()
        assert torch.tensor([1e-45]).mul(1).item() != 0.0
        return gradients(model)

    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormal numbers")
    forcing.compare(made(lambda h: functional.silu(functional.gelu(h * 1e-30) * 1e-10) * 1e38), step)


def right_side(h, weight):
    return torch.linalg.solve_triangular(h.sum(0)[:64].diag() * 0.01 + torch.eye(64), weight, upper=True)


@pytest.mark.parametrize(
    "product",
    [
        lambda h, weight: torch.addmm(h[:, :64] * 2, torch.ones(512, 64), weight),
        lambda h, weight: torch.addr(weight, h.sum(0)[:64], h.sum(0)[:64]),
        right_side,
    ],
    ids=["addmm", "addr", "solve_triangular"],
)
def test_a_weight_of_which_autograd_needs_no_gradient_may_change(forcing, product):
    """The other arguments have a history, and autograd does not save this one for their gradients."""

    class Product(Calls):
        def __init__(self):
            super().__init__(None)
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return torch.tanh(functional.silu(product(self.a(x), self.weight)))

    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(512, 64, requires_grad=True)).square().mean()
        with torch.no_grad():
            model.weight.add_(0.1)
        loss.backward()
        return gradients(model)

    forcing.compare(Product, step)


def hooked(function, x):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        return function(x)


@pytest.mark.parametrize("within", [partial(checkpoint, use_reentrant=False), hooked], ids=["checkpoint", "hooks"])
def test_a_weight_that_other_hooks_save_may_change(forcing, within):
    class Within(Calls):
        def forward(self, x):
            h = self.a(x)
            return torch.tanh(functional.silu(within(self.function, h)))

    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(512, 64, requires_grad=True)).square().mean()
        with torch.no_grad():
            model.function.weight.add_(0.1)
        loss.backward()
        return gradients(model)

    forcing.compare(lambda: Within(nn.Linear(256, 64)), step)


class Adversaries(nn.Module):
    """A generator, and a discriminator that sees its result with and without history."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 256))
        self.discriminator = nn.Sequential(nn.Linear(256, 128), nn.SiLU(), nn.Linear(128, 1))

    def forward(self, x):
        made = self.generator(x)
        return -self.discriminator(made).mean(), self.discriminator(made.detach()).mean()


def test_an_optimizer_steps_while_recipes_still_read_its_parameters(forcing):
    """One backward has freed the graph that checked the parameters; what the other one needs is recomputed before."""
    held = []

    def step(model, number):
        if model not in held and forcing.handles[-1]._on_device.model is model:
            here = forcing.handles[-1]._on_device
            here.held = HeldMemory(here.state, here.engine)  # `n_tensors` needs none
            held.append(model)
        model.zero_grad()
        optimizer = torch.optim.SGD(model.generator.parameters(), lr=0.1)
        first, second = model(torch.randn(32, 64))
        first.backward()
        optimizer.step()
        second.backward(retain_graph=True)
        second.backward()
        return gradients(model)

    forcing.compare(Adversaries, step)
    assert held


def test_a_large_bias_that_changes_before_backward(forcing):
    """Autograd does not save it, though it saves the other arguments."""

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 20000)
            self.b = nn.Linear(20000, 4)

        def forward(self, x):
            return self.b(torch.tanh(functional.gelu(self.a(x))))

    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(32, 16, requires_grad=True) * 2).square().mean()
        with torch.no_grad():
            model.a.bias.add_(0.1)
        loss.backward()
        return gradients(model)

    forcing.compare(Biased, step)
