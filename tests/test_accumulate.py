"""`GradAccumulator`: a group of small batches against one large batch; tails, clipping, schedulers, scaler."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import offload


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3)).to(dtype)


def make_data(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 12, generator=generator, dtype=dtype), torch.randint(3, (rows,), generator=generator)


def train(model: nn.Module, optimizer: offload.contrib.GradAccumulator, x: Tensor, y: Tensor, batch: int) -> list[bool]:
    """One epoch; whether each call of `step` acted."""
    acted = []
    for rows, labels in zip(x.split(batch), y.split(batch), strict=True):
        loss = functional.cross_entropy(model(rows), labels)
        optimizer.scale(loss, items=len(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        acted.append(optimizer.stepped)
    return acted


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, batch: int, **clip: float):
    for rows, labels in zip(x.split(batch), y.split(batch), strict=True):
        functional.cross_entropy(model(rows), labels).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), **clip)
        optimizer.step()
        optimizer.zero_grad()


def assert_close(model: nn.Module, expected: nn.Module, rtol: float = 1e-12, atol: float = 1e-13) -> None:
    """The same within rounding: another grouping of the same sum cannot be bit-equal."""
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-12, 1e-13), (torch.float32, 1e-4, 1e-6)])
def test_four_of_16_are_one_of_64(dtype, rtol, atol):
    x, y = make_data(256, dtype)
    small, large = make_model(dtype), make_model(dtype)
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(small.parameters(), lr=0.1, momentum=0.9), steps=4)
    acted = train(small, optimizer, x, y, 16)
    train_plain(large, torch.optim.SGD(large.parameters(), lr=0.1, momentum=0.9), x, y, 64)
    assert acted == [False, False, False, True] * 4
    assert_close(small, large, rtol, atol)


def test_batches_of_different_sizes_weigh_by_their_items():
    x, y = make_data(64)
    small, large = make_model(), make_model()
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(small.parameters(), lr=0.1), steps=3)
    for begin, end in ((0, 5), (5, 63), (63, 64)):
        loss = functional.cross_entropy(small(x[begin:end]), y[begin:end])
        optimizer.scale(loss, items=end - begin).backward()
        optimizer.step()
    assert optimizer.stepped
    train_plain(large, torch.optim.SGD(large.parameters(), lr=0.1), x, y, 64)
    assert_close(small, large)


def test_a_ragged_tail_is_flushed():
    x, y = make_data(64 + 16 + 3)
    small, large = make_model(), make_model()
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(small.parameters(), lr=0.1), steps=4)
    assert train(small, optimizer, x, y, 16) == [False, False, False, True, False, False]
    assert optimizer.flush()
    assert optimizer.stepped
    assert all(parameter.grad is None for parameter in small.parameters())
    assert not optimizer.flush()
    train_plain(large, torch.optim.SGD(large.parameters(), lr=0.1), x, y, 64)
    assert_close(small, large)


def test_one_step_is_the_plain_loop_to_the_last_bit():
    x, y = make_data(64)
    accumulated, plain = make_model(), make_model()
    optimizer = offload.contrib.GradAccumulator(torch.optim.AdamW(accumulated.parameters()), steps=1)
    assert train(accumulated, optimizer, x, y, 16) == [True] * 4
    train_plain(plain, torch.optim.AdamW(plain.parameters()), x, y, 16)
    for a, b in zip(accumulated.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_with_the_engine_on_it_is_the_same_to_the_last_bit(tmp_path):
    x, y = make_data(256)
    plain, swapped = make_model(), make_model()
    train(plain, offload.contrib.GradAccumulator(torch.optim.SGD(plain.parameters(), lr=0.1), steps=4), x, y, 16)
    with offload.enable(swapped, n_tensors=-1, min_tensor_bytes=1, spill_dir=tmp_path) as handle:
        train(
            swapped, offload.contrib.GradAccumulator(torch.optim.SGD(swapped.parameters(), lr=0.1), steps=4), x, y, 16
        )
    assert handle.report().swapped.tensors > 0
    for a, b in zip(swapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_clipping_sees_the_gradient_of_the_whole_group():
    x, y = make_data(128)
    small, large = make_model(), make_model()
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(small.parameters(), lr=1.0), steps=4, max_norm=0.05)
    train(small, optimizer, x, y, 16)
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm > 0.05
    train_plain(large, torch.optim.SGD(large.parameters(), lr=1.0), x, y, 64, max_norm=0.05)
    assert_close(small, large)


@pytest.mark.parametrize("of", ["accumulator", "optimizer"])
def test_a_scheduler_steps_with_the_optimizer(of, recwarn):
    x, y = make_data(256)
    small, large = make_model(), make_model()
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(small.parameters(), lr=0.2), steps=4)
    scheduler = StepLR(optimizer if of == "accumulator" else optimizer.optimizer, step_size=1, gamma=0.5)
    rates = []
    for rows, labels in zip(x.split(16), y.split(16), strict=True):
        optimizer.scale(functional.cross_entropy(small(rows), labels), items=16).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.stepped:
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.025, 0.0125]
    plain = torch.optim.SGD(large.parameters(), lr=0.2)
    plain_scheduler = StepLR(plain, step_size=1, gamma=0.5)
    for rows, labels in zip(x.split(64), y.split(64), strict=True):
        train_plain(large, plain, rows, labels, 64)
        plain_scheduler.step()
    assert_close(small, large)
    assert [str(warning.message) for warning in recwarn if "scheduler" in str(warning.message)] == []


def test_a_scheduler_that_cycles_momentum_finds_the_defaults():
    model = make_model()
    optimizer = offload.contrib.GradAccumulator(torch.optim.AdamW(model.parameters()), steps=2)
    OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.004)


def test_the_scaler_unscales_before_clipping_and_updates_once_a_group():
    x, y = make_data(128, torch.float32)
    small, large = make_model(torch.float32), make_model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = offload.contrib.GradAccumulator(
        torch.optim.SGD(small.parameters(), lr=1.0), steps=4, scaler=scaler, max_norm=0.05
    )
    assert train(small, optimizer, x, y, 16) == [False, False, False, True] * 2
    assert scaler.get_scale() == 4096.0  # two groups, two updates
    train_plain(large, torch.optim.SGD(large.parameters(), lr=1.0), x, y, 64, max_norm=0.05)
    assert_close(small, large, 1e-4, 1e-6)


def test_an_overflow_skips_the_group_and_says_so():
    x, y = make_data(64, torch.float32)
    model = make_model(torch.float32)
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(model.parameters(), lr=1.0), steps=4, scaler=scaler)
    x[20] = float("inf")
    assert train(model, optimizer, x, y, 16) == [False] * 4
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_state_dict_is_the_optimizers_and_resumes():
    x, y = make_data(128)
    straight, resumed = make_model(), make_model()
    optimizer = offload.contrib.GradAccumulator(torch.optim.AdamW(straight.parameters()), steps=4)
    train(straight, optimizer, x, y, 16)
    first = offload.contrib.GradAccumulator(torch.optim.AdamW(resumed.parameters()), steps=4)
    train(resumed, first, x[:64], y[:64], 16)
    saved = copy.deepcopy((resumed.state_dict(), first.state_dict()))
    assert saved[1].keys() == torch.optim.AdamW(resumed.parameters()).state_dict().keys()
    again = make_model()
    again.load_state_dict(saved[0])
    second = offload.contrib.GradAccumulator(torch.optim.AdamW(again.parameters()), steps=4)
    second.load_state_dict(saved[1])
    train(again, second, x[64:], y[64:], 16)
    for a, b in zip(again.parameters(), straight.parameters(), strict=True):
        assert torch.equal(a, b)


def test_is_last_names_the_batch_that_synchronises():
    x, y = make_data(6)
    model = make_model()
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    last = []
    for rows, labels in zip(x.split(1), y.split(1), strict=True):
        last.append(optimizer.is_last)
        optimizer.scale(functional.cross_entropy(model(rows), labels), items=1).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert last == [False, False, True] * 2


def test_reset_drops_a_group_that_failed():
    x, y = make_data(80)
    model, expected = make_model(), make_model()
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    optimizer.scale(functional.cross_entropy(model(x[64:]), y[64:]), items=16).backward()
    with pytest.raises(RuntimeError, match=r"scale\(\) twice before step\(\).*reset\(\)"):
        optimizer.scale(model(x).sum(), items=16)
    optimizer.reset()
    train(model, optimizer, x[:64], y[:64], 16)
    train_plain(expected, torch.optim.SGD(expected.parameters(), lr=0.1), x[:64], y[:64], 64)
    assert_close(model, expected)


def test_flush_in_the_middle_of_a_batch_is_an_error():
    """Its gradient may be there, half there, or not yet: nobody but the caller knows."""
    x, y = make_data(32)
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = offload.contrib.GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    train(model, optimizer, x[:16], y[:16], 16)
    optimizer.scale(functional.cross_entropy(model(x[16:]), y[16:]), items=16).backward()
    with pytest.raises(RuntimeError, match=r"flush\(\) between scale\(\) and step\(\).*reset\(\)"):
        optimizer.flush()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.step()
    assert optimizer.flush()
    expected = make_model()
    train_plain(expected, torch.optim.SGD(expected.parameters(), lr=0.1), x, y, 32)
    assert_close(model, expected)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None, "4"])
def test_wrong_steps(steps):
    with pytest.raises(ValueError, match="steps must be a count of batches, at least 1, not"):
        offload.contrib.GradAccumulator(torch.optim.SGD(make_model().parameters(), lr=0.1), steps=steps)


def test_wrong_arguments():
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"takes a torch.optim.Optimizer, not Sequential"):
        offload.contrib.GradAccumulator(model, steps=2)
    with pytest.raises(ValueError, match="max_norm must be positive, not 0"):
        offload.contrib.GradAccumulator(inner, steps=2, max_norm=0)
    optimizer = offload.contrib.GradAccumulator(inner, steps=2)
    with pytest.raises(ValueError, match="wrap the optimizer once"):
        offload.contrib.GradAccumulator(optimizer, steps=2)
    with pytest.raises(ValueError, match=r"items must be the number .* not 0"):
        optimizer.scale(torch.ones(()), items=0)
    with pytest.raises(RuntimeError, match=r"step\(\) without a loss: write optimizer.scale"):
        optimizer.step()
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: None)


def test_a_copy_or_a_pickle_of_one_with_a_scheduler_steps_itself():
    """A scheduler sets `step` on the object."""
    parameter = nn.Parameter(torch.ones(2))
    accumulator = offload.contrib.GradAccumulator(torch.optim.SGD([parameter], lr=0.5), steps=1)
    StepLR(accumulator, 1)
    own, copied = copy.deepcopy((parameter, accumulator))
    for each, optimizer in ((own, copied), (None, pickle.loads(pickle.dumps(accumulator)))):
        each = next(iter(optimizer.param_groups[0]["params"])) if each is None else each
        optimizer.scale(each.sum(), items=1).backward()
        optimizer.step()
        assert torch.equal(each, torch.full((2,), 0.5))
    assert torch.equal(parameter, torch.ones(2))


def test_counts_may_be_numbers_of_numpy():
    parameter = nn.Parameter(torch.ones(2))
    accumulator = offload.contrib.GradAccumulator(torch.optim.SGD([parameter], lr=0.5), steps=numpy.int64(2))
    for _ in range(2):
        accumulator.scale(parameter.sum(), items=numpy.int64(4)).backward()
        accumulator.step()
    assert accumulator.stepped
    assert torch.equal(parameter, torch.full((2,), 0.5))
