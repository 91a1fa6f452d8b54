"""Guards of optimizer state left out, one at a time: a scenario of users' code notices each."""

import functools
import sys

import pytest
from optimizer_state import test_own_optimizers as own
from optimizer_state import test_users_state as states
from optimizer_state import test_wrapped_steps as steps
from optimizer_state.state_rig import assert_equal
from optimizer_state.users_rig import both

from offload.optimizer_state import divisible, mover, streamed_state, surroundings
from offload.runtime import random_numbers

GUARDS = {
    "chunks call what the hooks surround": (
        [
            (mover, "step_behind_hooks", lambda optimizer: type(optimizer).step),
            (divisible, "is_own_step", lambda *_: True),
        ],
        steps.a_wrapper_of_the_class_that_hides_it,
    ),
    "a wrapped step is not divided": (
        [(divisible, "is_own_step", lambda *_: True)],
        steps.a_wrapper_between_two_hooked_steps,
    ),
    "a step that runs the hooks again is not divided": (
        [(divisible, "steps_through_hooks", lambda optimizer: False)],
        steps.a_base_that_gets_hooks_later,
    ),
    "what other code holds stays": (
        [(streamed_state, "_HELD_ONCE", sys.maxsize >> 1)],
        states.a_tensor_that_the_program_holds,
    ),
    "hooks of state_dict see the state itself": (
        [(streamed_state, "is_called_by_state_dict", lambda: True)],
        states.hooks_that_change_the_state_as_it_is_saved,
    ),
    "what a step counts elsewhere is looked at": (
        [(surroundings.Surroundings, "has_changed", lambda self: False)],
        functools.partial(own.trained_with, kind=own.CountsInClass),
    ),
    "the trial leaves no trace": (
        [(surroundings.Surroundings, "restore", lambda self: None)],
        functools.partial(own.trained_with, kind=own.CountsInClass),
    ),
    "what cannot be compared is not tried": (
        [(surroundings, "_is_fixed", lambda value: True)],
        functools.partial(own.trained_with, kind=own.CountsWithAnIterator),
    ),
    "the trial draws the random numbers of the program again": (
        [(random_numbers.RandomNumbers, "restore", lambda self: None)],
        functools.partial(own.trained_with, kind=own.DrawsFromPython),
    ),
    "a chunked step that draws more random numbers is noticed": (
        [(random_numbers.RandomNumbers, "is_same", lambda self, other: True)],
        functools.partial(own.trained_with, kind=own.DrawsInVain),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_is_left_out_is_missed(guard, tmp_path, monkeypatch):
    left_out, scenario = GUARDS[guard]
    plain, moved, on = both(scenario, tmp_path)
    assert_equal(moved, plain)
    on.off()
    for each in left_out:
        monkeypatch.setattr(*each)
    plain, moved, on = both(scenario, tmp_path)
    with pytest.raises(AssertionError):
        assert_equal(moved, plain)
    on.off()
