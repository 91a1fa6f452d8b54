"""Copy-outs to disk give way to computation, copy-ins do not: the scheduling policies of the lanes' threads."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from core.store_rig import Source, make_store

TASKS = Path("/proc/self/task")
MIB = 1 << 20


def lanes():
    return {int(task.name) for task in TASKS.iterdir() if (task / "comm").read_text() == "offload-lane\n"}


def policies_become(wanted, before):
    """Whether the lanes that are new since `before` take these policies: a thread does so when it first runs."""
    turn = threading.Event()
    for _ in range(1000):
        found = sorted(os.sched_getscheduler(lane) for lane in lanes() - before)
        if found == wanted:
            return True
        turn.wait(0.01)
    return False


def test_only_the_copy_out_lane_runs_in_the_background(tmp_path):
    before = lanes()
    store = make_store("direct", tmp_path)
    assert policies_become([os.SCHED_OTHER, os.SCHED_IDLE], before)
    del store


def test_a_copy_out_that_other_programs_leave_no_core_gets_normal_priority(tmp_path):
    before = lanes()
    store = make_store("direct", tmp_path)
    assert policies_become([os.SCHED_OTHER, os.SCHED_IDLE], before)
    (background,) = (lane for lane in lanes() - before if os.sched_getscheduler(lane) == os.SCHED_IDLE)
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(background, {core})
    busy = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as program:
        try:
            program.stdout.readline()
            for _ in range(4):
                source = Source(store, np.random.default_rng(0), 64 * MIB)
                source.wait_copied_out()
                source.prefetch()
                source.swap_in()
                source.ticket.release()
        finally:
            program.kill()
    assert policies_become([os.SCHED_OTHER, os.SCHED_OTHER], before)
