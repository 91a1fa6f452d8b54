"""The dispatch mode of recording: among others, beside the compiler, and gone after an exception."""

from contextlib import nullcontext

import pytest
import torch
from forced import Calls, gradients, made, plain_step, silu_twice
from torch.nn import functional


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


def test_a_mode_of_later_steps_that_changes_results(forcing):
    """A recipe runs without modes, so what was tried without this one is tried again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.ops.aten.gelu.default else result

    def step(model, number):
        model.zero_grad()
        with Doubling() if number > 4 else nullcontext():
            loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        return gradients(model)

    forcing.compare(made(), step, steps=10)


def test_a_window_that_ends_in_the_pack_of_a_conjugated_tensor(forcing):
    """The operator that packs it was called with the mode on, and goes on with another tensor."""

    def function(h):
        return torch.fft.ihfft(h).sin().abs().repeat(1, 2)[:, :256]

    def wanted(index, recipe):
        return any("fft" in name for name in recipe.operators)

    forcing.compare(made(function), plain_step, wanted=wanted)


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


@pytest.mark.parametrize("name", ["undisturbed", "restored"])
def test_an_interrupt_as_a_context_is_entered_leaves_gradients_on(forcing, monkeypatch, name):
    """A traceback holds the context, and may be freed after backward, in which gradients are off."""
    from offload.recomputation import recipe

    real, kept = getattr(recipe, name), []

    class Interrupted:
        def __init__(self):
            self.gen = real().gen
            kept.append(self)

        def __enter__(self):
            next(self.gen)
            raise KeyboardInterrupt

        def __exit__(self, *args):
            raise AssertionError("it was not entered")

    model = made()()
    forcing.enable(model)
    for number in range(4):
        plain_step(model, number)
    with monkeypatch.context() as patch:
        patch.setattr(recipe, name, Interrupted)
        with pytest.raises(KeyboardInterrupt):
            plain_step(model, 4)
    assert len(kept) == 1
    kept.clear()
    assert torch.is_grad_enabled()
    plain_step(model, 5)


@pytest.mark.parametrize("swaps", [False, True], ids=["the rest is kept", "the rest swaps"])
def test_a_window_that_begins_at_a_tensor_saved_again(forcing, swaps):
    """The pack before is of a storage that is known, which the schedule may decide without Python."""

    def function(h):
        h = functional.gelu(h)
        return torch.tanh(h * h).sin().exp().sin()

    forcing.compare(made(function), plain_step, wanted=lambda index, recipe: index == 8, swaps=swaps)


@pytest.mark.long
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
