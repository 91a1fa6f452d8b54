"""What has the memory of a NumPy array stays in memory: NumPy sees what torch writes, and torch what NumPy writes."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload.runtime.engine import Engine
from offload.torch_compat import borrowed_memory, holders
from offload.torch_compat.borrowed_memory import is_borrowed, storage_over
from offload.torch_compat.holders import holds_alone

KNOBS = {"n_tensors": 0, "min_tensor_bytes": 1024}


def loaded(folder, **options):
    torch.save({"a": torch.randn(3000)}, folder / "saved")
    return torch.load(folder / "saved", **options)["a"]


def of_safetensors(folder):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": torch.randn(3000)}, folder / "saved")
    return safetensors.load_file(folder / "saved")["a"]


def also_in_numpy(folder):
    tensor = torch.randn(3000)
    tensor.numpy()
    return tensor


BORROWED = {
    "an array": lambda folder: torch.from_numpy(np.zeros(3000)),
    "an array that as_tensor takes": lambda folder: torch.as_tensor(np.zeros(3000)),
    "a mapped file of NumPy": lambda folder: torch.from_numpy(np.memmap(folder / "a", np.float32, "w+", shape=3000)),
    "a buffer": lambda folder: torch.frombuffer(bytearray(12000), dtype=torch.float32),
    "an array by DLPack": lambda folder: torch.from_dlpack(np.zeros(3000)),
    "a tensor by DLPack": lambda folder: torch.from_dlpack(torch.zeros(3000)),
}
OWN = {
    "torch's": lambda folder: torch.randn(3000),
    "torch's, with an array that is gone": also_in_numpy,
    "a loaded tensor": loaded,
    "a mapped file of torch": lambda folder: loaded(folder, mmap=True),
    "a file of safetensors": of_safetensors,
    "a buffer of the library": lambda folder: torch.empty(0).set_(storage_over(bytearray(12000))),
}


@pytest.mark.parametrize("kind", BORROWED)
def test_borrowed_memory_is_not_held_alone(kind, tmp_path):
    tensor = BORROWED[kind](tmp_path)
    assert is_borrowed(tensor.untyped_storage())
    assert not holds_alone(tensor)


@pytest.mark.parametrize("kind", OWN)
def test_other_memory_is_held_alone(kind, tmp_path):
    tensor = OWN[kind](tmp_path)
    assert not is_borrowed(tensor.untyped_storage())
    assert holds_alone(tensor) or "safetensors" in kind  # which holds the storage too


def test_a_storage_over_a_buffer_has_its_part_of_it_and_keeps_it():
    buffer = bytearray(range(20))
    references = sys.getrefcount(buffer)
    storage = storage_over(buffer, 4, 8)
    assert list(storage) == list(range(4, 12))
    buffer[4] = 99
    assert storage[0] == 99
    assert sys.getrefcount(buffer) == references + 1
    del storage
    assert sys.getrefcount(buffer) == references


def test_where_torch_does_not_show_it_no_memory_is_borrowed(monkeypatch):
    monkeypatch.setattr(borrowed_memory, "_found", None)
    assert holds_alone(torch.from_numpy(np.zeros(3000)))


@pytest.fixture
def copies_end_at_once(monkeypatch):
    """Before a copy-out ends, what is read back has the memory from which it was copied."""
    monkeypatch.setattr(Engine, "limit_in_flight", Engine.drain)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 60), nn.GELU(), nn.Linear(60, 60))


def train(model, optimizer, array, write, **zero):
    found = []
    for number in range(3):
        optimizer.zero_grad(**zero)
        loss = model(torch.randn(8, 60, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        found += [loss.detach(), torch.tensor(array)]
        optimizer.step()
        if write:
            array *= np.float32(0.5)
        found.append(torch.tensor(array))
    return found


def a_parameter(is_on, requires_grad):
    model, array = make_model(), np.random.RandomState(0).randn(60, 60).astype(np.float32) / 8
    model[0].weight = nn.Parameter(torch.from_numpy(array), requires_grad=requires_grad)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    handle = offload.enable(model, parameters="all", **KNOBS) if is_on else None
    return train(model, optimizer, array, write=True), handle


def a_frozen_parameter(is_on):
    return a_parameter(is_on, requires_grad=False)


def a_trained_parameter(is_on):
    return a_parameter(is_on, requires_grad=True)


def a_gradient(is_on):
    model, array = make_model(), np.zeros((60, 60), np.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.grad = torch.from_numpy(array)
    knobs = {"optimizer": optimizer, "optimizer_state": True, "gradients": True}
    handle = offload.enable(model, **knobs, **KNOBS) if is_on else None
    return train(model, optimizer, array, write=False, set_to_none=False), handle


def state(is_on):
    model, array = make_model(), np.zeros((60, 60), np.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.from_numpy(array)
    handle = offload.enable(model, optimizer=optimizer, optimizer_state=True, **KNOBS) if is_on else None
    return train(model, optimizer, array, write=True), handle


SCENARIOS = [a_frozen_parameter, a_trained_parameter, a_gradient, state]


def assert_the_same(scenario):
    plain, (moved, handle) = scenario(False)[0], scenario(True)
    report = str(handle.report())
    handle.disable()
    assert all(map(torch.equal, plain, moved))
    return report


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda function: function.__name__)
def test_it_has_the_same_values_in_torch_and_in_numpy(scenario, copies_end_at_once):
    report = " ".join(assert_the_same(scenario).split())
    assert "memory" in report
    assert "NumPy array" in report or "their memory" in report


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda function: function.__name__)
def test_a_guard_that_is_left_out_is_missed(scenario, copies_end_at_once, monkeypatch):
    monkeypatch.setattr(holders, "is_borrowed", lambda storage: False)
    with pytest.raises(AssertionError):
        assert_the_same(scenario)
