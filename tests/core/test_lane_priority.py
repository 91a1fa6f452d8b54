"""Copy-outs to disk give way to computation, copy-ins do not: the scheduling policies of the lanes' threads."""

import os
import threading
from pathlib import Path

from store_rig import make_store

TASKS = Path("/proc/self/task")


def lanes():
    return {int(task.name) for task in TASKS.iterdir() if (task / "comm").read_text() == "offload-lane\n"}


def test_only_the_copy_out_lane_runs_in_the_background(tmp_path):
    before = lanes()
    with_copies = make_store("direct", tmp_path)
    wanted, policies = [os.SCHED_OTHER, os.SCHED_IDLE], []
    turn = threading.Event()
    for _ in range(1000):  # a thread takes its policy when it first runs
        policies = sorted(os.sched_getscheduler(lane) for lane in lanes() - before)
        if policies == wanted:
            break
        turn.wait(0.01)
    assert policies == wanted
    del with_copies
