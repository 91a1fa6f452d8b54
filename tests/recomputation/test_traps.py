"""What recomputation can get wrong, one test each: dropped tensors, and results as without the engine."""

import threading

import pytest
import torch
from forced import Calls, gradients
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def plain_step(model, number, width=64):
    model.zero_grad()
    model(torch.randn(32, width)).square().mean().backward()
    return gradients(model)


def silu_twice(h):
    return functional.silu(functional.gelu(h) * torch.sigmoid(h))


def made(function=silu_twice):
    return lambda: Calls(function)


# -- values ------------------------------------------------------------------------------------------------------------


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


# -- what may not be trusted -------------------------------------------------------------------------------------------


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


# -- changed before backward -------------------------------------------------------------------------------------------


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


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_a_retained_graph(forcing):
    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    forcing.compare(made(), step)


def test_double_backward(forcing):
    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum((each * each).sum() for each in first).backward()
        return gradients(model)

    forcing.compare(made(), step)


def test_partial_backward(forcing):
    def step(model, number):
        loss = model(torch.randn(32, 64)).square().mean()
        late = torch.autograd.grad(loss, [model.b.weight], retain_graph=True)
        return [*late, *torch.autograd.grad(loss, [model.a.weight])]

    forcing.compare(made(), step)


def test_two_graphs_at_once(forcing):
    def step(model, number):
        model.zero_grad()
        first = model(torch.randn(32, 64)).square().mean()
        second = model(torch.randn(32, 64)).abs().mean()
        second.backward()
        first.backward()
        return gradients(model)

    forcing.compare(made(), step, steps=8)


def test_a_graph_without_backward(forcing):
    def step(model, number):
        model(torch.randn(32, 64)).square().mean()
        return plain_step(model, number)

    forcing.compare(made(), step)


def test_backward_in_another_thread(forcing):
    def step(model, number):
        model.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return gradients(model)

    forcing.compare(made(), step)


def test_forward_in_another_thread(forcing):
    def step(model, number):
        found = []

        def run():
            torch.manual_seed(number)
            found.extend(plain_step(model, number))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found

    forcing.compare(made(), step)


def test_checkpoints_inside_step_aside(forcing):
    def function(h):
        return checkpoint(silu_twice, h, use_reentrant=False) + functional.silu(functional.gelu(h))

    forcing.compare(made(function), plain_step)


def test_reentrant_checkpoints_inside(forcing):
    def function(h):
        return checkpoint(silu_twice, h, use_reentrant=True) + functional.silu(functional.gelu(h))

    forcing.compare(made(function), plain_step)


def test_hooks_of_modules_run_once(forcing):
    calls = []

    def make():
        model = Calls(silu_twice)
        model.a.register_forward_hook(lambda *args: calls.append(1) or None)
        return model

    forcing.compare(make, plain_step)
    assert len(calls) == 12


# -- the mode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_no_mode(forcing, kind):
    class Failing(Calls):
        fails = False

        def forward(self, x):
            h = functional.gelu(self.a(x))
            if self.fails:
                raise kind("on purpose")
            return self.b(functional.silu(h))

    model = Failing(None)
    handle = forcing.enable(model)
    for number in range(6):
        model.fails = number == 4
        if model.fails:
            with pytest.raises(kind, match="on purpose"):
                plain_step(model, number)
        else:
            plain_step(model, number)
        assert torch._C._len_torch_dispatch_stack() == 0
    assert handle._counts.recomputed.tensors > 0


def test_modes_of_others_come_and_go(forcing):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def function(h):
        with Passing():
            h = silu_twice(functional.gelu(h))
        return silu_twice(h)

    def step(model, number):
        with Passing():
            plain_step(model, number)
        return gradients(model)

    forcing.compare(made(function), step)


def test_a_window_that_ends_in_the_pack_of_a_conjugated_tensor(forcing):
    """The operator that packs it was called with the mode on, and goes on with another tensor."""

    def function(h):
        return torch.fft.ihfft(h).sin().abs().repeat(1, 2)[:, :256]

    def wanted(index, recipe):
        return any("fft" in name for name in recipe.operators)

    forcing.compare(made(function), plain_step, wanted=wanted)


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


@pytest.mark.parametrize("part", ["module", "function"])
def test_what_is_compiled_later_runs_as_without_recomputation(forcing, part):
    """A region of torch.compile ends with the dispatch keys that were there when it began."""

    def step(model, number):
        if number == 5 and part == "module":
            model.b.compile(backend="aot_eager")
        elif number == 5:
            model.function = torch.compile(silu_twice, backend="aot_eager")
        found = plain_step(model, number)
        assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python)
        return found

    forcing.compare(made(), step, steps=8)


def test_modes_that_are_taken_off_for_a_while(forcing):
    from torch.utils._python_dispatch import _disable_current_modes

    def function(h):
        with _disable_current_modes():
            h = silu_twice(h)
        return silu_twice(h)

    forcing.compare(made(function), plain_step)


def test_an_interrupt_leaves_gradients_on(forcing, monkeypatch):
    """A handler may raise at any line of Python: here within a recipe."""
    from offload.recomputation import recipe

    model = made()()
    handle = forcing.enable(model)
    for number in range(4):
        plain_step(model, number)
    assert handle._counts.recomputed.tensors

    def interrupted(self, storages):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recipe.Step, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plain_step(model, 4)
    assert torch.is_grad_enabled()
    plain_step(model, 5)


@pytest.mark.parametrize("swaps", [False, True], ids=["the rest is kept", "the rest swaps"])
def test_a_window_that_begins_at_a_tensor_saved_again(forcing, swaps):
    """The pack before is of a storage that is known, which the schedule may decide without Python."""

    def function(h):
        h = functional.gelu(h)
        return torch.tanh(h * h).sin().exp().sin()

    forcing.compare(made(function), plain_step, wanted=lambda index, recipe: index == 8, swaps=swaps)


def test_the_mode_loads_no_compiler(tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    script = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from forced import Calls, Forcing, gradients
import torch
from torch.nn import functional
model = Calls(lambda h: functional.silu(functional.gelu(h)))
handle = Forcing({str(tmp_path)!r}).enable(model)
for number in range(4):
    model(torch.randn(32, 64)).square().mean().backward()
assert handle._counts.recomputed.tensors > 0
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
