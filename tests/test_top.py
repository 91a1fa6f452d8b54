"""`offload top PID`: a running training tells its figures while somebody looks, and nothing otherwise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_rig import known_link, make, train  # noqa: F401
from some_rows import one_in

import offload
from offload.cli import top as cli
from offload.cli.top import rows
from offload.devices.device import device_of
from offload.diagnostics import live

TRAINING = """
import sys, threading, torch, offload
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
handle = offload.enable(model, "smallest", min_tensor_bytes="4KiB")
asked_to_end = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), asked_to_end.set()), daemon=True).start()
print("training", flush=True)
while not asked_to_end.is_set():
    model(torch.randn(256, 64)).square().mean().backward()
"""


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where figures are exchanged."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)
    return tmp_path / "offload"


def top(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offload", "top", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.long
def test_a_training_process_is_shown_while_somebody_looks(folder: Path) -> None:
    command = [sys.executable, "-c", TRAINING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        training.stdout.readline()
        assert not folder.exists(), "nothing is written before somebody looks"
        first = top(training.pid, "--json", "--wait", "120")
        again = top(training.pid, "--once", "--wait", "120")
        assert list(folder.iterdir()) == [], "what was written is gone with who looked"
        training.stdin.close()
        training.wait(120)
    assert first.returncode == 0, first.stderr
    (said,) = json.loads(first.stdout)
    assert said["pid"] == training.pid
    assert said["model"] == "Sequential"
    assert said["steps"] > 0
    assert said["memory_bytes"] > 1 << 20
    assert again.returncode == 0, again.stderr
    assert "Sequential on cpu, step " in again.stdout
    ended = top(training.pid, "--once")
    assert ended.returncode == 2
    assert f"no process {training.pid} of yours" in ended.stderr


@pytest.mark.long
def test_who_trains_nothing_tells_nothing(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        done = top(idle.pid, "--once", "--wait", "0.2")
        assert idle.stdin is not None
        idle.stdin.close()
    assert done.returncode == 1
    assert "has begun no step under offload within 0.2 s" in done.stderr
    assert list(folder.iterdir()) == []


def steps_of_a_model() -> None:
    model, optimizer = make()
    with offload.enable(model, "smallest", min_tensor_bytes="4KiB"):
        train(model, optimizer, [128] * 4)


@pytest.mark.parametrize(
    "kept_from",
    [
        "nobody looks",
        pytest.param("left behind", marks=pytest.mark.long),
        "readable by others",
        pytest.param("another process", marks=pytest.mark.long),
    ],
)
def test_nothing_is_written(folder: Path, kept_from: str) -> None:
    folder.mkdir(mode=0o755 if kept_from == "readable by others" else 0o700)
    watched = live.watch_file(folder, os.getpid() + (kept_from == "another process"))
    if kept_from != "nobody looks":
        watched.touch()
    if kept_from == "left behind":
        long_ago = time.time() - 100
        os.utime(watched, (long_ago, long_ago))
    steps_of_a_model()
    assert list(folder.glob("*.json")) == []


def test_figures_of_a_process_that_is_watched(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    live.watch_file(folder, os.getpid()).touch()
    steps_of_a_model()
    (path,) = folder.glob("*.json")
    assert path.name.startswith(f"{os.getpid()}-")
    assert not list(folder.glob("*.part"))
    said = json.loads(path.read_text())
    assert said["steps"] == 4
    assert said["verdict"]["kind"] == "planned"
    earlier = {**said, "at": said["at"] - 2.0, "steps": 2, "out_bytes": 0, "in_bytes": 0, "stall_seconds": 0.0}
    shown = dict(rows(said, earlier))
    assert shown["speed"].startswith("1.00 steps/s")
    assert re.search(r"\d % of \S+ .B/s$", shown["copies out"]), "of the speed that the last plan assumes"
    assert "instead of" in shown["step, planned"]
    assert "process" in shown, "on the CPU: the resident set of the process"
    limited = dict(rows({**said, "limit_bytes": 20 << 20}))
    assert limited["step, planned"].endswith("; limit 20.00 MiB")
    assert "limit" not in limited["process"]
    assert shown["state"].startswith("o")


def test_a_forked_child_writes_nothing_for_its_parent(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    live.watch_file(folder, os.getpid()).touch()
    publisher = live.LivePublisher()
    enabled: Any = None  # not looked at, since nobody looks at the child
    child = os.fork()
    if child == 0:
        publisher(enabled)
        os._exit(len(list(folder.glob("*.json"))))
    assert os.waitpid(child, 0)[1] == 0


def test_what_ended_processes_have_left_is_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    left = [folder / f"{gone.pid}-1.json", live.watch_file(folder, gone.pid)]
    for path in left:
        path.touch()
    assert top(os.getpid(), "--once", "--wait", "0.1").returncode == 1
    assert not any(path.exists() for path in left)


def test_a_folder_that_cannot_be_made_leaves_the_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "offload").write_text("not a folder")
    with cli._looking(os.getpid()) as places:
        assert tmp_path / "offload" not in places


def figures_at(at: float, steps: int) -> dict[str, Any]:
    return {"at": at, "steps": steps, "model": "m"}


def test_rates_are_those_of_one_session_whichever_others_write(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for number, steps in ((10, 100), (2, 5)):  # session 2 begins its step behind session 10
        (folder / f"7-{number}.json").write_text(json.dumps(figures_at(1.0, steps)))
        found = cli._read(7, [folder])
    assert [(name, each["steps"]) for name, each in found.items()] == [("7-2.json", 5), ("7-10.json", 100)]


def test_figures_that_another_look_removes_are_left_out(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "7-1.json").symlink_to(folder / "removed")  # is listed, and cannot be read
    assert not cli._read(7, [folder])


def test_rates_stay_until_another_step_has_begun() -> None:
    first, second, third = figures_at(0.0, 0), figures_at(3.0, 1), figures_at(6.0, 2)
    span = cli._longer(None, first)
    for figures, expected in ((second, (first, second)), (second, (first, second)), (third, (second, third))):
        span = cli._longer(span, figures)
        assert span == expected


@pytest.mark.parametrize("words", one_in(3, ["nan", "inf", "0"]))
def test_an_interval_that_is_no_time_is_refused(words: str) -> None:
    done = top(os.getpid(), "--interval", words)
    assert done.returncode == 2
    assert "--interval: write a positive number" in done.stderr


@pytest.mark.parametrize("words", one_in(3, ["nan", "inf", "-1"]))
def test_a_wait_that_is_no_time_is_refused(words: str) -> None:
    done = top(os.getpid(), "--wait", words)
    assert done.returncode == 2
    assert "--wait: write a number of seconds of at least 0" in done.stderr


def test_the_peak_is_at_least_what_is_in_memory_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's figure is some pages late."""
    monkeypatch.setattr("offload.devices.proc.kilobyte_fields", lambda _: {"VmRSS": 2 << 20, "VmHWM": 1 << 20})
    device = device_of(torch.device("cpu"))
    assert device.peak_bytes() == 2 << 20


def test_a_process_that_ends_before_a_step(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        assert idle.stdin is not None
        with subprocess.Popen(
            [sys.executable, "-m", "offload", "top", str(idle.pid), "--once", "--wait", "60"], stderr=subprocess.PIPE
        ) as looking:
            while not (folder / live.watch_file(folder, idle.pid).name).exists():
                assert looking.poll() is None
                time.sleep(0.02)
            idle.stdin.close()
            idle.wait(60)
            assert looking.stderr is not None
            said = looking.stderr.read().decode()
    assert "has begun no step under offload and has ended" in said
    assert looking.returncode == 1
