"""The bench of frozen parameters runs, at tiny sizes, and both contestants compute the same weights."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "frozen_base.py"


@pytest.mark.long
def test_it_prints_a_row():
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    head, row = ran.stdout.splitlines()
    assert head.split()[:2] == ["tokens", "base"]
    assert row.split()[:2] == ["16", "4"]
    assert len(row.split()) == 6
