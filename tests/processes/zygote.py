"""A process that has imported torch and the library and touched neither; it forks the processes that tests kill.

Importing torch takes seconds, a fork milliseconds. No engine exists here, so nothing is refused in the children. It
reads one JSON line per batch of jobs from stdin, runs the batch at once, and answers with one JSON line. A child ends
as an interpreter ends, with finalizers and exit handlers, unless its time comes before.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import jobs
import torch
from campaign.broken_engine import break_as_told


def start(job, folder):
    """Fork; returns the child's id, and 0 in the child itself, which is then to return from `main`."""
    pid = os.fork()
    if pid:
        return pid
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    result = getattr(jobs, job["function"])(**job["arguments"])
    print(json.dumps(result), flush=True)
    return 0


def finish(pid, job, folder, began):
    if job.get("kill_after_s") is not None:
        time.sleep(max(began + job["kill_after_s"] - time.monotonic(), 0))
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out = (folder / "out").read_text() if (folder / "out").exists() else ""
    err = (folder / "err").read_text() if (folder / "err").exists() else ""
    return {"status": status, "result": json.loads(out.splitlines()[-1]) if out else None, "stderr": err}


def main():
    torch.set_num_threads(1)
    break_as_told()  # where a campaign shows that these tests notice
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports half of torch
    gc.collect()
    if "triton" not in sys.modules:  # since torch 2.15, triton lists each object that is left at the end
        gc.freeze()  # an interpreter that ends looks through everything that was imported: a second for each child
    folder = Path(sys.argv[1])
    for batch, line in enumerate(sys.stdin):
        started = []
        for number, job in enumerate(json.loads(line)):
            place = folder / f"{batch}-{number}"
            place.mkdir()
            pid = start(job, place)
            if pid == 0:
                return
            started.append((pid, job, place, time.monotonic()))
        started.sort(key=lambda each: each[3] + (each[1].get("kill_after_s") or 1e9))
        results = {each[0]: finish(*each) for each in started}
        print(json.dumps([results[pid] for pid in sorted(results)]), flush=True)


main()
