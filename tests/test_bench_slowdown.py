"""`bench/slowdown.py`: what a row says, and that it fails where bits differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full
def test_a_row_of_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "slowdown.json"
    command = [sys.executable, "bench/slowdown.py", "--json", str(out), "--size", "tiny", "--steps", "2"]
    run = subprocess.run([*command, "--family", "gru"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["bits_equal"]
    assert row["kept"] == (row["ratio"] <= 1.05 + 0.01)
    assert len(row["steps_seconds"]) == len(row["plain_steps_seconds"]) == 4
    assert 0 < row["steady_peak_bytes"] <= row["peak_bytes"]
    assert 0 <= row["last_change"] <= 4
    assert ("NOT KEPT" in run.stdout) != row["kept"]
    command = [sys.executable, "bench/report.py", str(out), "--docs", str(tmp_path / "page.md")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    assert "Is max_slowdown kept?" in (tmp_path / "page.md").read_text()
