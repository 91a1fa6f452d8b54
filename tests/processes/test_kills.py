"""Processes that are killed, that share a folder, that end in the middle of a copy: nothing stays behind them."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TOGETHER = 6
# What is trained until it is killed.
TRAININGS = {
    "saved tensors": [("train", {"tier": tier, "count": None}) for tier in ("direct", "slab")],
    "model state": [("train_moved", {})],
}
one_tier = pytest.mark.parametrize("tier", ["direct", pytest.param("slab", marks=pytest.mark.full)])


def holders(directory):
    """Processes that keep a file of `directory` open, with or without a name: its space is not back yet."""
    inside = str(directory.resolve()) + "/"
    found = []
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(descriptor.readlink()).startswith(inside):
                found.append(str(descriptor))
        except OSError:
            continue  # it has just ended, or is somebody else's
    return found


def assert_nothing_left(directory):
    assert list(directory.iterdir()) == []
    assert holders(directory) == []


def test_a_held_file_is_seen(spill_directory):
    """The guard itself: an open file without a name is found."""
    descriptor = os.open(spill_directory, os.O_RDWR | os.O_TMPFILE, 0o600)
    assert holders(spill_directory) == [f"/proc/{os.getpid()}/fd/{descriptor}"]
    os.close(descriptor)
    assert_nothing_left(spill_directory)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moved", TRAININGS)
def test_killed_at_random_points(processes, spill_directory, moved, is_full, campaign_counts):
    seed = random.randrange(1 << 32)
    choose = random.Random(seed)
    trained, patience = 0, 1.0
    while trained <= 10:  # on a busy machine all may be killed before their first step
        assert patience < 60, f"seed {seed}: none trains"
        times_each = 25 if is_full else 1
        trained += kill_trainings(processes, spill_directory, moved, choose, times_each, patience, campaign_counts)
        patience *= 3


def kill_trainings(processes, spill_directory, moved, choose, times_each, patience, campaign_counts):
    """Kill trainings; how many steps were taken before."""
    trained = 0
    for job, arguments in TRAININGS[moved]:
        for _ in range(times_each):
            times = [patience * choose.uniform(0, choose.choice([0.1, 0.5, 1.5])) for _ in range(TOGETHER)]
            outcomes = processes.run(
                job, kill_after_s=times, copies=TOGETHER, directory=str(spill_directory), **arguments
            )
            found = [(outcome["status"], outcome["stderr"]) for outcome in outcomes]
            assert found == [(-signal.SIGKILL, "")] * TOGETHER, f"killed after {times}"
            assert_nothing_left(spill_directory)
            trained += sum(outcome["result"] or 0 for outcome in outcomes)
            campaign_counts["kills survived"] += TOGETHER
    return trained


@pytest.mark.parametrize("moved", ["saved tensors", pytest.param("model state", marks=pytest.mark.long)])
def test_killed_fresh_process(spill_directory, moved):
    """The same without a zygote, after a step, and seen to hold its file before."""
    job, arguments = TRAININGS[moved][0]
    code = f"import jobs; jobs.{job}({str(spill_directory)!r}, **{arguments!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"1\n"
        assert holders(spill_directory)
    finally:
        process.kill()
        process.stdout.close()
    assert process.wait(60) == -signal.SIGKILL
    assert_nothing_left(spill_directory)


@pytest.mark.long
def test_space_is_back_on_a_disk_of_its_own(processes, small_disk):
    """Counted in blocks, where nobody else writes."""
    for seconds in (0.3, 0.6, 1.0):  # one after the other: there is room for one file
        before = os.statvfs(small_disk).f_bfree
        (outcome,) = processes.run(
            "train", kill_after_s=[seconds], directory=str(small_disk), tier="direct", count=None
        )
        assert (outcome["status"], outcome["stderr"]) == (-signal.SIGKILL, "")
        assert os.statvfs(small_disk).f_bfree == before


@one_tier
def test_eight_processes_in_one_folder(processes, spill_directory, tier):
    """They train right and hold one private file each."""
    outcomes = processes.run("train", copies=8, directory=str(spill_directory), tier=tier, count=6)
    for outcome in outcomes:
        assert (outcome["status"], outcome["stderr"]) == (0, "")
        result = outcome["result"]
        assert result["equal"]
        assert result["swapped"] == 6 * 3
        assert result["files"] == [{"mode": "0o600", "links": 0, "owner": os.geteuid()}]
        assert result["visible"] == []
    assert_nothing_left(spill_directory)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("where", ["after forward", "prefetching", "in a thread", "mid-backward"])
def test_exit_with_copies_in_flight(processes, spill_directory, tier, where, is_full, campaign_counts):
    copies = 4 if is_full else 1
    for _ in range(7 if is_full else 1):
        outcomes = processes.run("end", copies=copies, directory=str(spill_directory), tier=tier, where=where)
        assert [(outcome["status"], outcome["stderr"]) for outcome in outcomes] == [(0, "")] * copies
        campaign_counts["exits with copies in flight"] += copies
    assert_nothing_left(spill_directory)


def test_no_copy_is_under_way_when_tensors_go(spill_directory):
    """What exits first, of all that was there before the library, finds its copies ended or never begun."""
    code = f"""
import atexit
atexit.register(lambda: print(jobs.copies_under_way()))
import jobs
from campaign.broken_engine import break_as_told
break_as_told()  # where a campaign shows that this test notices
print(jobs.end_with_copies_queued({str(spill_directory)!r}))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    queued, left = map(int, run.stdout.split())
    assert queued > 0
    assert left == 0, "the interpreter frees what is still being read"
    assert (run.returncode, run.stderr) == (0, "")


@one_tier
def test_exit_of_a_fresh_process_with_copies_in_flight(spill_directory, tier):
    """The same without a zygote: whatever a fork might hide."""
    code = f"import jobs; print(jobs.end({str(spill_directory)!r}, {tier!r}, 'prefetching')['where'])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "prefetching\n"
    assert_nothing_left(spill_directory)
