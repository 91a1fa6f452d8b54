"""`offload top` on a terminal: a real training, a window that changes its size, an end, Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_top import TRAINING

SECONDS_MAX = 120.0


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in what it runs in the background


class Terminal:
    """A terminal in which `offload top` runs."""

    def __init__(self, *words: object, columns: int = 100, rows: int = 24) -> None:
        self._end, theirs = pty.openpty()
        self.resize(columns, rows)
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offload", "top", *map(str, words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.said = ""

    def resize(self, columns: int, rows: int = 24) -> None:
        """Change the size of the window, of which the process is told by a signal."""
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._end, keys.encode())

    def read_until(self, pattern: str) -> str:
        """Read until what was said since the last call has the pattern; return it."""
        until = time.monotonic() + SECONDS_MAX
        while re.search(pattern, self.said) is None:
            assert time.monotonic() < until, f"{pattern!r} is not in {self.said!r}"
            assert self._read(), f"ended without {pattern!r}: {self.said!r}"
        found, self.said = self.said, ""
        return found

    def wait(self) -> int:
        """Read until the process ends; return its exit status."""
        until = time.monotonic() + SECONDS_MAX
        while self._read():
            assert time.monotonic() < until, self.said
        return self.process.wait(SECONDS_MAX)

    def close(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(SECONDS_MAX)
        os.close(self._end)

    def _read(self) -> bool:
        if not select.select([self._end], [], [], 1.0)[0]:
            return True
        try:
            text = os.read(self._end, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # nobody has the other end open any more
                raise
            return False
        self.said += text.decode(errors="replace")
        return bool(text)


def shown(text: str) -> list[str]:
    """The lines without what moves the cursor and what colours them. A redrawn line is one of its own."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "offload"


@contextlib.contextmanager
def training() -> Iterator[subprocess.Popen[str]]:
    """A process that trains until its input ends."""
    command = [sys.executable, "-c", TRAINING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(SECONDS_MAX)


@contextlib.contextmanager
def terminal(*words: object, columns: int = 100) -> Iterator[Terminal]:
    made = Terminal(*words, columns=columns)
    try:
        yield made
    finally:
        made.close()


HIDDEN, SHOWN_AGAIN = "\x1b[?25l", "\x1b[?25h"


@pytest.mark.long
def test_a_view_that_lives_through_new_sizes_and_the_end_of_the_training(folder: Path) -> None:
    with training() as process, terminal(process.pid, "--interval", "0.2") as view:
        text = view.read_until(r"copies in.*\n.*state.*\n.*╯")
        assert HIDDEN in text
        lines = shown(text)
        assert max(map(len, lines)) <= 100
        assert any(f"offload top {process.pid}" in line for line in lines)
        assert any("Sequential on cpu, step " in line for line in lines)
        view.resize(60)
        narrow = view.read_until(r"╭[^\n]{50,59}╮(.|\n)*╯(.|\n)*╭[^\n]{50,59}╮")
        last = shown(narrow[narrow.rindex("╭") :])
        assert max(map(len, last)) <= 60
        view.resize(120)
        view.read_until(r"╭[^\n]{110,119}╮")
        process.stdin.close()
        assert view.wait() == 0
        assert f"process {process.pid} has ended" in view.said
        assert SHOWN_AGAIN in view.said
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_ctrl_c_leaves_the_terminal_and_the_training_alone(folder: Path) -> None:
    with training() as process, terminal(process.pid) as view:
        view.read_until("speed|stalled")
        view.type("\x03")
        assert view.wait() == 0
        assert SHOWN_AGAIN in view.said
        assert "Traceback" not in view.said
        assert process.poll() is None, "the training goes on"
        assert list(folder.iterdir()) == []


@pytest.mark.long
def test_ctrl_c_while_it_waits_for_a_first_step(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        with terminal(idle.pid, "--wait", "100") as view:
            until = time.monotonic() + SECONDS_MAX
            while not list(folder.glob("*.watch")) and time.monotonic() < until:
                time.sleep(0.05)
            view.type("\x03")
            assert view.wait() == 0
            assert "Traceback" not in view.said
        assert idle.stdin is not None
        idle.stdin.close()
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_a_process_without_offload(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        with terminal(idle.pid, "--wait", "0.2") as view:
            assert view.wait() == 1
            assert "has begun no step under offload within 0.2 s" in " ".join(shown(view.said))
        assert idle.stdin is not None
        idle.stdin.close()


@pytest.mark.long
def test_a_training_that_is_killed(folder: Path) -> None:
    with training() as process, terminal(process.pid, "--interval", "0.2") as view:
        view.read_until("speed|stalled")
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS_MAX)
        assert view.wait() == 0
        assert f"process {process.pid} has ended" in view.said
    assert list(folder.iterdir()) == []
