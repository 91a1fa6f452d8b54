"""Every guard of recomputation, left out: a test beside this one has to miss it."""

import gc
import inspect
import textwrap
from functools import partial
from unittest import mock

import pytest
import test_changes
import test_following
import test_graphs
import test_modes
import test_values
import test_workspaces
import torch
from forced import Forcing

from offload.control import enabled_model
from offload.profiling import recipe_trial
from offload.recomputation import following, operators, recipe, recorder, slicing, values
from offload.runtime import engine, hooks, recomputation, recomputed_storage
from offload.torch_compat import settings

# Guard: where it stands, its text, what stands there instead, and the test that misses it.
GUARDS = {
    "random numbers are drawn from the state before": (
        (recipe.Step, "run", "self.random is not None", "False"),
        test_values.test_random_numbers_are_drawn_again,
    ),
    "a recipe runs without casts": (
        (recipe, "undisturbed", "torch._C._DisableAutocast()", "torch.enable_grad()"),
        test_values.test_backward_within_autocast,
    ),
    "a recipe is no part of a batched backward": (
        (recipe, "undisturbed", "torch._C._ExcludeDispatchKeyGuard(_VMAP_MODE)", "torch.enable_grad()"),
        test_values.test_random_numbers_in_a_batched_backward,
    ),
    "bytes that changed are no source": (
        (recipe_trial._Trial, "_refuse_changed", "any(source.is_changed", "any(False"),
        test_values.test_bytes_that_changed_while_they_were_copied,
    ),
    "a word of a workspace that differs was not written": (
        (recipe_trial, "is_equal_where_written", "(other & (word != _FILL_WORD)).any()", "False"),
        test_workspaces.test_a_written_word_that_differs_is_refused,
    ),
    "blank memory is no source": (
        (slicing.Cut, "take_in", "value.call.operator.is_blank and not is_written", "False"),
        test_values.test_blank_memory_is_no_source,
    ),
    "operators in any order are refused": (
        (operators, "_look", "name in REFUSED", "False"),
        test_values.test_operators_that_add_up_in_any_order,
    ),
    "operators of others are refused": (
        (operators, "_look", 'namespace not in ("aten", "prims")', "False"),
        test_values.test_operators_of_others,
    ),
    "a source that stays has its version checked": (
        (recipe.Recipe, "load", "source.is_changed", "False"),
        test_changes.test_a_source_changed_later_is_never_read,
    ),
    "a small tensor is read as it was": (
        (values.Held, "is_usable", "self.is_changed", "False"),
        test_changes.test_a_buffer_that_changes_within_forward,
    ),
    "a small tensor is copied": (
        (
            values.Held,
            "is_usable",
            "self.is_own or (self.is_state and not is_saved and self.nbytes <= COPIED_NBYTES_MAX)",
            "False",
        ),
        test_changes.test_a_small_tensor_that_changes_before_backward,
    ),
    "settings of torch are put in force": (
        (recipe.Recipe, "_run_steps", "put_in_force(step.settings)", "pass"),
        test_changes.test_settings_of_torch_are_those_of_forward,
    ),
    "an operator reads the version that was recorded": (
        (recorder.OperatorRecorder, "_note", "value.version != version_of(given)", "False"),
        test_changes.test_changes_by_another_thread,
    ),
    "a followed operator reads the version that was bound": (
        (following.FollowingRecorder, "_binds_tensor", "value.version != version_of(given)", "False"),
        test_following.test_a_write_by_another_thread,
    ),
    "a followed operator reads the same values": (
        (following.FollowingRecorder, "_binds_tensor", "bound is not value", "False"),
        test_following.test_arguments_in_another_order,
    ),
    "a followed operator sees its arguments as before": (
        (following.FollowingRecorder, "_binds_tensor", "expected.view.is_of(given)", "True"),
        test_following.test_tensors_seen_otherwise,
    ),
    "a write to what is known ends the following": (
        (
            following.FollowingRecorder,
            "_follow_or_record",
            "not self._writes_known(line, operator, args, kwargs)",
            "True",
        ),
        test_following.test_a_write_through_data,
    ),
    "written lists have new versions": (
        (recorder, "run", "version_of(tensor) == version", "False"),
        test_following.test_a_list_written_after_saving_is_the_usual_error,
    ),
    "zeros have signs": (
        (following, "_is_same", "repr(expected) == repr(given)", "True"),
        test_following.test_signs_of_zero,
    ),
    "other numbers are the step's": (
        (following.FollowingRecorder, "_binds", "same = same and _is_same(expected, given)", "pass"),
        test_following.test_shapes_and_lists_are_those_of_the_step_alone,
    ),
    "settings are the step's": (
        (following.FollowingRecorder, "_binds", "settings != call.settings", "False"),
        test_following.test_settings_are_those_of_the_step_alone,
    ),
    "random numbers are the step's": (
        (following.FollowingRecorder, "_binds", "random is not None", "False"),
        test_values.test_random_numbers_are_drawn_again,
    ),
    "another operator ends the following": (
        (following.FollowingRecorder, "_follow_or_record", "line.func is func", "True"),
        test_following.test_another_operator_in_the_same_place,
    ),
    "recurrent layers run the kernel for training": (
        (settings, "_apply", "read() != value", "read() != value and read is not torch.is_grad_enabled"),
        test_following.test_recurrent_layers,
    ),
    "without gradients no factor is saved": (
        (recorder.OperatorRecorder, "saves_factors", " and torch.is_grad_enabled()", ""),
        test_changes.test_a_weight_used_without_gradients_may_change,
    ),
    "a step in another mode is another step": (
        (enabled_model, "signature_of", "kinds += modes_of_others()", "pass"),
        test_modes.test_a_mode_of_later_steps_that_changes_results,
    ),
    "a window opens only where no other mode is on": (
        (recorder.OperatorRecorder, "resume", "mode_count() != self._modes", "False"),
        test_modes.test_modes_of_others_come_and_go,
    ),
    "the mode stays for a conjugated tensor": (
        (recomputation.DroppedTensors, "passed", "self._was_on and is_lazy", "False"),
        test_modes.test_a_window_that_ends_in_the_pack_of_a_conjugated_tensor,
    ),
    "a generator given by position is set back": (
        (recorder, "random_state", "(*args, *kwargs.values())", "kwargs.values()"),
        partial(test_values.test_a_generator_that_an_operator_takes_by_position, draw=torch.poisson),
    ),
    "an added term says nothing of the factors": (
        (recorder.OperatorRecorder, "saves_factors", "if place not in operator.added", ""),
        partial(
            test_changes.test_a_weight_of_which_autograd_needs_no_gradient_may_change,
            product=lambda h, weight: torch.addmm(h[:, :64] * 2, torch.ones(512, 64), weight),
        ),
    ),
    "the right side of a linear system is no factor": (
        (operators, "_look", 'saves_factors=is_heavy and not name.startswith("linalg_")', "saves_factors=is_heavy"),
        partial(
            test_changes.test_a_weight_of_which_autograd_needs_no_gradient_may_change, product=test_changes.right_side
        ),
    ),
    "within other hooks nothing is known of the factors": (
        (recorder.OperatorRecorder, "saves_factors", " and innermost_hooks(while_tracing=True) == self._hooks", ""),
        partial(test_changes.test_a_weight_that_other_hooks_save_may_change, within=test_changes.hooked),
    ),
    "recipes run before their parameters are stepped": (
        (engine.Engine, "settle_dropped", "dropped.settle(storages)", "pass"),
        test_changes.test_an_optimizer_steps_while_recipes_still_read_its_parameters,
    ),
    "a settled tensor stays for backward": (
        (recomputed_storage.RecomputedStorage, "_drop_storage", "not self._is_settled", "True"),
        test_changes.test_an_optimizer_steps_while_recipes_still_read_its_parameters,
    ),
    "long chains need no recursion": (
        (recomputed_storage.RecomputedStorage, "_made", "self._missing_below()", "()"),
        test_graphs.test_a_long_chain_of_dropped_tensors,
    ),
    "the mode goes off with the step": (
        (hooks.HookContext, "__exit__", "self._hooks.end_forward()", "pass"),
        partial(test_modes.test_an_exception_leaves_no_mode, kind=ValueError),
    ),
}


def left_out(owner, name, text, instead):
    """A function with a part of its source replaced."""
    found = getattr(owner, name)
    function = found.fget if isinstance(found, property) else inspect.unwrap(found)
    source = textwrap.dedent(inspect.getsource(function))
    assert text in source, f"{name} does not read {text!r} any more"
    names = dict(function.__globals__)
    exec(source.replace(text, instead).replace("super()", f"super({getattr(owner, '__name__', '')}, self)"), names)
    made = property(names[name]) if isinstance(found, property) else names[name]
    return mock.patch.object(owner, name, made)


def run(test, spill_dir):
    test(Forcing(spill_dir))
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.long
@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_is_missed(guard, tmp_path):
    where, test = GUARDS[guard]
    operators._known.clear()
    try:
        # The trial's second look in backward would refuse some of these recipes, and hide that the guard is left out.
        blind = mock.patch.object(recipe_trial.RecipeTrial, "unpacking")
        with blind, left_out(*where), pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
            run(test, str(tmp_path))
    finally:
        operators._known.clear()
        while torch._C._len_torch_dispatch_stack():
            torch._C._pop_torch_dispatch_stack(None)
        gc.collect()
