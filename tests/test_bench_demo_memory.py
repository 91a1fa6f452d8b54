"""bench/demo_memory.py, in a size that takes seconds: what the front page's picture is drawn from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIZES = ["--layers=2", "--width=64", "--heads=2", "--batch=4", "--length=256"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_both_runs_keep_their_last_step_and_their_peak(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    command = [sys.executable, "bench/demo_memory.py", "--json", str(out), "--steps", "3", *SIZES]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    found = json.loads(out.read_text())
    assert found["format"] == "offload-demo-memory/1"
    assert found["equal"]
    assert found["machine"]["load_average"]
    assert [run["name"] for run in found["runs"]] == ["plain", "offloaded"]
    for run in found["runs"]:
        shares = [share for share, _ in run["last_step"]]
        assert shares == sorted(shares)
        assert (shares[0], shares[-1] <= 1) == (0, True)
        assert run["peak_bytes"] > 0
