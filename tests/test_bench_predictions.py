"""`bench/predictions.py`: it compares a plan's predictions with a measured step, outside the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIZE = {"layers": 2, "width": 128, "heads": 2, "batch": 8, "length": 256}  # saves tensors of 1 MiB and more


@pytest.mark.long
@pytest.mark.parametrize("fraction", [0.7, None])
def test_a_row(fraction):
    """One row of a small network: with a limit, and with the default knobs."""
    code = f"""
import json, sys
sys.path.insert(0, "bench")
import predictions
predictions.MODELS["gpt"], predictions.MEASURED_STEPS["gpt"] = {SIZE!r}, 2
row = predictions.measure("gpt", {fraction})
print(predictions.line(row), file=sys.stderr)
print(json.dumps(row))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    row = json.loads(run.stdout.splitlines()[-1])
    assert row["bits_equal"]
    assert "bits equal" in run.stderr
    # What torch's profiler and the blocks say, and what the plan predicts, are found independently.
    assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.02)
    if fraction is not None:
        assert row["swaps"] > 0
        assert row["measured_peak_bytes"] <= row["limit_bytes"] == int(fraction * row["unswapped_peak_bytes"])
