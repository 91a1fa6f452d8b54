"""`bench/sweep.py`: what a row says, and when `max_slowdown` is off the frontier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def marks(results: Path, tmp_path: Path) -> dict[str, str]:
    """The last cell of each row of the table, by network."""
    page = tmp_path / "page.md"
    command = [sys.executable, "bench/report.py", str(results), "--docs", str(page)]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {cells[1].strip(): cells[-2].strip() for cells in rows if cells[1].strip() != "network"}


def point(growth: float, ratio: float) -> dict[str, float]:
    """A point of a sweep."""
    return {"growth": growth, "ratio": ratio}


def test_a_row_off_the_frontier_is_marked(tmp_path: Path) -> None:
    about = {"bits_equal": True, "plain_seconds": 0.1, "max_slowdown": 0.05}
    points = {"10%": point(0.3, 1.2), "50%": point(0.5, 1.055), "90%": point(0.9, 1.01)}
    chosen = {
        "on it": point(0.55, 1.04),
        "above it": point(0.56, 1.04),
        "too slow": point(0.4, 1.07),
        "alone": point(1.0, 1.0),
    }
    rows = [{**about, "family": name, "chosen": each, "points": points} for name, each in chosen.items()]
    rows[-1]["points"] = {"10%": point(0.3, 1.2)}
    results = tmp_path / "sweep.json"
    content = {"format": "offload-sweep/1", "machine": {"processor": "test"}, "rows": rows}
    results.write_text(json.dumps(content), encoding="utf-8")
    expected = {"on it": "", "above it": "not reached", "too slow": "not reached", "alone": ""}
    assert marks(results, tmp_path) == expected


@pytest.mark.full
def test_a_row_of_a_short_sweep(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    command = [sys.executable, "bench/sweep.py", "--json", str(out), "--size", "tiny", "--family", "encoder"]
    run = subprocess.run(
        [*command, "--settle", "4", "--measured", "2"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    (found,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert found["bits_equal"]
    assert any(each["swaps"] + each["recomputes"] for each in found["points"].values())
    assert "encoder" in marks(out, tmp_path)
