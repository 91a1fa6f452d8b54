"""`offload.fit`: a model in Python, at two batch sizes; nothing of it is changed."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload.capacity.optimizer_step import watching_optimizers
from offload.plan import least_feasible_limit, unswapped_bytes
from offload.plan.rescale import in_proportion, largest_batch, on_a_line, retimed
from offload.plan.trace import Link, Node, Recompute, SavedTensor, Trace
from offload.units import parse_bytes

WIDTH = 256


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.GELU())
    ]
    return nn.Sequential(*layers)


@pytest.mark.long
def test_a_model_is_as_it_was() -> None:
    model = make().eval()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, WIDTH)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad for parameter in model.parameters()]
    random_state = torch.get_rng_state()
    found = offload.fit(model, lambda n: torch.randn(n, WIDTH), memory="24MiB", batch=2048, optimizer=optimizer)
    assert found.choices
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert optimizer.state == {}
    assert not model.training
    assert "forward" not in vars(model), "offload is disabled again"


@pytest.mark.long
def test_two_sizes_give_each_tensors_line() -> None:
    model = make()
    found = offload.fit(model, lambda n: torch.randn(n, WIDTH), memory="64MiB", batch=2048)
    assert "taken as linear, through these two" in found.notes[1]
    keep, swap = found.choices[:2]
    assert keep.largest_batch is not None
    assert swap.largest_batch is not None
    assert 0 < keep.largest_batch < swap.largest_batch
    again = offload.fit(model, lambda n: torch.randn(n, WIDTH), memory="64MiB", batch=2 * (keep.largest_batch // 2))
    assert again.best is not None
    assert again.best.name == "keep everything", "a step of the largest batch fits as it is"
    assert again.peak_bytes > 0.98 * (64 << 20), "and hardly more does"


class Parts(nn.Module):
    """Autograd saves parts of a storage, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.sin() for part in self.layer(x).chunk(4, 0)])


@pytest.mark.parametrize("part", [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Parts])
def test_a_smaller_batch_that_is_advised_keeps_the_limit(part: Callable[[], nn.Module]) -> None:
    """Also where its tensors are smaller than those that are swapped by default."""
    torch.manual_seed(0)
    model = nn.Sequential(*[part() for _ in range(12)])
    found = offload.fit(model, lambda n: torch.randn(n, WIDTH), memory="8MiB", batch=4096)
    advice = re.search(r'Use a batch of (\d+) with min_tensor_bytes="(\w+)", or a limit of', str(found))
    assert advice is not None, str(found)
    batch, smallest = int(advice[1]), advice[2]
    largest = found.to_dict()["choices"][1]["largest"]
    assert parse_bytes(smallest) == largest["min_tensor_bytes"]
    assert parse_bytes(smallest) <= batch * WIDTH < 1 << 20
    for least, fits in ((smallest, True), ("1MiB", False)):
        with offload.enable(model, memory_limit="8MiB", min_tensor_bytes=least) as handle:
            with pytest.raises(offload.InfeasibleLimitError) if not fits else nullcontext():
                for _ in range(3):
                    with handle.step():
                        loss = model(torch.randn(batch, WIDTH)).sum()
                    loss.backward()
                    model.zero_grad(set_to_none=True)
            assert (handle.report().verdict.kind == "planned") is fits
    assert found.to_dict()["choices"][0]["largest"]["min_tensor_bytes"] is None, "nothing moves"
    enough = offload.fit(model, lambda n: torch.randn(n, WIDTH), memory="1GiB", batch=4096)
    assert "min_tensor_bytes" not in str(enough)
    assert all(choice.largest_min_tensor_bytes is None for choice in enough.choices), "all of them are larger"


def test_a_loss_of_ones_own_and_several_arguments() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, a: torch.Tensor, *, b: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sum": self.layer(a).tanh() + self.layer(b).tanh()}

    def batch(n: int) -> dict[str, torch.Tensor]:
        return {"a": torch.randn(n, WIDTH), "b": torch.randn(n, WIDTH)}

    assert offload.fit(Pair(), batch, memory="1GiB", batch=2048).fits
    found = offload.fit(
        Pair(), batch, memory="1GiB", batch=2048, loss=lambda model, at: model(**at)["sum"].square().sum()
    )
    assert found.line is None


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"batch": 1}, "batch must be at least 2"),
        ({"memory": "1G"}, "is ambiguous"),
        ({"device": "cuda"}, "write memory, link and speed"),
    ],
)
def test_mistakes(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload.fit(nn.Linear(2, 2), lambda n: torch.randn(n, 2), **knobs)


@pytest.mark.parametrize(
    ("make_batch", "message"),
    [
        (lambda: torch.randn(8, 2), "called with a batch size .* not a function without an argument"),
        (torch.randn(8, 2), "called with a batch size .* not a Tensor"),
        (lambda n: torch.randn(8, 2), "same shapes for the batch sizes 8 and 4"),
    ],
)
def test_batches_of_no_size_are_refused(make_batch: Any, message: str) -> None:
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=message):
            offload.fit(nn.Linear(2, 2, device=device), make_batch, device="1GiB,1GB/s,1TFLOP/s")


def test_an_enabled_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    with offload.enable(model), pytest.raises(ValueError, match="offload is enabled on this model"):
        offload.fit(model, lambda n: torch.randn(n, 2))


# -- the arithmetic ---------------------------------------------------------------------------------------------------


def step(batch: int, fixed: int = 100) -> Trace:
    """A step whose figures are known: `fixed` bytes, and per item 3 temporary and 10 + 4 saved ones."""
    nodes = tuple(Node(str(k), 0.5 + 0.25 * batch, k > 2) for k in range(6))
    recipe = Recompute(0.5 * batch, (0,), 2 * batch)
    tensors = (SavedTensor(0, 10 * batch, 0, 0, 1, 5, 5), SavedTensor(1, 4 * batch + 8, 1, 1, 2, 4, 4, recipe))
    return Trace(nodes, tuple(fixed + 3 * batch * (k == 3) for k in range(6)), tensors)


def test_two_batches_give_all_others() -> None:
    sized = on_a_line(step(8), 8, step(4), 4)
    assert sized is not None
    for batch in (1, 2, 4, 8, 16, 1000):
        assert sized.at(batch).tensors == step(batch).tensors
        assert sized.at(batch).base_bytes == step(batch).base_bytes
    assert [node.seconds for node in sized.at(16).nodes] == pytest.approx([4.5] * 6)
    for limit in (150, 400, 1000):
        for peak in (lambda trace: max(unswapped_bytes(trace)), least_feasible_limit):
            expected = max((n for n in range(200) if peak(step(n)) <= limit), default=0)
            assert largest_batch(sized, limit, peak) == expected


def test_other_steps_are_on_no_line() -> None:
    other = Trace(step(4).nodes, step(4).base_bytes, step(4).tensors[:1])
    assert on_a_line(step(8), 8, other, 4) is None


def test_in_proportion_asks_for_no_less_than_there_is_at_larger_batches() -> None:
    sized = in_proportion(step(8), 8, (100,) * 6)
    for batch in (8, 9, 64):
        assert all(a >= b for a, b in zip(unswapped_bytes(sized.at(batch)), unswapped_bytes(step(batch)), strict=True))


def test_the_ends_of_the_search() -> None:
    sized = in_proportion(step(8), 8, (100,) * 6)
    assert largest_batch(sized, 99, least_feasible_limit) == 0
    assert (
        largest_batch(in_proportion(Trace(step(1).nodes, (7,) * 6, ()), 8, (7,) * 6), 8, least_feasible_limit) is None
    )


def test_another_device_changes_durations_alone() -> None:
    link = Link(1e9, 2e9)
    there = retimed(step(8), 0.5, link)
    assert unswapped_bytes(there) == unswapped_bytes(step(8))
    assert there.link == link
    assert [node.seconds for node in there.nodes] == [1.25] * 6
    assert there.tensors[1].recompute == Recompute(2.0, (0,), 16)


class KeepsItsInput(nn.Module):
    """Replaces one buffer by a tensor of the batch's size, and registers another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.zeros(len(x))
        self.register_buffer("late", torch.zeros(2))
        return self.layer(x)


class PreciseState(torch.optim.Optimizer):
    """Keeps float32 state of bfloat16 parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("sum", torch.full_like(parameter, 1 / 3, dtype=torch.float32)).add_(1e-4)
            parameter.sub_(parameter.grad)


def test_state_of_another_type_and_replaced_buffers_are_put_back() -> None:
    model = KeepsItsInput()
    optimizer = PreciseState(model.parameters())
    model.layer(torch.randn(4, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [(each, each.clone()) for each in [*model.parameters(), *model.buffers()]]
    sums = [(state["sum"], state["sum"].clone()) for state in optimizer.state.values()]
    offload.fit(model, lambda n: torch.randn(n, 64, dtype=torch.bfloat16), batch=8, optimizer=optimizer)
    after = [*model.parameters(), *model.buffers()]
    assert [id(each) for each in after] == [id(each) for each, _ in before]
    assert all(torch.equal(each, was) for each, was in before)
    for state, (own, was) in zip(optimizer.state.values(), sums, strict=True):
        assert state["sum"] is own
        assert torch.equal(own, was)


def pairs(n: int) -> torch.Tensor:
    return torch.ones(n, WIDTH)


class Unsteppable(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ArithmeticError("this update cannot be computed")


def test_a_step_that_raises_leaves_no_profiler_on() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ArithmeticError):
        offload.fit(model, pairs, memory="64MiB", batch=64, optimizer=Unsteppable(model.parameters()))
    assert not torch.autograd._profiler_enabled()


def test_a_step_after_one_that_raised_is_counted() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    failing, other = Unsteppable(model.parameters()), torch.optim.Adam(model.parameters())
    with watching_optimizers() as watch:
        watch.listen()
        model(pairs(8)).sum().backward()
        with pytest.raises(ArithmeticError):
            failing.step()
        other.step()
        assert not torch.autograd._profiler_enabled()
    assert watch.is_incomplete
    assert watch.peak_bytes > 3 * sum(parameter.nbytes for parameter in model.parameters())


class Around(torch.optim.SGD):
    """Steps another optimizer within its step."""

    inner: torch.optim.Optimizer

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_that_steps_another_one_is_not_counted() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    outer = Around(model.parameters())
    outer.inner = torch.optim.Adam(model.parameters())
    with watching_optimizers() as watch:
        watch.listen()
        model(pairs(8)).sum().backward()
        outer.step()
    assert watch.is_incomplete
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (lambda inner: [inner], "takes one torch.optim.Optimizer, not"),
        (lambda inner: offload.contrib.GradAccumulator(inner, steps=2), "Write optimizer=optimizer.optimizer"),
        (lambda inner: torch.optim.LBFGS(inner.param_groups[0]["params"]), "LBFGS needs one: leave optimizer out"),
    ],
)
def test_optimizers_that_cannot_be_stepped(make_optimizer: Any, message: str) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = make_optimizer(torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match=message):
        offload.fit(model, pairs, memory="64MiB", batch=64, optimizer=optimizer)


def test_a_loss_that_is_no_tensor() -> None:
    with pytest.raises(ValueError, match="loss returned a int, not a tensor"):
        offload.fit(nn.Linear(WIDTH, WIDTH), pairs, memory="64MiB", batch=64, loss=lambda model, batch: 3)


@pytest.mark.parametrize("device", [None, "12GiB,12GB/s,40TFLOP/s"])
def test_random_generators_are_as_they_were(device: str | None) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def drawing(items: int) -> torch.Tensor:
        return pairs(items) + random.gauss() + np.random.standard_normal() + float(torch.randn(()))

    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    expected = drawing(1)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    offload.fit(model, drawing, device=device, batch=64)
    assert torch.equal(drawing(1), expected)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off(off: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    with off():
        assert offload.fit(model, pairs, memory="1GiB", batch=64).fits
        assert not torch.is_grad_enabled()
