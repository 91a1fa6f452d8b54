"""What a script's own error looks like under `offload fit` and `offload plan`: as under `python`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FIT = ("fit", "--memory", "1GiB")
IN_A_STEP = {
    FIT: "",
    ("fit", "--without-data", "--device", "1GiB,1GB/s,1TFLOP/s"): "",
    ("plan",): "import offload; offload.enable(model)",
}
STEP = """import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
{enable}
model(torch.ones(2, 9)).sum().backward()
"""
SCRIPTS = {
    "at once": "def load():\n    raise KeyError('rows')\n\nload()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('second')\n",
    "syntax": "print(1\n",
    "hook": "import sys\nsys.excepthook = lambda kind, *_: print('own', kind.__name__, file=sys.stderr)\nint('x')\n",
    "exit": "import sys\nsys.exit(7)\n",
}


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=200, check=False)


def frames(stderr: str) -> list[str]:
    return [line.split(",")[0].strip() for line in stderr.splitlines() if line.lstrip().startswith("File ")]


@pytest.mark.long
@pytest.mark.parametrize("kind", SCRIPTS)
def test_an_error_of_the_script_is_shown_as_python_shows_it(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[kind])
    done, plain = run("-m", "offload", *FIT, script), run(script)
    assert done.returncode == plain.returncode != 0
    assert done.stderr == plain.stderr


@pytest.mark.parametrize(
    "command",
    [each if each[0] == "plan" else pytest.param(each, marks=pytest.mark.long) for each in IN_A_STEP],
    ids=lambda words: " ".join(words[:2]),
)
def test_an_error_in_a_step_begins_with_the_script(command: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STEP.replace("{enable}", IN_A_STEP[command]))
    done = run("-m", "offload", command[0], *command[1:], script)
    assert done.returncode == 1
    assert done.stderr.splitlines().count("Traceback (most recent call last):") == 1
    assert frames(done.stderr)[0] == f'File "{script}"'
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: ")


@pytest.mark.long
def test_an_error_of_the_command_keeps_its_frames(tmp_path: Path) -> None:
    """Not the script's: nothing is left out."""
    script = tmp_path / "train.py"
    script.write_bytes(b"\xff\xfe broken")
    done = run("-m", "offload", "fit", script, "--memory", "1GiB")
    assert done.returncode == 1
    assert "Error" in done.stderr.splitlines()[-1]


def test_ctrl_c_ends_it_as_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    # A shell's background job ignores SIGINT, and so would its child.
    script.write_text(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nsignal.raise_signal(signal.SIGINT)\n"
    )
    done, plain = run("-m", "offload", "fit", script, "--memory", "1GiB"), run(script)
    assert (done.returncode, frames(done.stderr)) == (plain.returncode, frames(plain.stderr))
