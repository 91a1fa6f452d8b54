"""`bench/pairs.py`: how exactly a slowdown is known from some pairs of steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_bench_same_script import ROOT, rows_of


def row(slowdown: float, deviation: float, kept: float, *, beside: bool = False) -> dict[str, Any]:
    """A network whose slowdown is known from eight pairs of steps."""
    count = {"count": 8, "mean": slowdown, "deviation": deviation, "error": 0.007, "kept": kept}
    return {"family": "gpt", "beside": beside, "max_slowdown": 0.05, "all": slowdown, "counts": [count]}


def page_of(found: dict[str, Any], tmp_path: Path) -> tuple[list[str], str]:
    """The cells of the table's only line, and the whole page."""
    results = tmp_path / "pairs.json"
    content = {"format": "offload-pairs/1", "machine": {"processor": "test"}, "rows": [found]}
    results.write_text(json.dumps(content), encoding="utf-8")
    [cells] = rows_of(results, tmp_path).values()
    return cells, (tmp_path / "page.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("slowdown", "deviation", "pairs"),
    [(0.04, 0.01, "about 42"), (0.04, 0.005, "about 11"), (0.03, 0.01, "about 11"), (0.05, 0.01, "no number of")],
)
def test_the_number_of_pairs_that_keep_a_plan_in_nine_of_ten_searches(
    slowdown: float, deviation: float, pairs: str, tmp_path: Path
) -> None:
    """(2.28 × deviation × √8 / (5 % − slowdown))²."""
    _, page = page_of(row(slowdown, deviation, 1.0), tmp_path)
    assert f"GPT: {pairs} pairs" in page


@pytest.mark.parametrize(("kept", "mark"), [(0.95, ""), (0.85, "not reached")])
def test_a_plan_that_too_few_searches_keep_is_marked(kept: float, mark: str, tmp_path: Path) -> None:
    cells, _ = page_of(row(0.04, 0.01, kept), tmp_path)
    assert cells == ["4.0%", "8", "20", "1.00 points", "0.70 points", f"{kept:.0%}", mark]


def test_what_was_measured_beside_another_program_says_so(tmp_path: Path) -> None:
    _, page = page_of(row(0.04, 0.01, 1.0, beside=True), tmp_path)
    assert "| GPT, beside another program |" in page


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "pairs.json"
    command = [sys.executable, "bench/pairs.py", "--json", str(out), "--size", "tiny", "--family", "encoder"]
    subprocess.run([*command, "--pairs", "16"], cwd=ROOT, check=True)
    subprocess.run([*command, "--pairs", "16", "--keep", "--beside"], cwd=ROOT, check=True)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [each["beside"] for each in rows] == [False, True]
    for found in rows:
        assert [each["count"] for each in found["counts"]] == [3, 8]
        assert found["peak_bytes"] < found["unswapped_peak_bytes"]
        assert all(each["deviation"] > 0 and each["error"] > 0 for each in found["counts"])
