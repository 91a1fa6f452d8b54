"""Graphs made, walked and dropped in several threads, and two models at once."""

import threading

import torch
from test_graph_lifetimes import batch, gradients, small_net


def in_thread(function):
    """What `function` returns or raises, called in a thread of its own."""
    outcome, device = {}, torch.get_default_device()

    def call():
        try:
            with device:
                outcome["result"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "deadlock"
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def test_forward_in_one_thread_backward_in_another(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(3):
            model.zero_grad()
            loss = in_thread(lambda: model(batch()).square().mean())
            settle()
            in_thread(loss.backward)
            results.append(gradients(model))
        return results

    offloaded.compare(run, make=small_net)


def test_graph_dropped_in_another_thread(offloaded):
    model = small_net()
    handle = offloaded.enable(model)
    losses = [model(batch()).square().mean() for _ in range(5)]
    in_thread(losses.clear)
    assert handle._engine.live_records == 0


def test_two_threads_train_one_model_at_once(offloaded):
    def run(model, step, settle):
        start, device = threading.Barrier(2), torch.get_default_device()

        def train(seed):
            generator = torch.Generator().manual_seed(seed)
            start.wait(60)
            results = []
            for _ in range(10):
                loss = model(torch.randn(16, 64, generator=generator).to(device)).square().mean()
                results += torch.autograd.grad(loss, list(model.parameters()))
            return results

        results = {}

        def keep(seed):
            results[seed] = train(seed)

        threads = [threading.Thread(target=keep, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "deadlock"
        return [results[1], results[2]]

    handle = offloaded.compare(run, make=small_net)
    assert handle.report().steps == 20


def test_one_graph_walked_by_two_threads_at_once(offloaded):
    def run(model, step, settle):
        loss = model(batch()).square().mean()
        parameters = list(model.parameters())
        settle()
        start = threading.Barrier(2)
        results = [None, None]

        def walk(number):
            start.wait(60)
            for _ in range(5):
                results[number] = torch.autograd.grad(loss, parameters, retain_graph=True)

        threads = [threading.Thread(target=walk, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "deadlock"
        return results

    offloaded.compare(run, make=small_net)


def test_two_models_at_once(offloaded):
    def run(model, step, settle):
        torch.manual_seed(7)
        other = small_net()
        if offloaded.handles:
            offloaded.enable(other, lb=8)
        results = []
        for _ in range(3):
            model.zero_grad(), other.zero_grad()
            x = batch()
            loss = model(x).square().mean() + other(x).square().mean() + other(model(x).repeat(1, 8)).mean()
            settle()
            loss.backward()
            results.append((gradients(model), gradients(other)))
        return results

    offloaded.compare(run, make=small_net)
    assert offloaded.handles[1].report().swapped.tensors > 0
