"""`bench/moved_state.py`: four processes in turn, and rows that say whether bits are equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full
def test_rows_of_a_tiny_network(tmp_path: Path) -> None:
    out = tmp_path / "state.json"
    command = [sys.executable, "bench/moved_state.py", "--quick", "--rounds", "2", "--steps", "1", "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert found["format"] == "offload-state/1"
    assert [row["kind"] for row in found["rows"]] == ["plain", "state", "in backward", "mapped"]
    assert all(row["bits_equal"] and len(row["ratios"]) == 2 for row in found["rows"])
    assert found["rows"][0]["ratio"] == 1
    assert [row["state_bytes"] > 0 for row in found["rows"]] == [False, True, True, True]
    assert run.stdout.count("bits equal") == 4
    assert all(0 < row["copy_processor_seconds"] < row["seconds"] * 2 for row in found["rows"][1:3])
