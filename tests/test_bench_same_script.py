"""`bench/same_script.py`: its runs, and when their memory is said to vary too much."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(peak_mib: int, *, beside: bool = False, ratio: float = 1.04) -> dict[str, Any]:
    peaks = {"peak_bytes": peak_mib << 20, "plain_peak_bytes": 200 << 20}
    return {"beside": beside, "ratio": ratio, "kept": ratio <= 1.06, "bits_equal": True, "allocator": "glibc", **peaks}


def rows_of(results: Path, tmp_path: Path) -> dict[str, list[str]]:
    """The cells of the table by the first one."""
    page = tmp_path / "page.md"
    command = [sys.executable, "bench/report.py", str(results), "--docs", str(page)]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = [line.split("|")[1:-1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines[1:]}


@pytest.mark.parametrize("is_anew", [False, True])
@pytest.mark.parametrize(
    ("runs", "marked"),
    [
        ([run(96), run(100), run(105), run(104, beside=True)], set()),
        ([run(96), run(100), run(107)], {"3 alone", "all 3"}),
        ([run(100), run(102), run(120, beside=True), run(121, beside=True)], {"all 4"}),
        ([run(100), run(101, ratio=1.07)], {"2 alone", "all 2"}),
    ],
)
def test_memory_that_varies_and_slowdowns_that_are_not_kept_are_marked(
    runs: list[dict[str, Any]], marked: set[str], is_anew: bool, tmp_path: Path
) -> None:
    results = tmp_path / "same.json"
    content = {"format": "offload-same-script/2", "machine": {"processor": "test"}, "family": "gpt", "runs": runs}
    content["anew"] = is_anew
    results.write_text(json.dumps(content), encoding="utf-8")
    rows = rows_of(results, tmp_path)
    assert {name for name, cells in rows.items() if cells[-1] == "not reached"} == marked
    assert rows[f"all {len(runs)}"][0] == "bit-equal"
    title = "The same script, each run anew, glibc" if is_anew else "The same script again, glibc"
    assert title in (tmp_path / "page.md").read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_short_run_alone_and_beside_another_program(tmp_path: Path) -> None:
    out = tmp_path / "same.json"
    command = [sys.executable, "bench/same_script.py", "--json", str(out), "--size", "tiny", "--family", "encoder"]
    subprocess.run(
        [*command, "--runs", "1", "--beside", "1", "--steps", "3", "--malloc", "mimalloc"], cwd=ROOT, check=True
    )
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert [each["beside"] for each in runs] == [False, True]
    assert all(each["bits_equal"] and each["peak_bytes"] > 0 for each in runs)
    assert {each["allocator"] for each in runs} == {"mimalloc"}
    assert all(any(text.startswith("new plan") for _, text in each["decisions"]) for each in runs)
    assert len(rows_of(out, tmp_path)) == 3
