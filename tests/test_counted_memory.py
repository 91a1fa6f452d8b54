"""What `memory_limit` counts besides arguments of forward: what the program holds, and a double backward."""

from contextlib import nullcontext

import pytest
import torch
from live_bytes import Peak
from planned_rig import assert_equal, enabled, held_bytes, known_link  # noqa: F401
from torch import nn


class Holder:
    """A batch of a type that only the program knows."""

    def __init__(self, x):
        self.x = x


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(256, 256), nn.GELU())])

    def forward(self, batch):
        return self.body(batch.x)


def with_target(model, x):
    return nn.functional.cross_entropy(model(Holder(x)), x.flip(0).softmax(1))


def held_by_the_program(model, x):
    batch, target = Holder(x), x.flip(0)
    return nn.functional.mse_loss(model(batch), target), batch, target


def with_micro_batches(model, x):
    """The second is weighted with an older tensor, which is saved after the backward pass of the first."""
    first, second = x.chunk(2)
    model(Holder(first)).square().mean().backward()
    return (model(Holder(second)) * model.weights).mean()


def with_state(model, x):
    """A loss that saves gradients and state, which are in use before the step."""
    loss = model(Holder(x)).square().mean()
    for parameter in model.parameters():
        if parameter.grad is not None:
            loss = loss + 1e-3 * (parameter * parameter.grad).sum()
    return loss


def with_penalty(model, x):
    x = x.detach().requires_grad_()
    y = model(Holder(x))
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + gradient.square().mean()


@pytest.mark.parametrize(
    ("loss_of", "fraction"),
    [
        (with_target, 2.0),
        (with_target, 0.8),
        (held_by_the_program, 0.8),
        (with_micro_batches, 2.0),
        (with_state, 2.0),
        (with_penalty, 2.0),
    ],
)
def test_what_the_program_holds_counts_and_what_a_double_backward_allocates(loss_of, fraction, tmp_path):
    def run(handle=None):
        results, peaks = [], []
        for step in range(5):
            x = torch.randn(512, 256, generator=torch.Generator().manual_seed(step))
            peak = Peak()
            with peak.watch() if step >= 2 else nullcontext():
                # In a `step` block, what the inner backward reloads and saves again counts twice.
                with handle.step() if handle is not None and loss_of is not with_penalty else nullcontext():
                    made = loss_of(model, x)
                loss = made[0] if isinstance(made, tuple) else made
                loss.backward()
            peaks.append(peak.nbytes + x.nbytes + older)
            results += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            del loss, made, x
        return results, max(peaks[2:]) + held_bytes(model, optimizer) + sum(p.nbytes for p in model.parameters())

    torch.manual_seed(0)
    model = Reading()
    model.weights = torch.rand(8, 256, 256)  # 2 MiB, no parameter and no buffer
    older = model.weights.nbytes if loss_of is with_micro_batches else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, plain_peak = run()
    model.zero_grad(set_to_none=False)
    limit = int(fraction * plain_peak)
    with enabled(model, memory_limit=limit, spill_dir=tmp_path) as handle:
        found, peak = run(handle)
        assert_equal(found, expected)
        assert handle.plan.unswapped_peak_bytes == pytest.approx(plain_peak, rel=0.05)
        assert peak <= limit
        assert bool(handle.plan.swaps or handle.plan.recomputes) is (fraction < 1)


def test_memory_that_an_inner_backward_reloads_is_not_older_than_the_step(tmp_path):
    torch.manual_seed(0)
    model = Reading()
    with enabled(model, memory_limit="1GiB", spill_dir=tmp_path) as handle:
        for _ in range(2):
            with handle.step():
                loss = with_penalty(model, torch.randn(512, 256))
            loss.backward()
        trace = handle.trace()
    first_backward = min(number for number, node in enumerate(trace.nodes) if node.backward)
    saved_later = [tensor for tensor in trace.tensors if tensor.packed > first_backward]
    assert saved_later
    assert all(tensor.produced > 0 for tensor in saved_later)
