"""The bench of frozen parameters runs, at tiny sizes, and both contestants compute the same weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "frozen_base.py"


@pytest.mark.full
def test_it_prints_a_row(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    head, row = ran.stdout.splitlines()
    assert head.split()[:2] == ["tokens", "base"]
    assert row.split()[:2] == ["16", "4"]
    assert len(row.split()) == 6
    (kept,) = json.loads(out.read_text())["rows"]
    assert kept["plain"][0]["check"] == kept["moved"][0]["check"]
