"""The native part of placement: what it refuses, and that its plans are timed as `simulate` times them."""

import random

import naive
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _core
from offload.plan import Link, simulate
from offload.plan.placement import Step

NODES = 4
COLUMNS = {
    "bytes": [8],
    "packed": [0],
    "release_min": [1],
    "first_backward": [3],
    "out_seconds": [0.5],
    "in_seconds": [0.5],
    "overhead_seconds": [0.0],
    "copy_in_rank": [0],
    "seconds": [1.0] * NODES,
    "unswapped_bytes": [8] * NODES,
}


def test_the_columns_of_a_valid_step_are_accepted():
    placer = _core.Placer(*COLUMNS.values())
    # Its copy-out ends at 1.5, so it is released at node 2; its copy-in would begin at 2.5, in node 2 as well.
    assert placer.place([0], 8, float("inf"), 1.0, {}) == (4.0, (), (), (), [])
    assert placer.headroom([0], 8).tolist() == [0, 8, 8, 0]
    assert placer.releases([0], 8) == [2]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        *((name, [], "columns of tensors differ in length") for name in list(COLUMNS)[1:8]),
        ("unswapped_bytes", [8] * (NODES - 1), "unswapped_bytes needs one value per node"),
        ("packed", [-1], "0 <= packed < release_min"),
        ("release_min", [0], "packed < release_min"),
        ("release_min", [4], "release_min <= first_backward"),
        ("first_backward", [NODES], "first_backward < nodes"),
    ],
)
def test_columns_that_do_not_fit_are_refused(column, values, message):
    with pytest.raises(ValueError, match=message):
        _core.Placer(*{**COLUMNS, column: values}.values())


@pytest.mark.parametrize("index", [-1, 1])
@pytest.mark.parametrize("call", ["headroom", "place", "releases"])
def test_a_tensor_that_does_not_exist_is_refused(call, index):
    placer = _core.Placer(*COLUMNS.values())
    more = (float("inf"), 1.0, {}) if call == "place" else ()
    with pytest.raises(IndexError, match="no tensor has this index"):
        getattr(placer, call)([index], 8, *more)


@pytest.mark.parametrize("limit_bytes", [(1 << 63) - 1, 1 << 63, 1 << 70])
def test_a_limit_of_more_than_64_bits_is_none(limit_bytes):
    step = Step.__new__(Step)
    step._placer = _core.Placer(*COLUMNS.values())
    assert min(step.headroom([0], limit_bytes)) > 0
    assert step.place([0], limit_bytes) is not None
    assert step.releases([0], limit_bytes) == {0: 2}


@given(naive.traces(), st.integers(0, 1000))
@settings(deadline=None, max_examples=200)
def test_a_placement_is_timed_as_its_plan(trace, seed):
    rng, link = random.Random(seed), Link(3.0, 7.0, 0.25)
    step = Step(trace, link)
    limit = int(rng.uniform(0.3, 1.2) * max(step.unswapped_bytes, default=0)) + 1
    indices = [i for i in range(step.count) if rng.random() < 0.7]
    found = step.place(indices, limit, safety_factor=rng.choice([1.0, 1.5]))
    if found is None:
        return
    timing = simulate(trace, step.swaps(found), link)
    assert timing.step_seconds == pytest.approx(found.step_seconds)
    assert timing.peak_bytes <= limit
    assert all(release < prefetch for release, prefetch in zip(found.releases, found.prefetches, strict=True))
