"""Runs `python ARGUMENT …` in a process that is forked from one which has imported torch and the library.

Importing torch and what its optimizers import takes seconds, a fork milliseconds. Nothing has been used in that
process: no engine exists in it. A test of how a process begins or ends, of what it has loaded, or of an environment
that is read as an interpreter starts, runs a fresh interpreter instead.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

ENDED_EVERY_S = 0.005


class ForkedPython:
    """The process that forks, and runs one interpreter at a time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="offload-forked-")
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.close)

    def run(self, words: list[str], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` returns for these words behind `python`, with text captured from both streams."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        streams = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        job = {"words": words, "environment": environment, "streams": list(map(str, streams)), "timeout": timeout}
        self._server.stdin.write(json.dumps(job | {"folder": str(Path.cwd())}) + "\n")
        self._server.stdin.flush()
        status = json.loads(self._server.stdout.readline())
        if status is None:
            raise subprocess.TimeoutExpired(["python", *words], timeout)
        return subprocess.CompletedProcess(["python", *words], status, *(each.read_text() for each in streams))

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)
        self._folder.cleanup()


@functools.cache
def the_server() -> ForkedPython:
    """One for all tests of this process."""
    return ForkedPython()


def run_python(*words: object, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORD …` and wait for its end: `-c CODE`, `-m MODULE` or a script, with arguments.

    `variables` are added to the environment. Raises `subprocess.TimeoutExpired` after `timeout` seconds.
    """
    return the_server().run([str(word) for word in words], {**os.environ, **variables}, timeout)


def become(job: dict[str, Any]) -> None:
    """In the child: be the interpreter that was asked for."""
    for number, path in enumerate(job["streams"], start=1):
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    sys.stdin = open(0)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    first, *rest = job["words"]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    if first == "-c":
        code, sys.argv = compile(rest[0], "<string>", "exec"), ["-c", *rest[1:]]
    else:
        code, sys.argv = compile(Path(first).read_text(), first, "exec"), [first, *rest]
        main.__file__ = first
        sys.path[0] = str(Path(first).resolve().parent)
    sys.modules["__main__"] = main
    exec(code, vars(main))


def ended(pid: int, timeout: float) -> int | None:
    """The child's status as `subprocess` gives it; None where it was killed because its time was up."""
    deadline = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(ENDED_EVERY_S)


def serve() -> None:
    """Answer each line of stdin, a job, with its status; in a child, return to end as any interpreter ends."""
    import torch

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports half of torch
    gc.collect()
    if "triton" not in sys.modules:  # since torch 2.15, triton lists each object that is left at the end
        gc.freeze()  # an interpreter that ends looks through everything that was imported
    sys.path[0] = ""
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return become(job)
        print(json.dumps(ended(pid, job["timeout"])), flush=True)


if __name__ == "__main__":
    serve()
