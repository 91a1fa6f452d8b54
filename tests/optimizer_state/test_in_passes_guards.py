"""Guards of state that is copied in forward and backward, left out one at a time: each is missed."""

import pytest
from optimizer_state.overlap_rig import (
    Deviates,
    Heavy,
    MicroBatches,
    UnusedLater,
    bits_are_equal,
    memory_as_planned,
    wide_overlap,
)
from optimizer_state.planned_loops import reasons
from planned_rig import known_link

from offload.optimizer_state.in_passes import StateInPasses
from offload.optimizer_state.read_ahead import EarlyReads
from offload.optimizer_state.write_behind import WriteBehind

__all__ = ["known_link", "reasons", "wide_overlap"]  # fixtures

DROP = EarlyReads.drop
GUARDS = {
    "state is written in time": (Heavy, memory_as_planned, WriteBehind, "settle", lambda self, nbytes_max: None),
    "state for an update that does not come is freed": (
        MicroBatches,
        memory_as_planned,
        *(EarlyReads, "drop", lambda self, state, needed=(): None),
    ),
    "state of a parameter without gradient is freed": (
        UnusedLater,
        bits_are_equal,
        *(EarlyReads, "drop", lambda self, state, needed=(): None if needed else DROP(self, state)),
    ),
    "a step that differs waits for what is written": (
        Deviates,
        memory_as_planned,
        *(StateInPasses, "end", lambda self: None),
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_is_left_out_is_missed(guard, tmp_path, monkeypatch, wide_overlap):
    kind, scenario, *left_out = GUARDS[guard]
    monkeypatch.setattr(*left_out)
    with pytest.raises(AssertionError):
        scenario(kind, tmp_path, monkeypatch)
