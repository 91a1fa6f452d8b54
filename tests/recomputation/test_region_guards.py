"""Every guard of regions, left out: a test beside this one has to miss it."""

from functools import partial

import pytest
import test_refused_regions
import test_regions
from region_rig import rig  # noqa: F401
from test_guards import left_out

from offload.runtime import regions

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
}


@pytest.mark.long
@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_is_missed(guard, tmp_path):
    where, test = GUARDS[guard]
    with left_out(*where), pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        test(tmp_path=tmp_path)
