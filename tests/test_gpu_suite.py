"""The GPU suite on a machine without a GPU: parts that need one say so, the others run, nothing is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ["build", "driver", "tests", "copies", "frontier-2048", "frontier-4096", "largest", "pair"]


@pytest.fixture(scope="module")
def suite() -> Any:
    """The suite as a module."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import gpu_suite
    finally:
        sys.path.pop(0)
    return gpu_suite


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("strict", [False, True])
def test_without_a_device_parts_are_skipped_and_say_so(
    tmp_path: Path, suite: Any, strict: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OFFLOAD_REQUIRE_CUDA", raising=False)
    options = ["--out", str(tmp_path), "--no-build", "--only", ",".join(PARTS[2:])]
    status = suite.main([*options, "--require-cuda"] if strict else options)
    summary = read(tmp_path / "summary.json")
    assert list(summary["parts"]) == PARTS[2:]
    assert all(part["status"] == "skipped" for part in summary["parts"].values())
    assert all(part["reason"].startswith("no device") for part in summary["parts"].values())
    assert set(summary["machine"]) >= {"date", "commit", "torch", "device", "processor", "python"}
    assert summary["failed"] == (PARTS[2:] if strict else [])
    assert status == (1 if strict else 0)
    assert (f"failed: {', '.join(PARTS[2:])}" if strict else "no part failed") in capsys.readouterr().out


@pytest.mark.long
def test_a_rehearsal_goes_through_the_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "bench" / "gpu_suite.py"), "--out", str(out), "--no-build", "--rehearse"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OFFLOAD_REQUIRE_CUDA": "0", "OMP_NUM_THREADS": "1"}
    hidden["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), hidden.get("PYTHONPATH")]))
    run = subprocess.run(
        [*command, "--only", "driver,copies,frontier-2048,largest,pair"],
        capture_output=True,
        text=True,
        env=hidden,
        check=False,
    )
    ran = {path.stem: read(path) for path in out.iterdir()}
    assert run.returncode == 0, run.stdout + "".join(part.get("stderr", "") for part in ran.values())
    assert set(ran) == {"driver", "copies", "frontier-2048", "largest", "pair", "summary"}  # and no draft is left
    assert ran["driver"]["status"] == "skipped"
    assert ran["driver"]["results"]["device_count"] == {"torch": 0, "offload": 0}
    copies, frontier, largest, pair = (ran[name]["results"] for name in ("copies", "frontier-2048", "largest", "pair"))
    assert ran["copies"]["machine"]["rehearsal"]
    assert copies["arrived_whole"]
    assert {row["direction"] for row in copies["copies"]} == {"out", "in", "both"}
    assert len(copies["control_path"]) == 6
    assert copies["slab_memory"]["seconds_per_gib"]["slab"] > 0
    rows = {row["name"]: row for row in frontier["rows"]}
    by_hand = {"offload, n_tensors −1, lb 4", "offload, half of the tensors, lb 4"}
    for name in {"plain", "checkpoint per block", "selective checkpointing", "save_on_cpu", *by_hand}:
        assert rows[name]["equal_losses"], name
        assert rows[name]["equal_gradients"], name
    assert rows["TRL OffloadActivations"]["inapplicable"].startswith("needs CUDA")
    found = {row["name"]: row.get("largest") for row in largest["rows"]}
    assert found["plain"] > 0
    assert found["checkpoint per block"] > 0
    assert pair["equal"] == [True, True, True]


def test_what_it_leaves_is_flat_and_little(tmp_path: Path, suite: Any) -> None:
    parts = suite.parts(tmp_path, tmp_path / "site", rehearse=False)
    assert [part.name for part in parts] == PARTS
    for part in parts:
        suite.keep(suite.Outcome(part.name, "passed"), tmp_path, {})
    suite.summarize([suite.Outcome("build", "passed")], tmp_path, {}, strict=False)
    every = sorted(path.name for path in tmp_path.iterdir())
    assert every == sorted([*(f"{name}.json" for name in PARTS[1:]), "summary.json"])
    assert len(every) <= 8
    assert sum(part.seconds_max for part in parts) <= 600  # of which the whole allows 530
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in every)


def gone(pid: int) -> bool:
    """Whether a killed process ends; on a loaded machine that takes a moment."""
    for _ in range(300):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_a_part_that_takes_too_long_is_ended_and_its_results_kept(
    tmp_path: Path, suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "SECONDS_TO_STOP", 0.0)
    result = tmp_path / "slow.json"
    code = (
        "import subprocess, sys, time; print('begun', flush=True); "
        f"open({str(result)!r}, 'w').write('{{\"rows\": [1, 2]}}'); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    part = suite.Part("slow", 2.0, False, (sys.executable, "-c", code))
    outcome = suite.run_part(part, work=tmp_path, seconds_left=100.0, paths=[])
    suite.keep(outcome, tmp_path, {})
    kept = read(result)
    assert kept["status"] == "failed"
    assert kept["reason"].startswith("timed out after 2 s")
    assert kept["results"] == {"rows": [1, 2]}
    assert kept["stdout"] == "begun\n"
    child = int((tmp_path / "child").read_text())
    assert gone(child), "its own child lives on"


def test_a_part_that_fails_is_named(tmp_path: Path, suite: Any) -> None:
    part = suite.Part("broken", 30.0, False, (sys.executable, "-c", "raise SystemExit('no such thing')"))
    outcome = suite.run_part(part, work=tmp_path, seconds_left=100.0, paths=[])
    late = suite.run_part(part, work=tmp_path, seconds_left=1.0, paths=[])
    assert (outcome.status, outcome.reason) == ("failed", "exit status 1")
    assert "no such thing" in outcome.stderr
    assert (late.status, late.reason) == ("failed", "no time left")
    assert suite.summarize([outcome], tmp_path, {}, strict=False) == ["broken"]


def test_an_unknown_part_is_refused(tmp_path: Path, suite: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["--out", str(tmp_path), "--only", "driver,speed"]) == 2
    assert "unknown part speed; known parts: build, driver" in capsys.readouterr().err
