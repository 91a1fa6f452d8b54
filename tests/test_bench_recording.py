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


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_row_above_its_goal(tmp_path):
    status, row, printed = row_under_goal(0.0, tmp_path / "rows.json")
    assert row["operators"] > 0
    assert row["drops"] > 0
    recorded = row["operators"] * (row["mode_seconds_each"] + row["recorder_seconds_each"])
    assert row["share_recording"] == pytest.approx(recorded / row["step_seconds"])
    assert status == 1
    assert "more than 0% of the step: gpt" in printed
    page = tmp_path / "page.md"
    command = [sys.executable, "bench/report.py", str(tmp_path / "rows.json"), "--docs", str(page)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert f"| {row['share_recording']:.2%} | {row['drops']} × " in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("share", "status", "over"), [(0.02, 1, "gpt"), (0.01, 0, "none")])
@pytest.mark.long
def test_the_goal(share, status, over):
    """Exit status and last line for a row with this share of the step."""
    row = dict.fromkeys(("mode_seconds_each", "recorder_seconds_each", "drop_seconds_each", "saved_seconds_each"), 1e-6)
    row |= {"network": "gpt", "operators": 1, "drops": 1, "other_seconds": 0.0, "step_seconds": 1.0}
    row |= {"share_recording": share, "share_hooks": 0.0, "share": share}
    code = f"""
import sys
from types import SimpleNamespace
sys.path.insert(0, "bench")
import recording
recording.subprocess.run = lambda *args, **kwargs: SimpleNamespace(stdout={json.dumps(row)!r})
raise SystemExit(recording.main(["--network=gpt"]))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == status, run.stderr
    assert run.stdout.splitlines()[-1] == f"more than 1% of the step: {over}"


IMPORTS = """
import importlib, sys
sys.path.insert(0, "bench")
names = sys.argv[1:]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in names:
            raise
        print(name)
"""


@pytest.mark.long
def test_measurements_import_what_exists():
    """Also those that no test runs import each other's names. Left out are those whose packages are not installed."""
    names = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if path.stem != "conftest")
    run = subprocess.run([sys.executable, "-c", IMPORTS, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert not {"recording", "recomputation", "goals"} & set(run.stdout.split())
