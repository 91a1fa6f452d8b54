"""`bench/recomputation.py`: what a row says, when its target is missed, and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20


def page_of(results: Path, tmp_path: Path) -> str:
    """The tables of a result file, as Markdown."""
    page = tmp_path / "page.md"
    command = [sys.executable, "bench/report.py", str(results), "--docs", str(page)]
    subprocess.run(command, cwd=ROOT, check=True)
    return page.read_text(encoding="utf-8")


def row(network: str, alone: float, joint: float) -> dict[str, Any]:
    """A row with a plain step of 100 ms."""
    return {
        "network": network,
        "link": "0.5GB/s",
        "bits_equal": True,
        "unswapped_peak_bytes": 100 * MIB,
        "predicted_peak_bytes": 25 * MIB,
        "predicted_seconds": 0.11,
        "seconds": {"plain": {"median": 0.1}, "joint": {"low": 0.11, "high": 0.14}},
        "slowdown_swap": alone,
        "slowdown_joint": joint,
        "swapped_bytes": 8 * MIB,
        "recomputed_bytes": 16 * MIB,
        "recompute_seconds": 0.005,
    }


def test_a_row_misses_its_target_above_a_third(tmp_path: Path) -> None:
    rows = [row("gpt", 0.6, 0.19), row("unet", 0.6, 0.21), row("vit", 0.02, 0.025), row("lstm", 0.02, 0.035)]
    results = tmp_path / "recomputation.json"
    content = {"format": "offload-recomputation/1", "machine": {"processor": "test"}, "rows": rows}
    results.write_text(json.dumps(content), encoding="utf-8")
    lines = {line.split(",")[0][2:]: line for line in page_of(results, tmp_path).splitlines() if line[:2] == "| "}
    missed = {name for name, line in lines.items() if line.endswith("not reached |")}
    assert missed == {"unet", "lstm"}
    figures = "| bit-equal | 100 ms | 1.60 × | 1.19 × (1.10–1.40) | 1.10 × | 8.00 MiB | 16.00 MiB in 5 ms | 0.25 ×"
    assert figures in lines["gpt"]


@pytest.mark.full
def test_a_row_of_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "recomputation.json"
    command = [sys.executable, "bench/recomputation.py", "--json", str(out), "--size", "tiny", "--network", "gpt"]
    command += ["--link", "0.15GB/s", "--settle", "6", "--measured", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (found,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert found["bits_equal"]
    assert found["swapped_bytes"] + found["recomputed_bytes"] > 0
    assert "gpt, 0.15GB/s" in page_of(out, tmp_path)
