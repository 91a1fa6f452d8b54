"""Guards of frozen parameters left out, one at a time: a scenario notices each."""

import contextlib
import functools

import pytest
import torch
from parameters import test_frozen_access as access
from parameters.frozen_rig import STEPS, Attends, assert_away, assert_equal, away, enable, loss_of, make_model, train

from offload.parameters import keep, moved_parameter, mover, stored_parameter, window
from offload.torch_compat.tensors import storage_identity


def sees(name, folder):
    access.test_a_program_sees_true_values(access.SCENARIOS[name], folder)


def hooks_that_hold(folder):
    """What the graph holds is no memory, whatever hooks are on."""
    for around in (contextlib.nullcontext(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)):
        model = make_model().eval()
        enable(model, folder, n_tensors=0)
        with around:
            loss = loss_of(model, 0)
        assert_away(model)
        loss.backward()


def an_address(folder):
    model = make_model()
    enable(model, folder)
    model.first.weight.data_ptr()
    for parameter in model.parameters():
        parameter.sum()
    assert not away(model)[0]
    loss_of(model, 0)
    assert_away(model)


def holds_what_is_shared(folder):
    """A view from before stays the parameter's memory."""
    plain, moved = make_model(), make_model()
    views = [model.first.weight.detach() for model in (plain, moved)]
    enable(moved, folder)
    for model, view in zip((plain, moved), views, strict=True):
        view.mul_(2)
        model.eval()
    assert_equal([loss_of(moved, 0).detach()], [loss_of(plain, 0).detach()])


def reserved_identities(folder):
    """Memory that the program gives a parameter behind the library's back is not taken for what it had before."""
    model = make_model()
    enable(model, folder, n_tensors=0)
    weight = model.first.weight
    for number in range(20):
        held = weight[:]  # in memory, and noted
        with torch._C.DisableTorchFunctionSubclass():
            weight.data = torch.empty(0)
            del held
            weight.data = torch.full((32, 32), float(number))  # often at the same address
        loss_of(model, 0)
        assert_away(model)
        assert torch.equal(weight, torch.full((32, 32), float(number)))


def a_stale_identity(folder):
    """An interrupt has left the window with the identity of a storage that is gone; another tensor has it now."""
    model = make_model()
    enable(model, folder, n_tensors=0)
    held = model.first.weight[:]  # in memory
    record = model.first.weight._offload_stored
    other = torch.ones(32, 32)
    for known in (record.window.present, record.window.placeholders):
        known[storage_identity(other.untyped_storage())] = record.reference
        assert record.window.saved(other) is None
        known.clear()
    del held


GUARDS = {
    "a changed parameter is written again": (
        [(stored_parameter.StoredParameter, "is_current_in", lambda self, parameter: True)],
        functools.partial(sees, "writing in place"),
    ),
    "who was given the memory may have written": (
        [(moved_parameter, "GIVES_MEMORY", frozenset())],
        functools.partial(sees, "writing behind the version"),
    ),
    "an address is good until the next forward": (
        [(moved_parameter, "GIVES_ADDRESS", frozenset())],
        an_address,
    ),
    "what others hold stays": (
        [(stored_parameter, "holds_alone", lambda parameter: True)],
        functools.partial(sees, "writing through what was read long ago"),
    ),
    "what others share never leaves": ([(mover, "holds_alone", lambda parameter: True)], holds_what_is_shared),
    "memory that is put in its place is noticed": (
        [(stored_parameter.StoredParameter, "look", lambda self, parameter: None)],
        functools.partial(sees, "other memory in its place"),
    ),
    "autograd does not hold the parameter's memory": (
        [(keep, "hooks_may_hold_tensors", lambda: False)],
        hooks_that_hold,
    ),
    "hooks of the program do not hold it either": (
        [(keep, "hooks_may_hold_tensors", lambda: keep.innermost_hooks() is None)],
        hooks_that_hold,
    ),
    "what is saved while it is away is known": (
        [(window.Window, "saved", lambda self, tensor: None)],
        functools.partial(sees, "a function of the program saves it"),
    ),
    "a trained parameter stays": (
        [
            (stored_parameter, "is_movable", lambda *args, **_: True),
            (window, "gradient_allows_leaving", lambda *_, **__: True),
        ],
        functools.partial(sees, "it is trained from now on"),
    ),
    "the identity of a storage is reserved": (
        [(stored_parameter, "StorageWatch", lambda storage: None)],
        reserved_identities,
    ),
    "a stale identity is not the parameter's": (
        [(stored_parameter.StoredParameter, "is_in_storage", lambda self, parameter, identity: True)],
        a_stale_identity,
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.long
def test_a_guard_that_is_left_out_is_missed(guard, tmp_path, monkeypatch):
    left_out, scenario = GUARDS[guard]
    for each in left_out:
        monkeypatch.setattr(*each)
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        scenario(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("guard", GUARDS)
def test_with_the_guard_it_passes(guard, tmp_path):
    GUARDS[guard][1](tmp_path)


@pytest.mark.long
def test_all_steps_of_the_scenarios(tmp_path):
    plain, moved = make_model(Attends), make_model(Attends)
    enable(moved, tmp_path)
    assert_equal(train(moved, STEPS), train(plain, STEPS))
