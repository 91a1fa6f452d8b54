"""Graphs of all kinds with dropped tensors: retained, partial, several at once, in other threads, with checkpoints."""

import threading

import torch
from forced import Calls, gradients, made, plain_step, silu_twice
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


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
