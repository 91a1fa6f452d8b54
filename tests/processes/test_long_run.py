"""Many steps, some with another shape, some abandoned: nothing grows."""

import pytest

FILE_BYTES_MAX = 64 << 20  # what the file grows by at first; how much of it is used at once depends on the copies
GROWTH_BYTES_MAX = 4 << 20  # of resident memory: the allocator's, over the second half of the run


@pytest.mark.timeout(3600)
def test_nothing_grows(processes, spill_directory, tier, is_full, campaign_counts):
    count = 2000 if is_full else 150
    samples = processes.ask("run_long", directory=str(spill_directory), tier=tier, count=count)
    campaign_counts["steps of the long runs"] += count
    later = samples[len(samples) // 2 :]
    for what in samples[0].keys() - {"resident", "file"}:
        assert [each[what] for each in later] == [later[0][what]] * len(later), what
    assert (later[-1]["records"], later[-1]["tickets"], later[-1]["extents"]) == (0, 0, 0)
    assert later[-1]["file"] <= FILE_BYTES_MAX
    growth = later[-1]["resident"] - later[0]["resident"]
    assert growth <= GROWTH_BYTES_MAX, samples
