"""`bench/state_plan.py`: what its rows say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_three_limits_of_a_tiny_model(tmp_path: Path) -> None:
    out = tmp_path / "state.json"
    command = [sys.executable, "bench/state_plan.py", "--quick", "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text())
    assert result["bits_equal"]
    ample, middle, least = result["rows"]
    assert ample["limit_bytes"] > middle["limit_bytes"] > least["limit_bytes"]
    assert ample["moved_bytes"] == 0 < least["moved_bytes"]
    for row in result["rows"]:
        assert row["moved_bytes"] == row["state"]["moved_bytes"]
        assert row["peak_bytes"] <= row["limit_bytes"]
        assert 0 < row["bound_seconds"] <= row["expected_seconds"]
    assert len(run.stdout.splitlines()) == 6
