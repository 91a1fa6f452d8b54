"""The table of bounds and tolerances: what it computes from them."""

import pytest

from offload.control.limits import LIMITS


@pytest.mark.parametrize(
    ("step_seconds", "tensors", "effort", "on_device"),
    [
        (0.01, 30, 0.05, 0.05),
        (0.4, 30, 0.08, 0.56),
        (1.0, 3000, 0.2 / 3, 1.4 / 3),
        (0.5, 1000, 0.1, 0.7),
        (60.0, 30, 1.0, 1.0),
    ],
)
def test_the_effort_of_a_search_inside_a_step(step_seconds, tensors, effort, on_device):
    assert LIMITS.search_effort(step_seconds, tensors, on_cpu=True) == pytest.approx(effort)
    assert LIMITS.search_effort(step_seconds, tensors, on_cpu=False) == pytest.approx(on_device)


@pytest.mark.parametrize(("effort", "half"), [(1.0, 0.5), (0.08, 0.05), (0.05, 0.05)])
def test_half_of_an_effort_is_at_least_the_least(effort, half):
    assert LIMITS.halved(effort) == half
