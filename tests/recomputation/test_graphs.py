"""Graphs of all kinds with dropped tensors: retained, partial, several at once, in other threads, with checkpoints."""

import threading
from typing import ClassVar

import torch
from forced import Calls, gradients, made, plain_step, silu_twice
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from offload import _core
from offload.runtime.recomputed_storage import RecomputedStorage
from offload.torch_compat.tensors import StorageWatch


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


def test_a_long_chain_of_dropped_tensors(forcing):
    """Each is made of the one before, so the last one needs all of them."""

    def function(h):
        for _ in range(500):
            h = torch.sin(h)
        return h

    forcing.compare(made(function), plain_step, steps=3)


def test_a_graph_that_is_given_up_frees_what_its_recipes_read(forcing):
    """At once: an evaluation may need the memory, and nothing of this library need run before it."""

    class Watched(Calls):
        def forward(self, x):
            h = self.a(x).exp()
            self.watch = StorageWatch(h.untyped_storage())
            return self.b(functional.silu(functional.silu(h) * 2))

    model = Watched(None)
    handle = forcing.enable(model, wanted=lambda index, recipe: not any("exp" in name for name in recipe.operators))
    for _ in range(4):
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
    loss = model(torch.randn(32, 64)).square().mean()
    assert handle._counts.recomputed.tensors > 0
    kept = model.watch
    assert not kept.expired()
    del loss
    assert kept.expired()


class Streams:
    """An engine's device with two streams."""

    device = torch.device("cpu")

    def __init__(self):
        self.resident, self.unswapped, self.dropped = (_core.Gauge() for _ in range(3))
        self.stream = self.waits = 0

    def current_stream(self):
        return self.stream

    def synchronize(self):
        self.waits += 1


class Constant:
    """A recipe that reads a parameter and gives another storage each time."""

    slots: ClassVar = {}
    changeable = ()

    def reads_state(self, storages):
        return True

    def load(self):
        return {}

    def run(self, storages):
        return torch.arange(8.0).untyped_storage()


def test_a_settled_tensor_serves_another_stream():
    """It cannot be recomputed there, and its memory belongs to the first stream."""
    engine, source = Streams(), torch.arange(8.0)
    key = (1, 0, 0, source.nbytes, 1)
    record = RecomputedStorage(engine, key, Constant(), source, lambda nbytes, seconds: None)
    record.add_view()
    first, _ = record.swap_in()
    assert record.swap_in()[0].data_ptr() != first.data_ptr(), "recomputed after it was served"
    record.settle(frozenset())
    settled, _ = record.swap_in()
    assert record.swap_in()[0].data_ptr() == settled.data_ptr()
    engine.stream = 1
    other, _ = record.swap_in()
    assert other.data_ptr() != settled.data_ptr()
    assert (other.tolist(), engine.waits) == (settled.tolist(), 2)
    assert engine.resident.now == source.nbytes
    del record
    assert engine.resident.now == 0
