"""Every guard of regions, left out: a test beside this one has to miss it."""

from functools import partial

import pytest
import test_refused_regions
import test_regions
from region_rig import rig  # noqa: F401
from test_guards import left_out

from offload.control.controller import PlanController
from offload.control.regions import CompiledRegions
from offload.runtime import regions


def patched(test):
    """A test that takes a `monkeypatch`, called without one."""

    def call(tmp_path):
        with pytest.MonkeyPatch.context() as monkeypatch:
            test(tmp_path, monkeypatch)

    return call


# Guard: where it stands, its text, what stands there instead, and the test that misses it.
GUARDS = {
    "what changes the module runs once": (
        (regions, "_why_not", "not is_held or not before.is_same()", "False"),
        test_refused_regions.test_a_region_that_changes_an_attribute,
    ),
    "what writes to its inputs runs once": (
        (regions, "_why_not", "list(now) == then", "True"),
        test_refused_regions.test_a_region_that_writes_to_its_input,
    ),
    "hooks are called once": (
        (regions, "_why_not", "_calls_hooks(part)", "False"),
        test_refused_regions.test_a_region_with_a_hook,
    ),
    "results are compared": (
        (regions.RegionTrial, "_run_again", "_have_same_bits(result, again)", "True"),
        test_refused_regions.test_a_region_that_gives_other_bits,
    ),
    "the trial leaves the random state as it is": (
        (regions.RegionTrial, "_run_again", "stack.enter_context(as_before(generator, state))", "pass"),
        partial(test_regions.test_compiled_blocks_run_again_and_give_the_same_bits, "in place"),
    ),
    "a changed parameter is an error": (
        (regions._Rerun, "__call__", "self._before.check()", "pass"),
        partial(test_regions.test_a_parameter_that_changes_before_backward, how="in place"),
    ),
    "modules run as in forward": (
        (regions._Snapshot, "in_force", "own.get(name, value) != value", "False"),
        test_regions.test_a_mode_that_is_switched_between_forward_and_backward,
    ),
    "settings of torch are put in force": (
        (regions._Rerun, "__call__", "put_in_force(self._settings)", "pass"),
        test_regions.test_settings_of_torch_are_those_of_forward,
    ),
    "what draws numbers of Python's runs once": (
        (regions, "_python_state", "str(random.getstate())", '""'),
        partial(
            test_refused_regions.test_a_region_with_side_effects_runs_once, test_refused_regions.draw_a_python_number
        ),
    ),
    "objects are neither given nor returned": (
        (regions.RegionTrial, "run", "not _are_plain((args, kwargs, result))", "False"),
        test_refused_regions.test_a_region_that_returns_an_object,
    ),
    "a trial keeps the limit": (
        (regions.RegionTrial, "run", "self._saved_bytes + output_bytes > self._room_bytes", "False"),
        patched(test_refused_regions.test_no_room_to_try),
    ),
    "an interrupted trial proves nothing": (
        (regions.RegionTrial, "run", 'self.refusal = "its trial was interrupted"', "pass"),
        patched(test_refused_regions.test_an_interrupted_trial_proves_nothing),
    ),
    "errors of a second run are the library's": (
        (regions.RegionTrial, "_run_again", "except _REFUSALS", "except ()"),
        test_refused_regions.test_a_region_that_raises_when_run_again,
    ),
    "inputs that change later are noticed": (
        (regions.RegionTrial, "_watch", "version_of(counter) != version", "False"),
        test_refused_regions.test_inputs_that_are_changed_after_the_region,
    ),
    "another mode runs once": (
        (regions.RegionTrial, "is_as_tried", "_modes(part) == self._modes and not _calls_hooks(part)", "True"),
        test_regions.test_modes_and_hooks_that_come_after_the_trial,
    ),
    "another kind of input runs once": (
        (regions.RegionTrial, "is_as_tried", " and _are_plain((args, kwargs))", ""),
        test_regions.test_objects_that_come_after_the_trial,
    ),
    "excluded parts run once": (
        (
            CompiledRegions,
            "begin_trial",
            "any(_is_within(name, other) or _is_within(other, name) for other in options.exclude)",
            "False",
        ),
        test_refused_regions.test_excluded_parts_and_those_that_may_not_be_heavy,
    ),
    "a parameter of other memory is changed": (
        (regions._Snapshot, "_changed", "_storage_of(tensor) != storage", "False"),
        partial(test_regions.test_a_parameter_that_changes_before_backward, how="data"),
    ),
    "a part that runs twice is no region": (
        (CompiledRegions, "choose", "trial.calls == 1", "True"),
        test_refused_regions.test_a_part_that_runs_twice,
    ),
    "a whole region is not cheap": (
        (CompiledRegions, "begin_trial", 'options.recompute == "auto"', "True"),
        test_refused_regions.test_excluded_parts_and_those_that_may_not_be_heavy,
    ),
    "a trial ends with its step": (
        (CompiledRegions, "end_trial", "region.is_trying = False", "pass"),
        test_regions.test_the_trial_ends_with_its_step,
    ),
    "a trial that deviates is repeated": (
        (CompiledRegions, "repeat_trial", "self._tried is planned", "False"),
        test_refused_regions.test_a_trial_that_deviates_is_repeated,
    ),
    "a borrowed plan that is not feasible fails no step": (
        (PlanController, "_borrow", "except InfeasibleLimitError", "except ()"),
        patched(test_refused_regions.test_a_smaller_shape_for_which_no_plan_with_regions_is_feasible),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_is_missed(guard, tmp_path):
    where, test = GUARDS[guard]
    with left_out(*where), pytest.raises((AssertionError, RuntimeError, ValueError, pytest.fail.Exception)):
        test(tmp_path=tmp_path)
