"""Graphs kept, walked twice, walked in part, interleaved or dropped: gradients are the same, slots free themselves."""

import pytest
import torch
from torch import nn


def small_net(width=64):
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))


def batch(rows=16, width=64):
    return torch.randn(rows, width)


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("order", ["fifo", "lifo"])
def test_interleaved_forwards(offloaded, order):
    def run(model, step, settle):
        results = []
        for _ in range(3):  # the second and third follow schedules
            model.zero_grad()
            losses = [model(batch()).square().mean() for _ in range(3)]
            settle()
            for loss in losses if order == "fifo" else losses[::-1]:
                loss.backward()
            results.append(gradients(model))
        return results

    offloaded.compare(run, make=small_net)


def test_forward_between_two_halves_of_a_backward(offloaded):
    def run(model, step, settle):
        first, second = model(batch()), model(batch())
        settle()
        first.square().mean().backward()
        third = model(batch())
        second.square().mean().backward()
        settle()
        third.square().mean().backward()
        return gradients(model)

    offloaded.compare(run, make=small_net)


def test_gan(offloaded):
    """The discriminator is walked three times a round, once without reaching its own parameters."""

    def run(model, step, settle):
        generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, model)]
        losses = []
        for _ in range(4):
            fake = generator(torch.randn(16, 8))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_real, loss_fake = model(batch()).square().mean(), model(fake.detach()).exp().mean()
            settle()
            (loss_real + loss_fake).backward()
            optimizers[1].step()
            loss = -model(fake).mean()
            settle()
            loss.backward()
            optimizers[0].step()
            losses.append([loss_real.detach(), loss_fake.detach(), loss.detach()])
        return losses, gradients(generator), gradients(model)

    offloaded.compare(run, make=small_net)


def test_tied_weights(offloaded):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 64)
            self.inner = nn.Linear(64, 64)
            self.head = nn.Linear(64, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(torch.tanh(self.inner(self.embedding(tokens))))

    def run(model, step, settle):
        results = []
        for _ in range(3):
            tokens = torch.randint(0, 50, (4, 16))
            model.zero_grad()
            with step():
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            settle()
            loss.backward()
            results.append(gradients(model))
        return results

    handle = offloaded.compare(run, make=Tied)
    assert handle.report().kept["parameter"].tensors == 6, "both linear layers' weights, three times"


def test_retained_graph_walked_three_times(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(3):
            loss = model(batch()).square().mean()
            for _ in range(3):
                settle()
                model.zero_grad()
                loss.backward(retain_graph=True)
                results.append(gradients(model))
            del loss
        return results

    offloaded.compare(run, make=small_net)


def test_freed_graph_walked_again_is_the_usual_error(offloaded):
    def run(model, step, settle):
        loss = model(batch()).square().mean()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        return gradients(model)

    offloaded.compare(run, make=small_net)


def test_double_backward(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(3):
            model.zero_grad()
            x = batch().requires_grad_()
            with step():
                y = model(x).square().mean()
                settle()
                (gradient,) = torch.autograd.grad(y, x, create_graph=True)
                penalty = (gradient.norm(dim=1) - 1).square().mean() + y
            settle()
            penalty.backward()
            results.append((x.grad.clone(), gradients(model)))
        return results

    offloaded.compare(run, make=small_net)


def test_third_derivative(offloaded):
    def run(model, step, settle):
        x = torch.linspace(0.1, 1, 2000, dtype=torch.float64).requires_grad_()
        with step():
            y, results = model(x), []
            for _ in range(3):
                settle()
                (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                results.append(y.detach())
        return results

    offloaded.compare(run, lambda x: (x * 2).exp() * x.sin() * (x * x).tanh())


def test_partial_inputs(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(2):
            for number in (4, 2, 0):
                loss = model(batch()).square().mean()
                settle()
                results.append(torch.autograd.grad(loss, list(model.parameters())[number:]))
            model.zero_grad()
            loss = model(batch()).square().mean()
            settle()
            loss.backward(inputs=[model[0].weight])
            results.append(model[0].weight.grad.clone())
        return results

    offloaded.compare(run, make=small_net)


def test_parts_of_one_graph_one_after_another(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(3):
            loss = model(batch()).square().mean()
            settle()
            for parameter in model.parameters():
                results += torch.autograd.grad(loss, [parameter], retain_graph=True)
        return results

    offloaded.compare(run, make=small_net)


@pytest.mark.timeout(1200)
def test_abandoned_forwards_leave_the_pool_as_it_was(offloaded, is_full, campaign_counts):
    model = small_net()
    handle = offloaded.enable(model)
    held = []
    count = 10_000 if is_full else 1000
    campaign_counts["forwards abandoned"] += count
    for number in range(count):
        model(batch(4))
        if number in (100, count - 1):
            handle._engine.drain()
            handle._engine.store.quiesce()
            stats = handle._engine.store.stats()
            assert (handle._engine.live_records, stats["live_tickets"], stats["spill_used_bytes"]) == (0, 0, 0), stats
            assert stats["pool_requested_bytes"] == offloaded.pool_bytes_at_rest[id(handle)], stats
            held.append((stats["pool_held_bytes"], stats["spill_file_bytes"]))
        if number % 10 == 0:
            offloaded.settle()
    assert handle.report().swapped.tensors >= 2.5 * count
    if offloaded.setup.settles:
        assert held[0] == held[1]
    assert held[1][0] <= offloaded.setup.host_bytes_max
    assert held[1][1] <= 16 * max(held[0][1], 1 << 16), "how much is in flight at once depends on the schedule"


def test_graph_dropped_half_way_through_its_copies(offloaded):
    model = small_net()
    handle = offloaded.enable(model)
    torch.manual_seed(0)
    for rows in range(1, 60):
        loss = model(batch(rows)).square().mean()
        if rows % 3 == 0:
            offloaded.settle()
            torch.autograd.grad(loss, [model[4].weight])  # the rest has begun to come back, and nobody wants it
        del loss
    assert handle.report().swapped.tensors > 100


def test_generator_dropped_half_way(offloaded):
    def run(model, step, settle):
        def losses():
            with step():
                yield model(batch()).square().mean()
                yield model(batch()).square().mean()

        started = losses()
        first = next(started)
        settle()
        started.close()
        after = model(batch()).square().mean()
        settle()
        (first + after).backward()
        return gradients(model)

    handle = offloaded.compare(run, make=small_net)
    assert handle.report().steps == 2


def test_gradient_accumulation(offloaded):
    def run(model, step, settle):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        results = []
        for _ in range(3):
            for _ in range(4):
                loss = model(batch()).square().mean() / 4
                settle()
                loss.backward()
            results.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return results

    offloaded.compare(run, make=small_net)


def test_losses_summed_over_micro_batches_before_one_backward(offloaded):
    def run(model, step, settle):
        results = []
        for _ in range(3):
            model.zero_grad()
            total = sum(model(batch()).square().mean() for _ in range(4))
            settle()
            total.backward()
            results.append(gradients(model))
        return results

    offloaded.compare(run, make=small_net)


def test_disable_between_forward_and_backward(offloaded):
    def run(model, step, settle):
        losses = [model(batch()).square().mean() for _ in range(2)]
        if offloaded.handles:
            offloaded.handles[-1].disable()
            assert "forward" not in model.__dict__
        losses.append(model(batch()).square().mean())
        for loss in losses:
            loss.backward()
        return gradients(model)

    handle = offloaded.compare(run, make=small_net)
    assert handle.report().steps == 2
