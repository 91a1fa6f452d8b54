"""Processes to kill: one zygote a test session, and the jobs it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


class Processes:
    """Runs jobs, functions of jobs.py, each in a process of its own."""

    def __init__(self, folder):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",  # a thread's own arena takes 64 MiB of an address space that a test has limited
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        self.zygote = subprocess.Popen(
            [sys.executable, HERE / "zygote.py", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, function, *, kill_after_s=None, copies=1, **arguments):
        """One job, or `copies` of it at once; `kill_after_s`: one time for each, or None. A list of outcomes."""
        if kill_after_s is None:
            kill_after_s = [None] * copies
        jobs = [{"function": function, "arguments": arguments, "kill_after_s": each} for each in kill_after_s]
        self.zygote.stdin.write(json.dumps(jobs) + "\n")
        self.zygote.stdin.flush()
        return json.loads(self.zygote.stdout.readline())

    def ask(self, function, **arguments):
        """What one job answers; it must end well and say nothing."""
        (outcome,) = self.run(function, **arguments)
        assert (outcome["status"], outcome["stderr"]) == (0, ""), outcome["stderr"]
        return outcome["result"]

    def close(self):
        self.zygote.stdin.close()
        self.zygote.stdout.close()
        self.zygote.wait(60)


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    lent = Processes(tmp_path_factory.mktemp("jobs"))
    yield lent
    lent.close()


@pytest.fixture
def spill_directory(tmp_path):
    directory = tmp_path / "spill"
    directory.mkdir()
    return directory


@pytest.fixture(params=["direct", "slab"])
def tier(request):
    return request.param


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, just large enough for `offload.enable` to accept it."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m,mode=700", "none", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)
