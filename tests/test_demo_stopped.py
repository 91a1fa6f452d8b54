"""The demo is told to end while a child process trains: the child ends too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from offload.demo.child_process import child_process

ENDLESS = [sys.executable, "-c", "import time; time.sleep(600)"]


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


def test_sigterm_while_the_training_starts_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def told_to_end_before_it_returns(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        started.append(real(*args, **kwargs))
        signal.raise_signal(signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", told_to_end_before_it_returns)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended, child_process(ENDLESS, os.environ, sys.__stderr__):
            pytest.fail("the block ran")
        assert ended.value.code == 128 + signal.SIGTERM
        assert started[0].poll() == -signal.SIGKILL
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        started[0].kill()


def test_an_error_in_the_block_ends_the_process() -> None:
    with pytest.raises(ZeroDivisionError), child_process(ENDLESS, os.environ, sys.__stderr__) as child:
        1 / 0  # noqa: B018
    assert child.poll() == -signal.SIGKILL
