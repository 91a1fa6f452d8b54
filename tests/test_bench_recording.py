"""`bench/recording.py`: it measures operators and drops of a step, and fails where they take more than the goal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def row_under_goal(goal: float, path: Path) -> tuple[int, dict[str, Any], str]:
    """Exit status, the only row, and what it prints."""
    arguments = ["--network=gpt", "--size=tiny", "--settle=8", "--measured=2", f"--json={path}"]
    code = f"""
import sys
sys.path.insert(0, "bench")
import recording
recording.GOAL = {goal}
raise SystemExit(recording.main({arguments}))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert path.exists(), run.stderr
    [row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return run.returncode, row, run.stdout


@pytest.mark.timeout(300)
def test_a_row_above_its_goal(tmp_path):
    status, row, printed = row_under_goal(0.0, tmp_path / "rows.json")
    assert row["operators"] > 0
    assert row["drops"] > 0
    assert row["share"] == pytest.approx(row["share_recording"] + row["share_hooks"])
    assert status == 1
    assert "more than 0% of the step: gpt" in printed
    page = tmp_path / "page.md"
    command = [sys.executable, "bench/report.py", str(tmp_path / "rows.json"), "--docs", str(page)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert f"| {row['share_recording']:.2%} | {row['drops']} |" in page.read_text(encoding="utf-8")


def test_every_measurement_can_be_imported():
    """Also those that no test runs: they use functions of each other."""
    names = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if path.stem != "conftest")
    assert "recording" in names
    code = f"import sys; sys.path.insert(0, 'bench'); import {', '.join(names)}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
