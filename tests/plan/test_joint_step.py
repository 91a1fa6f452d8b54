"""Steps with recomputed tensors that are prepared without a trace: the same as those of `recomputed`, in every bit."""

import naive
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.plan import Link
from offload.plan.joint_step import JointSteps
from offload.plan.placement import Step
from offload.plan.recompute import recomputed

FIELDS = (
    *("link", "node_count", "count", "ids", "bytes", "packed", "release_min", "first_backward", "out_seconds"),
    *("in_seconds", "overhead_seconds", "seconds", "clock", "copy_in_order", "copy_in_rank"),
)


@given(naive.traces(), st.integers(0, 1000), st.data())
@settings(deadline=None, max_examples=200)
def test_it_is_the_step_of_the_trace_in_which_they_are_recomputed(trace, seed, data):
    trace, link = naive.with_recipes(trace, seed), Link(3.0, 7.0, 0.25, 0.01, 0.001)
    steps = JointSteps(trace, link)
    choice = sorted(tensor.id for tensor in trace.tensors if tensor.recompute)
    for _ in range(3):
        dropped = data.draw(st.sets(st.sampled_from(choice))) if choice else set()
        found, expected = steps.step(dropped), Step(recomputed(trace, dropped), link)
        assert {name: getattr(found, name) for name in FIELDS} == {name: getattr(expected, name) for name in FIELDS}
        assert found.unswapped_bytes.dtype == expected.unswapped_bytes.dtype
        assert np.array_equal(found.unswapped_bytes, expected.unswapped_bytes)
        chosen = range(found.count)
        assert found.releases(chosen, 1 << 40) == expected.releases(chosen, 1 << 40)
