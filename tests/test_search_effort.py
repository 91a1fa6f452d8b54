"""The table of bounds and tolerances: what it computes from them."""

import pytest

from offload.control.limits import LIMITS


@pytest.mark.parametrize(
    ("step_seconds", "tensors", "effort", "on_device"),
    [
        (0.01, 30, 0.05, 0.05),
        (0.25, 30, 0.05, 0.35),
        (2.5, 3000, 0.5 / 3, 1.0),
        (0.5, 1000, 0.1, 0.7),
        (60.0, 30, 1.0, 1.0),
    ],
)
def test_the_effort_of_a_search_inside_a_step(step_seconds, tensors, effort, on_device):
    assert LIMITS.search_effort(step_seconds, tensors, on_cpu=True) == pytest.approx(effort)
    assert LIMITS.search_effort(step_seconds, tensors, on_cpu=False) == pytest.approx(on_device)
