"""The GPU suite on a machine without a GPU: parts that need one say so, the others run, nothing is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ["build", "driver", "tests", "copies", "demo", "frontier"]


@pytest.fixture(scope="module")
def suite() -> Any:
    """The suite as a module."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import gpu_suite
    finally:
        sys.path.pop(0)
    return gpu_suite


def run_suite(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "gpu_suite.py"), "--out", str(out), "--no-build", *options]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OFFLOAD_REQUIRE_CUDA": "0"}
    paths = [str(ROOT), hidden.get("PYTHONPATH", "")]
    hidden["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return subprocess.run(command, capture_output=True, text=True, env=hidden, cwd=out.parent, check=False)


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def test_without_a_device_parts_are_skipped_and_say_so(tmp_path: Path) -> None:
    run = run_suite(tmp_path / "out")
    assert run.returncode == 0, run.stdout + run.stderr
    summary = read(tmp_path / "out" / "summary.json")
    assert list(summary["parts"]) == PARTS[1:]
    assert summary["failed"] == []
    for name, part in summary["parts"].items():
        assert part["status"] == "skipped", name
        assert part["reason"].startswith("no device")
    for key in ("date", "commit", "torch", "device", "processor", "python"):
        assert key in summary["machine"]
    assert read(tmp_path / "out" / "driver.json")["results"]["device_count"] == {"torch": 0, "offload": 0}


def test_where_a_device_is_required_a_skip_is_a_failure(tmp_path: Path) -> None:
    run = run_suite(tmp_path / "out", "--only", "copies,frontier", "--require-cuda")
    assert run.returncode == 1
    assert "failed: copies, frontier" in run.stdout
    assert read(tmp_path / "out" / "summary.json")["failed"] == ["copies", "frontier"]


def test_a_rehearsal_goes_through_the_parts(tmp_path: Path) -> None:
    run = run_suite(tmp_path / "out", "--only", "copies,frontier", "--rehearse")
    copies, frontier = (read(tmp_path / "out" / f"{name}.json") for name in ("copies", "frontier"))
    assert run.returncode == 0, run.stdout + copies["stderr"] + frontier["stdout"] + frontier["stderr"]
    assert copies["machine"]["rehearsal"]
    assert copies["results"]["arrived_whole"]
    assert {row["direction"] for row in copies["results"]["copies"]} == {"out", "in", "both"}
    assert len(copies["results"]["control_path"]) == 5
    assert copies["results"]["slab_memory"]["seconds_per_gib"]["slab"] > 0
    rows = {row["name"]: row for row in frontier["results"]["rows"]}
    assert {"plain", "checkpoint per block", "save_on_cpu", "offload all, lb 8", "offload 25%, lb 8"} <= set(rows)
    assert all(row["equal"] for row in rows.values())
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["copies.json", "frontier.json", "summary.json"]


def test_what_it_leaves_is_flat_and_little(tmp_path: Path, suite: Any) -> None:
    names = [f"{part.name}.json" for part in suite.parts(tmp_path, tmp_path / "site", rehearse=False)]
    assert names == [f"{name}.json" for name in PARTS]
    every = [*names, "summary.json", "demo.html"]
    assert len(every) <= 8
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in every)


def test_a_part_that_takes_too_long_is_ended_and_its_results_kept(tmp_path: Path, suite: Any) -> None:
    result = tmp_path / "slow.json"
    code = (
        "import subprocess, sys, time; print('begun', flush=True); "
        f"open({str(result)!r}, 'w').write('{{\"rows\": [1, 2]}}'); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    part = suite.Part("slow", 6.0, False, (sys.executable, "-c", code))
    outcome = suite.run_part(part, work=tmp_path, seconds_left=100.0, paths=[])
    suite.keep(outcome, tmp_path, {})
    kept = read(result)
    assert kept["status"] == "failed"
    assert kept["reason"].startswith("timed out after 6 s")
    assert kept["results"] == {"rows": [1, 2]}
    assert kept["stdout"] == "begun\n"
    state = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_part_that_fails_is_named(tmp_path: Path, suite: Any) -> None:
    part = suite.Part("broken", 30.0, False, (sys.executable, "-c", "raise SystemExit('no such thing')"))
    outcome = suite.run_part(part, work=tmp_path, seconds_left=100.0, paths=[])
    late = suite.run_part(part, work=tmp_path, seconds_left=1.0, paths=[])
    assert (outcome.status, outcome.reason) == ("failed", "exit status 1")
    assert "no such thing" in outcome.stderr
    assert (late.status, late.reason) == ("failed", "no time was left for it")
    assert suite.summarize([outcome], tmp_path, {}, strict=False) == ["broken"]


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    run = run_suite(tmp_path / "out", "--only", "driver,speed")
    assert run.returncode == 2
    assert "no part speed; there are build, driver" in run.stderr
