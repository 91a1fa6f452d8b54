"""`bench/moved_state.py`: processes in turn, and rows that say whether bits are equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KINDS = (
    *("plain", "state", "in backward", "limited"),
    *("mapped", "copies in update", "copies around", "copies in backward"),
)


@pytest.mark.full
def test_rows_of_a_tiny_network(tmp_path: Path) -> None:
    out = tmp_path / "state.json"
    command = [sys.executable, "bench/moved_state.py", "--quick", "--rounds", "2", "--steps", "1", "--json", str(out)]
    kinds = ["state", "copies in update"]
    for chosen in ([], ["--keep", "--kinds", *kinds]):
        run = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert found["format"] == "offload-state/2"
    rows, chosen_rows = (run["rows"] for run in found["runs"])
    assert [row["kind"] for row in rows] == list(KINDS)
    assert [row["kind"] for row in chosen_rows] == ["plain", *kinds]
    assert all(row["bits_equal"] and len(row["ratios"]) == 2 for row in rows + chosen_rows)
    assert rows[0]["ratio"] == 1
    moved = {row["kind"] for row in rows if row["state_bytes"] > 0}
    assert moved == {"state", "in backward", "limited", "mapped"}
    assert run.stdout.count("bits equal") == 3
    assert all(0 < row["copy_processor_seconds"] < row["seconds"] * 2 for row in rows[1:4])
