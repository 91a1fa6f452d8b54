"""`bench/recipe_coverage.py`: what it counts of a network whose recipes are known, and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

COUNT = """
import json, sys
sys.path.insert(0, "bench")
import torch
from recipe_coverage import coverage
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
torch.manual_seed(0)
x = torch.randn(32, 64)
print(json.dumps(coverage(model, lambda each: each(x).sum().backward())))
"""
SAVED = 32 * 64 * 4  # bytes of each saved tensor


@pytest.mark.timeout(120)
@pytest.mark.long
def test_what_is_counted():
    """Gelu's result is light, and tanh's needs a matrix product. The others have none: no operator makes the input, and
    the first layer's result would keep it.
    """
    run = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == {
        "saved_bytes": 4 * SAVED,
        "light_bytes": {"aten.gelu.default": SAVED},
        "heavy_bytes": {"aten.tanh.default": SAVED},
    }


def test_the_table(tmp_path):
    row = {
        "network": "gpt",
        "autocast": True,
        "saved_bytes": 1000,
        "light_bytes": {"aten.gelu.default": 250, "aten.clone.default": 1},
        "heavy_bytes": {"aten.addmm.default": 500},
    }
    result, page = tmp_path / "coverage.json", tmp_path / "page.md"
    result.write_text(
        json.dumps({"format": "offload-coverage/1", "machine": {"processor": "a"}, "rows": [row]}), encoding="utf-8"
    )
    subprocess.run([sys.executable, "bench/report.py", str(result), "--docs", str(page)], cwd=ROOT, check=True)
    assert "| gpt, autocast to bfloat16 | 1000 B | 25% | `aten.gelu.default` 25% | 75% |" in page.read_text("utf-8")
