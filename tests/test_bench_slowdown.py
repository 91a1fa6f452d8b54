"""`bench/slowdown.py`: what a row says, and that it fails where bits differ; plain training beside plain training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
try:
    from result_tables import above_plain, read, slowdown_table
finally:
    sys.path.pop(0)


@pytest.mark.full
def test_a_row_of_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "slowdown.json"
    command = [sys.executable, "bench/slowdown.py", "--json", str(out), "--size", "tiny", "--steps", "2"]
    run = subprocess.run([*command, "--family", "gru"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["bits_equal"]
    assert row["kept"] == (row["ratio"] <= 1.05 + 0.01)
    assert len(row["steps_seconds"]) == len(row["plain_steps_seconds"]) == 4
    assert 0 < row["steady_peak_bytes"] <= row["peak_bytes"]
    assert 0 <= row["last_change"] <= 4
    counts = row["allocated_bytes"], row["plain_allocated_bytes"]
    assert (
        all(nbytes > 0 for nbytes in counts) if row["allocator"] in {"tcmalloc", "jemalloc"} else counts == (None, None)
    )
    assert ("NOT KEPT" in run.stdout) != row["kept"]
    command = [sys.executable, "bench/slowdown.py", "--json", str(out), "--size", "tiny", "--steps", "2", "--keep"]
    subprocess.run([*command, "--family", "gru", "--plain", "--runs", "2"], cwd=ROOT, check=True)
    rows = json.loads(out.read_text())["rows"]
    assert [each["max_slowdown"] for each in rows] == [0.05, None, None]
    assert all(each["bits_equal"] and each["swapped_bytes"] == 0 for each in rows[1:])
    command = [sys.executable, "bench/report.py", str(out), "--docs", str(tmp_path / "page.md")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    assert "Is the default max_slowdown kept?" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("max_slowdown", [None, 0.05])
def test_a_second_plain_process_shows_noise_and_keeps_nothing(max_slowdown: float | None) -> None:
    bytes_in_use = dict.fromkeys(
        ("plain_peak_bytes", "peak_bytes", "plain_steady_peak_bytes", "steady_peak_bytes"), 1 << 20
    )
    row = {"family": "gru", "size": {}, "max_slowdown": max_slowdown, "bits_equal": True, "plain_seconds": 0.1,
           "ratio": 1.02, "ratio_spread": [1.0, 1.04], "kept": True, "last_change": 0, **bytes_in_use}  # fmt: skip
    offloaded = {**row, "max_slowdown": 0.05}
    table = slowdown_table({"rows": [offloaded, row], "machine": {"processor": "a processor"}})
    assert table.title == "Is the default max_slowdown kept? a processor"
    assert table.rows[1].cells[0] == ("gru, plain again" if max_slowdown is None else "gru, 5%")
    assert table.rows[1].cells[5] == ("–" if max_slowdown is None else "yes")
    assert ("*Plain again*" in table.note) == (max_slowdown is None)


def test_rows_that_are_repeated_become_a_table_of_memory(tmp_path: Path) -> None:
    row = {"family": "gru", "size": {}, "max_slowdown": None, "bits_equal": True, "plain_steady_peak_bytes": 100 << 20,
           "plain_allocated_bytes": 1 << 20, "plain_file_bytes": 0}  # fmt: skip
    own = {**row, "max_slowdown": 0.05, "allocated_bytes": 3 << 20, "file_bytes": 1 << 20}
    plain = [{**row, "steady_peak_bytes": nbytes << 20} for nbytes in (98, 101, 102)]
    offloaded = [{**own, "steady_peak_bytes": nbytes << 20} for nbytes in (99, 104, 105)]
    results = tmp_path / "rows.json"
    content = {"format": "offload-slowdown/1", "rows": [*plain, *offloaded], "machine": {"processor": "a processor"}}
    results.write_text(json.dumps(content))
    (table,) = read(results)
    assert table.title == "Memory above plain: a processor"
    ((name, bits, *cells),) = (each.cells for each in table.rows)
    assert (name, bits, table.rows[0].mark) == ("gru", "bit-equal", "not reached")
    assert cells[:3] == ["100.00 MiB", "1.01 × (0.98–1.02)", "2 of 3"]
    assert cells[3:] == ["1.04 × (0.99–1.05)", "2 of 3", "4.00 MiB", "2.00 MiB", "1.00 MiB"]
    assert "2 of 3 plain processes" in table.note


def test_rows_that_need_more_memory_than_plain_are_counted() -> None:
    rows = [
        {"plain_steady_peak_bytes": 100 << 20, "steady_peak_bytes": nbytes << 20} for nbytes in (60, 100, 103, 119, 101)
    ]
    assert above_plain(rows).startswith(" In 3 of 5 rows")
    assert "by 1.00 MiB to 19.00 MiB" in above_plain(rows)
    assert "By malloc's count" not in above_plain(rows)
    assert above_plain(rows[:2]) == ""


def test_what_is_allocated_is_told_from_what_malloc_keeps() -> None:
    above = {"plain_steady_peak_bytes": 1 << 20, "steady_peak_bytes": 5 << 20, "plain_allocated_bytes": 1 << 10}
    below = {**above, "steady_peak_bytes": 1 << 20, "allocated_bytes": 1 << 30}
    uncounted = {**above, "allocated_bytes": None}
    said = above_plain([below, uncounted, {**above, "allocated_bytes": 5 << 10}, {**above, "allocated_bytes": 3 << 10}])
    assert "at most 4.00 KiB more than with plain was allocated after the last step (2 of these rows counted)" in said
    assert "at most 0 B more" in above_plain([{**above, "allocated_bytes": 0}])
