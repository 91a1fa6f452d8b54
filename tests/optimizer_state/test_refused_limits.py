"""What the error of a refused limit says of gradients and parameters: arguments that free them, and their bytes."""

import pickle

import pytest
import torch
from torch import nn

import offload
from offload.control import refusal
from offload.optimizer_state import mover
from offload.parameters.window import Window

LIMIT = 2 << 10
LEAST = 1024  # min_tensor_bytes
LAYER = 60 * 60 * 4
GRADIENTS = {"gradients", "step_in_backward"}


@pytest.fixture(autouse=True)
def any_number_of_bytes_is_worth_it(monkeypatch):
    monkeypatch.setattr("offload.control.refusal._WORTH_BYTES", 1)


def make_model():
    """Twelve equal layers, so that one update in backward takes little compared to all gradients."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(60, 60), nn.GELU())])


def refused(folder, make=make_model, kind=torch.optim.AdamW, passes=1, limit=LIMIT, **asked):
    """The error of a training run with `passes` backward passes for each update; None if there is none."""
    model = make()
    optimizer = kind([p for p in model.parameters() if p.requires_grad])
    knobs = {"memory_limit": limit, "min_tensor_bytes": LEAST, "recompute": False, "spill_dir": folder}
    with offload.enable(model, optimizer=optimizer, **knobs, **asked):
        try:
            train(model, optimizer, passes)
        except offload.InfeasibleLimitError as error:
            return error
    return None


def train(model, optimizer, passes):
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.ones(32, 60)).square().mean().backward()
        optimizer.step()


def names(error):
    return {knob.text.split("=")[0] for knob in error.knobs}


def knob(error, text):
    [found] = [each.bytes for each in error.knobs if each.text.startswith(text)]
    return found


def nbytes(parameters, least=0):
    return sum(each.nbytes for each in parameters if each.nbytes >= least)


def test_gradients_in_memory_at_the_peak(tmp_path):
    error = refused(tmp_path, optimizer_state=False)
    [in_memory] = [each.bytes for each in error.reasons if each.text.startswith("of gradients")]
    assert knob(error, "step_in_backward=True updates") == in_memory
    large = nbytes(make_model().parameters(), LEAST)
    assert knob(error, "gradients=True with optimizer_state=True lets") == min(in_memory, large)
    without = refused(tmp_path, optimizer_state=False, step_in_backward=True)
    assert 0 < error.least_limit_bytes - without.least_limit_bytes <= in_memory


def test_what_is_asked_for_already_is_not_named(tmp_path):
    moved, both = refused(tmp_path, optimizer_state=True), refused(tmp_path, optimizer_state=True, gradients=True)
    assert 0 < moved.least_limit_bytes - both.least_limit_bytes <= knob(moved, "gradients=True lets")
    assert not names(both) & GRADIENTS
    assert not names(refused(tmp_path, optimizer_state=True, step_in_backward=True)) & GRADIENTS


def test_a_peak_in_the_update(tmp_path):
    error = refused(tmp_path)
    assert any(each.text.startswith("in use during the optimizer's step") for each in error.reasons)
    gradients, large = nbytes(make_model().parameters()), nbytes(make_model().parameters(), LEAST)
    assert knob(error, "gradients=True with optimizer_state=True lets") == large
    assert knob(error, "step_in_backward=True with optimizer_state=True updates") == gradients
    for asked in ({"step_in_backward": True}, {"gradients": True}):
        without = refused(tmp_path, optimizer_state=True, **asked)
        assert without is None or without.least_limit_bytes < error.least_limit_bytes


@pytest.mark.parametrize("optimizer_state", ["auto", False])
def test_what_takes_the_place_of_gradients(tmp_path, monkeypatch, optimizer_state):
    """State that is read ahead, and gradients that are being written. In an update, the window has them anyway."""
    for limit in ("AHEAD_BYTES", "BEHIND_BYTES"):
        monkeypatch.setattr(mover, limit, nbytes(make_model().parameters()))
    found = names(refused(tmp_path, optimizer_state=optimizer_state)) & GRADIENTS
    assert found == (GRADIENTS if optimizer_state else {"step_in_backward"})


def test_accumulated_gradients_are_not_freed_in_backward(tmp_path):
    assert names(refused(tmp_path, passes=2, optimizer_state=False)) & GRADIENTS == {"gradients"}


class Repeat(nn.Module):
    """Makes a larger batch, so that the tensors of a layer are much larger than its parameters."""

    def forward(self, x):
        return x.repeat(16, 1)


def deep():
    """So many layers that the limit decides how many of them are in memory."""
    return nn.Sequential(Repeat(), *[nn.Linear(60, 60) for _ in range(60)])


class Temporary(nn.Module):
    """Needs a large tensor in forward alone."""

    def forward(self, x):
        with torch.no_grad():
            return x + 0 * torch.ones(4 << 20).sum()


def test_a_peak_without_gradients(tmp_path):
    error = refused(tmp_path, lambda: nn.Sequential(Temporary(), make_model()), optimizer_state=False)
    assert error.least_limit_bytes > 16 << 20
    assert not names(error) & GRADIENTS


class Own(torch.optim.AdamW):
    pass


def test_optimizers_that_would_have_to_be_tried(tmp_path):
    assert not names(refused(tmp_path, kind=Own, optimizer_state=False)) & GRADIENTS


def test_gradients_that_other_processes_wait_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not names(refused(tmp_path, optimizer_state=False)) & GRADIENTS


def half_frozen():
    model = make_model()
    model[:12].requires_grad_(False)
    return model


def test_parameters_that_could_move(tmp_path):
    model = half_frozen()
    frozen, every = nbytes(model[:12].parameters(), LEAST), nbytes(model.parameters(), LEAST)
    copied = LIMIT // 16 + LIMIT // 8
    error = refused(tmp_path, half_frozen, parameters=False)
    assert knob(error, 'parameters="frozen"') == frozen - LAYER  # that of the module that runs
    assert knob(error, 'parameters="all"') == every - LAYER - copied
    error = refused(tmp_path, half_frozen, parameters="frozen")
    assert knob(error, "parameters=") == every - frozen - LAYER - copied
    assert "parameters" not in names(refused(tmp_path, parameters="all"))


@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_least_limit_works_where_parameters_move(tmp_path, monkeypatch, is_guarded):
    """Under a higher limit, more bytes of parameters may be in memory at a time: a sixth more, here.

    How many are in memory at this moment depends on how many have been written, so that is left out.
    """
    monkeypatch.setattr(Window, "nbytes", lambda _: 0)
    if not is_guarded:
        monkeypatch.setattr(refusal, "_least_with_parameters", lambda error, _: error.least_limit_bytes)
    asked = {"parameters": "all", "optimizer_state": True, "step_in_backward": True}
    least = refused(tmp_path, deep, torch.optim.SGD, **asked).least_limit_bytes
    limit = least + (3 * LAYER if is_guarded else 0)
    assert (refused(tmp_path, deep, torch.optim.SGD, limit=limit, **asked) is None) is is_guarded


@pytest.mark.parametrize("least", [100, 1600, 16_000, 999_999])
def test_the_least_limit_is_the_least_that_includes_its_own_windows(least):
    def windows(limit):
        return min(20_000, limit // 16 + limit // 8)

    error = offload.InfeasibleLimitError(64, least, ())
    others = least - windows(64)
    found = refusal._least_with_parameters(error, windows)
    assert others + windows(found) <= found
    assert others + windows(found - 1) > found - 1


LATER = "(and more for optimizer state: no optimizer has stepped yet)"


@pytest.mark.parametrize(("passes", "lacks_it"), [(1, False), (2, True)])
def test_a_limit_that_is_refused_before_the_first_update_says_so(tmp_path, passes, lacks_it):
    """With accumulation, a plan is due before the first update."""
    error = refused(tmp_path, passes=passes)
    assert error.lacks_optimizer is lacks_it
    assert (LATER in str(error)) is lacks_it
    assert pickle.loads(pickle.dumps(error)).lacks_optimizer is lacks_it


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_step_that_is_refused_is_not_counted(tmp_path, is_guarded, monkeypatch):
    model = make_model()
    with offload.enable(
        model, memory_limit=LIMIT, min_tensor_bytes=LEAST, recompute=False, spill_dir=tmp_path
    ) as handle:
        model(torch.ones(32, 60)).square().mean().backward()
        if not is_guarded:
            monkeypatch.setattr(handle._enabled.on_device.counts, "begun", Ever())
        for _ in range(3):
            with pytest.raises(offload.InfeasibleLimitError):
                model(torch.ones(32, 60))
        assert (handle.report().to_dict()["steps"] == 1) is is_guarded


class Ever:
    """A gauge that only rises."""

    now = 1

    def add(self, more):
        self.now += max(more, 0)
