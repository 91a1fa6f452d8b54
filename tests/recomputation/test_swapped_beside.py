"""Tensors that are swapped in a step that recomputes others: no Python code runs for them, except around recipes."""

import gc
import weakref

import torch
from forced import Forcing
from python_frames import frames_of
from torch import nn

from offload.torch_compat.tensors import StorageWatch

NUMEL = 1 << 14


class Chain(nn.Module):
    """Each tanh saves its result, of which the recipe is a tanh of the result before it."""

    def __init__(self, count):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(NUMEL))
        self.count = count

    def forward(self, x, note=lambda x: lambda _: None):
        for _ in range(self.count):
            x = torch.tanh(x)
            x.register_hook(note(x))
        return x * self.scale


def step(model, *note):
    x = torch.linspace(-1, 1, NUMEL).requires_grad_()
    model(x, *note).sum().backward()
    return [x.grad, model.scale.grad.clone()]


def enabled(tmp_path, count, dropped, swaps=True):
    """A model that recomputes the tensor of one pack and swaps the others, after its recorded step and its trial."""
    torch.manual_seed(0)
    model = Chain(count)
    handle = Forcing(tmp_path).enable(model, swaps=swaps, wanted=lambda index, _: index == dropped)
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


def test_each_node_frees_what_it_needed(tmp_path):
    """The tensor that is recomputed, and the kept one that its recipe reads, as soon as the next node begins."""
    count, dropped = 8, 5
    model, handle = enabled(tmp_path, count, dropped, swaps=False)
    before = handle._counts.recomputed.tensors
    watches, left, resident = [], [], []

    def note(x):
        number = len(watches)
        watches.append(StorageWatch(x.untyped_storage()))

        def later_nodes_have_run(_):
            left.append([each for each in range(number + 1, count) if not watches[each].expired()])
            resident.append(handle._engine.resident.now)

        return later_nodes_have_run

    step(model, note)
    assert handle._counts.recomputed.tensors - before == 1
    assert left == [[]] * count
    assert max(resident) == 0


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
    assert handle._engine._dropped
    handle.disable()
    del loss, x, handle
    gc.collect()
    assert engine() is None
