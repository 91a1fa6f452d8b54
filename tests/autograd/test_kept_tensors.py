"""Tensors that the schedule keeps: counted, and what is due while one is packed or unpacked is done."""

import sys

import torch
from torch import nn

from offload import _core


class Chain(nn.Module):
    """Saves one tensor per layer; `rows` of the middle one may change from step to step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 50))
        self.rows = 60

    def forward(self, x):
        x = (x * self.weight).tanh()
        x = x[: self.rows].clone().tanh()
        return x.sin().tanh()


def step(model, settle, x):
    loss = model(x).sum()
    settle()
    loss.backward()
    return model.weight.grad.clone()


def steps(model, settle, rows):
    grads = []
    for count in rows:
        model.rows = count
        grads.append(step(model, settle, torch.linspace(-1, 1, 60 * 50).reshape(60, 50)))
    return grads


def test_a_tensor_of_another_size_ends_the_schedule(offloaded):
    handles = []

    def run(model, step, settle):
        handle = offloaded.handles[-1] if offloaded.handles else None
        results = steps(model, settle, (60, 60))
        handles.append((handle, handle.report().swapped.tensors if handle is not None else 0))
        return [*results, *steps(model, settle, (30,))]

    offloaded.compare(run, make=Chain, n_tensors=1)
    handle, before = handles[-1]
    assert handle.report().kept["n_tensors"].tensors > 0
    assert handle.report().swapped.tensors - before > 1, "the third step must swap on demand"


class Peek(torch.autograd.Function):
    """The identity, which saves a tensor of its own and calls something once backward has asked for it."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.save_for_backward(torch.ones(60, 50))
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        assert len(ctx.saved_tensors) == 1
        ctx.call()
        return grad, None


def test_what_is_due_while_a_kept_tensor_is_unpacked_is_done(offloaded):
    """The swapped tensor comes back one node ahead of its use, while a kept tensor is unpacked: timed steps or not."""
    back = []

    def run(model, step, settle):
        results = []
        for _ in range(9):
            x = torch.linspace(-1, 1, 60 * 50).reshape(60, 50).requires_grad_()
            loss = model(x).sum()
            settle()
            loss.backward()
            results.append(x.grad)
        return results

    def function(x):
        handles = offloaded.handles
        return Peek.apply(x.tanh(), lambda: back.append(handles[-1]._engine.resident.now if handles else 0))

    handle = offloaded.compare(run, function, n_tensors=1, lb=1)
    assert handle.report().kept["n_tensors"].tensors == 8
    assert back[-8:] == [60 * 50 * 4] * 8


def test_reasons_are_counted(offloaded):
    def function(x):
        small = x[:1].clone().sin()
        return (x * small).exp() + torch.nn.functional.dropout(x, 0.0)

    x = torch.ones(60, 50, requires_grad=True)
    handle = offloaded.differentiate(function, x, again=True, min_tensor_bytes=1000)
    counts = handle.report().kept
    assert counts["small"].tensors >= 2
    assert counts["small"].nbytes < 1000 * counts["small"].tensors


def test_a_kept_tensor_dies_with_its_graph(offloaded):
    def run(model, step, settle):  # each record holds a reference to its type
        before = sys.getrefcount(_core.KeptTensor)
        loss = model(torch.ones(60, 50)).sum()
        during = sys.getrefcount(_core.KeptTensor)
        del loss
        after = sys.getrefcount(_core.KeptTensor)
        return (after == before, during > before) if offloaded.handles else (True, True)

    offloaded.compare(run, make=Chain, swaps=None, min_tensor_bytes="1MiB")
