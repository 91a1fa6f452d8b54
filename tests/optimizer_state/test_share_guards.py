"""The memory of state that a plan has leave, and guards of it left out, one at a time: each is missed."""

import pytest
from optimizer_state import loops
from optimizer_state.planned_loops import change_at_every_step, disable, memory_as_planned, reasons, two_sizes
from planned_rig import known_link

import offload
from offload.control.state_plan import StatePlanner
from offload.optimizer_state.movers import StateMovers
from offload.optimizer_state.share import Share
from offload.optimizer_state.streamed_state import StreamedState
from offload.plan import cycle

__all__ = ["known_link", "reasons"]  # fixtures


def test_the_memory_of_a_part_that_moves_is_as_planned(tmp_path, reasons):
    disable(memory_as_planned(tmp_path, reasons))


GUARDS = {
    "state that is away is not forgotten": (
        [(StreamedState, "stay", lambda self, key: self._keep(key, []))],
        lambda folder, _: change_at_every_step(loops.Loop, folder, seed=1),
    ),
    "state that is kept does not leave": ([(Share, "__contains__", lambda *_: True)], memory_as_planned),
    "state that is away is not counted as held": (
        [(StateMovers, "away_bytes", lambda self: (0, 0))],
        memory_as_planned,
    ),
    "what is still being written is counted": (
        [(cycle.Update, "swaps", lambda self, moved: {i: (i + 1, i) for i in moved})],
        memory_as_planned,
    ),
    "a plan leaves the others their share": ([(StatePlanner, "_moved_by_others", lambda *_: 0)], two_sizes),
}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.long
def test_a_guard_of_shares_that_is_left_out_is_missed(guard, tmp_path, monkeypatch, reasons):
    left_out, scenario = GUARDS[guard]
    disable(scenario(tmp_path, reasons))
    for each in left_out:
        monkeypatch.setattr(*each)
    with pytest.raises((AssertionError, RuntimeError, offload.InfeasibleLimitError)):
        scenario(tmp_path, reasons)
