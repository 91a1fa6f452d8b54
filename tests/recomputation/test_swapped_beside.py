"""Tensors that are swapped in a step that recomputes others: no Python code runs for them, except around recipes."""

import gc
import weakref

import torch
from forced import Forcing
from python_frames import frames_of
from torch import nn

NUMEL = 1 << 14


class Chain(nn.Module):
    """Each tanh saves its result, of which the recipe is a tanh of the result before it."""

    def __init__(self, count):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(NUMEL))
        self.count = count

    def forward(self, x, note=lambda: None):
        for _ in range(self.count):
            x = torch.tanh(x)
            x.register_hook(lambda _: note())
        return x * self.scale


def step(model, note=lambda: None):
    x = torch.linspace(-1, 1, NUMEL).requires_grad_()
    model(x, note).sum().backward()
    return [x.grad, model.scale.grad.clone()]


def enabled(tmp_path, count, dropped):
    """A model that recomputes the tensor of one pack and swaps the others, after its recorded step and its trial."""
    torch.manual_seed(0)
    model = Chain(count)
    handle = Forcing(tmp_path).enable(model, swaps=True, wanted=lambda index, _: index == dropped)
    for _ in range(4):
        step(model)
    return model, handle


def test_a_swapped_tensor_runs_no_python(tmp_path):
    frames = {}
    for count in (16, 32):
        model, handle = enabled(tmp_path, count, 3)
        before = handle._counts.swapped.tensors, handle._counts.recomputed.tensors
        frames[count] = frames_of(lambda model=model: step(model))
        moved = handle._counts.swapped.tensors - before[0], handle._counts.recomputed.tensors - before[1]
        assert moved == (count - 1, 1)
        handle.disable()
    more = len(frames[32]) - len(frames[16])
    assert more < 16, f"16 more tensors ran {more} more functions: {sorted(set(frames[32]))}"


def test_memory_of_a_recomputed_tensor_is_freed_before_the_next_copy_in(tmp_path):
    count = 8
    model, handle = enabled(tmp_path, count, count - 1)  # the first that backward needs
    before = handle._counts.recomputed.tensors
    freed = []
    step(model, lambda: freed.append(len(handle._engine._dead)))
    assert handle._counts.recomputed.tensors - before == 1
    assert len(freed) == count
    assert max(freed[2:]) == 0, freed


def test_the_same_bits(tmp_path):
    plain = step(Chain(12))
    for dropped in (1, 5, 11):
        model, handle = enabled(tmp_path, 12, dropped)
        model.scale.grad = None
        found = step(model)
        assert all(map(torch.equal, found, plain))
        assert handle._counts.recomputed.tensors > 0
        handle.disable()


def test_a_graph_that_outlives_the_session_keeps_no_engine(tmp_path):
    model, handle = enabled(tmp_path, 8, 3)
    x = torch.linspace(-1, 1, NUMEL).requires_grad_()
    loss = model(x).sum()
    engine = weakref.ref(handle._engine)
    assert handle._engine._dropped_handles
    handle.disable()
    del loss, x, handle
    gc.collect()
    assert engine() is None
