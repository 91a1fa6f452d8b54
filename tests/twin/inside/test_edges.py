"""Each ordering edge left out by name: what is then in no order is named, without any delay and without luck.

Nothing can be left out but in the extension that campaign/build.py makes; with the one that users have, the scenarios
alone run: they find nothing as long as every edge is there.
"""

import contextlib
import gc

import pytest
import test_gpu
import torch
from campaign.mutants import ON_ACCELERATORS
from edges import EDGES
from twin import sim

from offload import _core

pytestmark = pytest.mark.finds
CAN_LEAVE_OUT = hasattr(_core, "set_mutant")
leaves_out = pytest.mark.skipif(not CAN_LEAVE_OUT, reason="no guard can be left out")


def findings(scenario):
    """What the checker names; wrong bytes, too, are what a missing edge may lead to."""
    with contextlib.suppress(AssertionError, OSError):
        scenario()
    torch.sim.synchronize()
    gc.collect()
    found = [text for text in sim.violations() if text.endswith("in no order")]
    sim.forget_violations()
    return found


@pytest.fixture(autouse=True)
def no_delays():
    sim.schedule(0, 0)
    yield
    if CAN_LEAVE_OUT:
        _core.set_mutant("")


SCENARIOS = sorted({each for row in EDGES.values() for each in row}, key=str)


def test_every_edge_is_in_the_campaigns_table():
    assert EDGES.keys() == ON_ACCELERATORS


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_found_where_nothing_is_left_out(scenario):
    assert findings(scenario) == []


@leaves_out
@pytest.mark.parametrize("edge", EDGES)
def test_an_edge(edge):
    _core.set_mutant(edge)
    found = [text for scenario in EDGES[edge] for text in findings(scenario)]
    print(f"{edge}: {found[:1]}")
    assert found


@leaves_out
def test_a_test_marked_gpu_misses_record_stream_by_bytes():
    """What it does on CUDA, where nothing else would tell."""

    def repeat(times):
        for _ in range(times):
            test_gpu.test_a_source_of_another_stream_is_not_overwritten()

    repeat(5)
    _core.set_mutant("record_stream on sources")
    with pytest.raises(AssertionError):
        repeat(100)  # the bytes are wrong only in runs in which the host is not late itself
