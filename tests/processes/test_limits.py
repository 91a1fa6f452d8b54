"""Real limits of the system: gradients stay plain, what fails is said, and it swaps again when there is room."""

import pytest


@pytest.mark.long
@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "disk"])
def test_no_room_in_the_file(processes, spill_directory, request, tier, limit, campaign_counts):
    directory = request.getfixturevalue("small_disk") if limit == "disk" else spill_directory
    found = processes.ask("reach_limit", directory=str(directory), tier=tier, limit=limit)
    assert found["equal"]
    assert found["live"] == [0, 0, 0]
    assert found["spilled"][:3] == [0, 0, 0], "nothing fits"
    assert min(found["spilled"][3:]) > 0, "the fault has passed"
    assert found["failed"] > 0
    campaign_counts["real limits met"] += 1
    if tier == "direct":
        text = "File too large" if limit == "RLIMIT_FSIZE" else "No space left on device"
        assert any(text in note and "offset" in note and str(directory) in note for note in found["notes"]), found


@pytest.mark.parametrize(
    ("limit", "room_bytes"),
    [
        ("disk", 16 << 10),
        pytest.param("disk", 0, marks=pytest.mark.long),
        pytest.param("RLIMIT_FSIZE", 0, marks=pytest.mark.long),
    ],
)
def test_no_room_for_optimizer_state(processes, spill_directory, request, limit, room_bytes, campaign_counts):
    """What finds no room stays in memory, and each step tries again."""
    directory = request.getfixturevalue("small_disk") if limit == "disk" else spill_directory
    found = processes.ask("reach_limit_with_state", directory=str(directory), limit=limit, room_bytes=room_bytes)
    assert found["equal"] == [True, True]
    staying = 3 if room_bytes else 4
    assert found["in_memory"] == 3 * [staying * (16 << 10)] + 3 * [0]
    assert found["failed"] == 3 * staying
    assert found["left"] == [0, 0, 0]
    text = "File too large" if limit == "RLIMIT_FSIZE" else "No space left on device"
    note = f"{found['failed']} tensors of optimizer state stayed because writing them failed"
    assert any(note in each and text in each and str(directory) in each for each in found["notes"]), found
    campaign_counts["real limits met"] += 1


@pytest.mark.parametrize("what", ["slab", "thread"])
def test_no_address_space(processes, spill_directory, what, campaign_counts):
    """For a slab: what cannot leave stays. For the threads that fill one with pages: they are not needed."""
    slab_bytes = 256 << 20 if what == "slab" else 64 << 20
    found = processes.ask(
        "reach_limit",
        directory=str(spill_directory),
        tier="slab",
        limit="RLIMIT_AS",
        slab_bytes=slab_bytes,
        room_bytes=slab_bytes + (-(128 << 20) if what == "slab" else 64 << 20),
    )
    assert found["equal"]
    assert found["live"] == [0, 0, 0]
    assert ("host limit" in found["kept"]) == (what == "slab")
    assert found["swapped"] == (3 * 3 if what == "slab" else 6 * 3)
    campaign_counts["real limits met"] += 1


def test_no_memory_to_lock(processes, spill_directory, tier, campaign_counts):
    """Direct I/O and the host's tier lock none, from `enable` on."""
    found = processes.ask("reach_limit", directory=str(spill_directory), tier=tier, limit="RLIMIT_MEMLOCK")
    assert found["equal"]
    assert found["failed"] == 0
    assert min(found["spilled"]) > 0
    campaign_counts["real limits met"] += 1
