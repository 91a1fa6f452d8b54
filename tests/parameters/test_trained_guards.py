"""Guards of trained parameters left out, one at a time: a scenario notices each."""

import contextlib
import functools

import pytest
from parameters import test_signal_handlers as handlers
from parameters import test_trained_access as access
from parameters import test_trained_faults as faults
from parameters import test_trained_training as training
from parameters import trained_rig
from torch import nn

import offload
from offload.optimizer_state import in_backward
from offload.parameters import moved_parameter, mover, stored_parameter, window
from offload.torch_compat.overrides import unseen


def sees(name, folder, way="chunks"):
    access.assert_true_values(access.SCENARIOS[name], folder, way)


def bits(folder, **given):
    trained_rig.assert_bits(folder, 4, **given)


def left_behind(self, parameter, record):
    """As `Window.updated`, without a note that an optimizer has run."""
    if not record.is_away_in(parameter) and not record.users:
        unseen(record.settle, parameter)


def renewed_beside(self, parameter):
    before = self.content
    self.content = unseen(self._store, parameter)
    self.window.placeholders.pop(before.placeholder_id, None)


def looks_then_takes(self, parameter):
    """As `StoredParameter._present`, but the memory is taken after the look."""
    return (None if self.is_away_in(parameter) else parameter), self.content


def forgets_at_once(self, parameter):
    """As `StoredParameter.forget`, which a signal handler may interrupt anywhere."""
    self.bring(parameter)
    parameter.__class__ = nn.Parameter
    if self._gradient_hook is not None:
        self._gradient_hook.remove()
    self._forget_storage()
    self.window.placeholders.pop(self.content.placeholder_id, None)
    parameter.__dict__.pop("_offload_stored", None)


def trusts_the_version(self, parameter):
    return not self.is_suspect and self.content.stored is not None


GUARDS = {
    "an update is written, whatever its version says": (
        [(window.Window, "updated", left_behind)],
        functools.partial(bits, make=training.Behind),
    ),
    "a version that has changed is written": (
        [(stored_parameter.StoredParameter, "is_current_in", trusts_the_version)],
        functools.partial(sees, "writing under no grad", way="alone"),
    ),
    "who was given a view may have written": (
        [(moved_parameter, "holds_alone", lambda parameter: True)],
        functools.partial(sees, "writing through views"),
    ),
    "fused kernels change no version": (
        [(moved_parameter, "writes_without_version", lambda function: False)],
        lambda folder: training.test_kernels_for_many_parameters_at_once({"fused": True}, "alone", folder),
    ),
    "a layer may write to its own weight in forward": (
        [(moved_parameter, "GIVES_MEMORY", frozenset()), (moved_parameter, "holds_alone", lambda parameter: True)],
        functools.partial(bits, kind=trained_rig.Clipped, way="alone"),
    ),
    "what the graph of a single function saves is known": (
        [(window.Window, "saving", lambda self: contextlib.nullcontext())],
        functools.partial(sees, "a product outside of the model"),
    ),
    "a graph that has saved the object reads the memory that it has then": (
        [(window, "SavedParameter", lambda parameter: None)],
        functools.partial(bits, kind=trained_rig.Looks, way="alone"),
    ),
    "a read for no graph takes the parameter's class from no other thread": (
        [(moved_parameter, "WITHOUT_GRAPH", frozenset())],
        access.test_a_state_dict_leaves_the_class_to_other_threads,
    ),
    "where hooks are forbidden the graph holds the memory": (
        [(moved_parameter, "hooks_forbidden_reason", lambda: None)],
        functools.partial(sees, "where hooks are forbidden"),
    ),
    "a gradient gets the parameter's strides": (
        [(stored_parameter.StoredParameter, "watch_gradient", lambda self, parameter: None)],
        training.test_gradients_have_the_strides_of_their_parameters,
    ),
    "an update that cannot begin is not taken for made": (
        [(in_backward, "updating", lambda parameters: contextlib.nullcontext())],
        faults.fails_at_its_update,
    ),
    "small parameters beside moved ones are of one kind": ([(in_backward, "kind_of", type)], bits),
    "torch chooses the same kernels": (
        [(mover, "allow_foreach", lambda kind: None)],
        training.test_torch_chooses_the_kernels_that_it_would_choose,
    ),
    "a trained parameter is copied as one": (
        [(moved_parameter, "requires_grad_of", lambda parameter: False)],
        functools.partial(sees, "copies"),
    ),
    "an update takes the place of what was stored": (
        [(stored_parameter.StoredParameter, "_renew", renewed_beside)],
        training.test_an_update_takes_the_place_of_what_was_stored,
    ),
    "a lost parameter can be loaded": (
        [(stored_parameter.StoredParameter, "begin_anew", lambda *_: False)],
        lambda folder: faults.test_a_read_that_goes_on_failing_is_told_and_a_checkpoint_goes_on(
            "error", 1, "chunks", folder
        ),
    ),
    "what backward reads cannot leave after the look": (
        [(stored_parameter.StoredParameter, "_present", looks_then_takes)],
        functools.partial(handlers.test_lines_that_move_parameters, "view"),
    ),
    "a parameter that is to stay cannot leave again": (
        [(stored_parameter.StoredParameter, "forget", forgets_at_once)],
        functools.partial(handlers.test_lines_that_end_moving, handlers.Trained),
    ),
    "trained parameters stay unless all are asked for": (
        [(mover, "is_movable", lambda *_, **__: True), (stored_parameter, "is_movable", lambda *_, **__: True)],
        training.test_trained_ones_stay_with_frozen,
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.long
def test_a_guard_that_is_left_out_is_missed(guard, tmp_path, monkeypatch):
    left_out, scenario = GUARDS[guard]
    for each in left_out:
        monkeypatch.setattr(*each)
    missed = AssertionError, AttributeError, RuntimeError, ValueError, offload.ParameterError, pytest.fail.Exception
    with pytest.raises(missed):
        scenario(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("guard", GUARDS)
def test_with_the_guard_it_passes(guard, tmp_path):
    GUARDS[guard][1](tmp_path)
