"""The demo is told to end while a child process trains: the child ends too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def is_training(pid: str) -> bool:
    try:
        return b"--worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def test_sigterm_ends_the_training_too(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--width", "64", "--heads", "2", "--batch", "4", "--length", "256", "--steps", "100000"]
    command = [sys.executable, "-m", "offload", "demo", "--device", "cpu", "--html", str(tmp_path / "page.html")]
    with subprocess.Popen([*command, *sizes], stderr=subprocess.DEVNULL, start_new_session=True) as run:
        try:
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
            deadline = time.monotonic() + 60
            while not (started := [each for each in children.read_text().split() if is_training(each)]):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            run.terminate()
            assert run.wait(60) == 128 + signal.SIGTERM
            assert not any(Path(f"/proc/{child}").exists() for child in started)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
