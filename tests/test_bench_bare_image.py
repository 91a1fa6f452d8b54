"""`bench/bare_image.sh`: what it asks for. Making an image needs root and the network, so no test does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "bare_image.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_it_says_how_to_call_it() -> None:
    said = run("--help")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("The README's first command in a bare image")
    options = [line.split()[0] for line in said.stdout.splitlines() if line.startswith("  --")]
    assert options == ["--bind", "--copy", "--before", "--runs"]
    assert "set -e" not in said.stdout


@pytest.mark.parametrize("arguments", [(), ("--bind", "/opt"), ("image", "--bind"), ("image", "--unknown", "x")])
def test_a_wrong_call_makes_no_image(arguments: tuple[str, ...]) -> None:
    said = run(*arguments)
    assert said.returncode == 2
    assert "bench/bare_image.sh FOLDER" in said.stderr


def test_the_command_that_it_runs_is_the_readmes_first() -> None:
    """The script looks for it in the README as this does."""
    (line,) = [line for line in SCRIPT.read_text().splitlines() if line.startswith("command=")]
    told = subprocess.run(
        ["bash", "-euc", f'repository={ROOT}\n{line}\necho "$command"'], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == 'pip install ".[cli]" && offload demo'
