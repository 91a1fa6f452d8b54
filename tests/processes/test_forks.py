"""Forked children: one that touches the engine gets a clear error, one that does not is unharmed."""

import pytest

REFUSED = 'DriverError: offload failed with code 0: the engine\'s threads did not survive fork(); use the "spawn"'


@pytest.mark.timeout(3600)
def test_child_that_touches_the_engine(processes, spill_directory, tier, is_long, campaign_counts):
    times = 100 if is_long else 8
    found = processes.ask("fork_and_touch", directory=str(spill_directory), tier=tier, times=times)
    equal = found.pop("equal")
    assert found.pop("drop", [""]) == [""]
    for texts in found.values():
        assert all(text.startswith(REFUSED) for text in texts), found
    assert equal, "the parent trains on"
    campaign_counts["forks"] += 5 * times


def test_child_that_leaves_the_engine_alone(processes, spill_directory, tier):
    """Data loaders' workers; a child that ends like any interpreter, with the engine's objects in its hands."""
    found = processes.ask("fork_and_leave_alone", directory=str(spill_directory), tier=tier)
    assert found == {"equal": True, "status": 0}
