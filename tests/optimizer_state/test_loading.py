"""State that `load_state_dict` has to convert: other hooks, sparse state, failures."""

import copy
import io

import pytest
import torch
from optimizer_state.state_rig import assert_equal
from torch import nn

import offload
from offload.optimizer_state import streamed_state

KNOBS = {"n_tensors": 0, "optimizer_state": True, "min_tensor_bytes": 1024}


def trained(is_offloaded, tmp_path):
    """A model and its optimizer after a step, and a checkpoint whose state is in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    if is_offloaded:
        offload.enable(model, optimizer=optimizer, spill_dir=tmp_path, **KNOBS)
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for state in checkpoint["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(torch.bfloat16)
    return optimizer, checkpoint


class Tensors(list):
    """Torch accepts it as a list, but does not look into it as into one."""


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_later_hook_may_compute_with_the_state(is_offloaded, tmp_path):
    optimizer, checkpoint = trained(is_offloaded, tmp_path)
    untouched = copy.deepcopy(checkpoint["state"])

    def third(_, loaded):
        state = {}
        for key, values in loaded["state"].items():
            lighter = values["exp_avg"].to(torch.float32).div_(3)
            assert type(lighter) is type(values["exp_avg_sq"] * 2) is torch.Tensor
            both = torch.stack(Tensors(values[name] for name in ("exp_avg", "exp_avg_sq")))
            assert_equal(list(both), [untouched[key][name] for name in ("exp_avg", "exp_avg_sq")])
            assert not hasattr(values["exp_avg"], "placements")
            state[key] = {**values, "exp_avg": lighter}
        return {**loaded, "state": state}

    optimizer.register_load_state_dict_pre_hook(third)
    optimizer.load_state_dict(checkpoint)
    assert_equal(checkpoint["state"], untouched)
    for key, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], untouched[key]["exp_avg"].float() / 3)
        assert torch.equal(state["exp_avg_sq"], untouched[key]["exp_avg_sq"].float())


def test_sparse_state_is_loaded_as_without(tmp_path):
    model = nn.Sequential(nn.Embedding(500, 64, sparse=True), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with offload.enable(model, optimizer=optimizer, spill_dir=tmp_path, **KNOBS):
        model(torch.randint(0, 500, (300,))).square().mean().backward()
        optimizer.step()
        checkpoint = copy.deepcopy(optimizer.state_dict())
        assert checkpoint["state"][0]["momentum_buffer"].is_sparse
        checkpoint["state"][0]["momentum_buffer"] = checkpoint["state"][0]["momentum_buffer"].double()
        optimizer.load_state_dict(checkpoint)
        buffer = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert torch.equal(buffer.to_dense(), checkpoint["state"][0]["momentum_buffer"].to_dense().float())


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_later_hook_may_copy_and_save_the_state(is_offloaded, tmp_path):
    optimizer, checkpoint = trained(is_offloaded, tmp_path)
    copies = []

    def look(_, loaded):
        file = io.BytesIO()
        torch.save(loaded, file)
        file.seek(0)
        copies.extend([copy.deepcopy(loaded)["state"], torch.load(file)["state"]])

    optimizer.register_load_state_dict_pre_hook(look)
    optimizer.load_state_dict(checkpoint)
    for found in copies:
        assert_equal(found, checkpoint["state"])
        assert {type(value) for state in found.values() for value in state.values()} == {torch.Tensor}


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_after_a_conversion_that_failed_state_can_be_saved(is_offloaded, tmp_path, monkeypatch):
    optimizer, checkpoint = trained(is_offloaded, tmp_path)
    convert, calls = streamed_state.convert, []

    def failing(key, state):
        calls.append(key)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("the device is full")
        convert(key, state)

    monkeypatch.setattr(streamed_state, "convert", failing)
    if is_offloaded:
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.load_state_dict(checkpoint)
    else:
        optimizer.load_state_dict(checkpoint)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)["state"]
    for key, state in checkpoint["state"].items():
        assert torch.equal(loaded[key]["exp_avg"], state["exp_avg"].float())


def rolled_back(folder, *, copies=False):
    """The weights and the state after each of three rollbacks to one dictionary; the dictionary, and what it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if folder is not None:
        offload.enable(model, optimizer=optimizer, spill_dir=folder, **KNOBS)

    def train():
        for number in range(1, 4):
            optimizer.zero_grad()
            model(number * torch.ones(4, 64)).square().mean().backward()
            optimizer.step()

    train()
    weights, best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    before, found = copy.deepcopy(best), []
    for _ in range(3):
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(best) if copies else best)
        train()
        found.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    return found, best, before


def assert_rolled_back(folder):
    found, best, before = rolled_back(folder)
    expected, _, _ = rolled_back(None, copies=True)
    assert_equal(best, before)
    assert_equal(found, expected)
    assert_equal(found[2], found[0])


def test_small_tensors_are_loaded_with_their_attributes_and_inside_of_inference_mode(tmp_path):
    optimizer, _ = trained(True, tmp_path)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    checkpoint["state"][0]["step"].tag = "mine"
    with torch.inference_mode():
        optimizer.load_state_dict(checkpoint)
    step = optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]
    assert (step.tag, step.is_inference()) == ("mine", False)
    optimizer.step()
    assert (int(step), int(checkpoint["state"][0]["step"])) == (2, 1)


def test_a_dictionary_can_be_loaded_again(tmp_path):
    assert_rolled_back(tmp_path)


def test_if_small_tensors_are_not_copied_it_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(streamed_state, "is_replaceable", lambda value: value.nbytes >= KNOBS["min_tensor_bytes"])
    with pytest.raises(AssertionError):
        assert_rolled_back(tmp_path)
