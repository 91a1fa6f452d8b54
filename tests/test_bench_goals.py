"""The table of goals takes figures from result files: the newest ones count, and what falls short is marked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules, by name."""
    sys.path.insert(0, str(ROOT / "bench"))
    import collected
    import goals

    yield {module.__name__: module for module in (collected, goals)}
    sys.path.remove(str(ROOT / "bench"))


def leave(folder: Path, name: str, kind: str, rows: list[dict[str, Any]], date: str = "2026-01-01") -> None:
    machine = {"date": date, "commit": "abc", "processor": "CPU", "device": None}
    (folder / name).write_text(json.dumps({"format": kind, "machine": machine, "rows": rows}))


def step(family: str, name: str, memory: float, time: float) -> dict[str, Any]:
    ours = name.startswith("offload")
    return {"family": family, "name": name, "ours": ours, "memory_over_plain": memory, "step_over_plain": time}


def prediction(family: str, wish: str, off: float, slowdown: float) -> dict[str, Any]:
    figures = {"predicted_seconds": 1.0, "measured_seconds": 1 + off, "predicted_peak_bytes": 100}
    return {"family": family, "wish": wish, "slowdown": slowdown, "measured_peak_bytes": 104, **figures}


def test_without_results_it_says_what_leaves_them(bench: Any, tmp_path: Path) -> None:
    kept = bench["collected"].Kept(tmp_path)
    with pytest.raises(bench["collected"].Missing, match=r"no offload-largest/1 in .*; python bench/largest.py --json"):
        bench["collected"].largest(kept)
    assert bench["collected"].on_a_gpu(kept).measured == "not measured: no GPU has run bench/gpu_suite.py"


def test_copies_on_a_gpu(bench: Any, tmp_path: Path) -> None:
    rows = [{"block_bytes": nbytes, "store_over_torch": share} for nbytes, share in ((4096, 0.3), (1 << 20, 0.98))]
    content = {"part": "copies", "machine": {"device": "Some GPU"}, "results": {"copies": rows}}
    (tmp_path / "copies.json").write_text(json.dumps(content))
    found = bench["collected"].on_a_gpu(bench["collected"].Kept(tmp_path))
    assert found.measured.startswith("copies: 98% to 98% of Tensor.copy_")
    assert found.met is True


def test_predictions(bench: Any, tmp_path: Path) -> None:
    collected = bench["collected"]
    leave(tmp_path, "old.json", "offload-predictions/1", [prediction("gpt", "default", 0.5, 0.5)])
    rows = [prediction("gpt", "default", 0.02, 0.08), prediction("resnet", "default", -0.12, 0.01)]
    leave(tmp_path, "new.json", "offload-predictions/1", rows, "2026-02-01")
    kept = collected.Kept(tmp_path)
    found = collected.prediction_error(kept, "seconds", 0.10)
    assert (found.measured, found.met) == ("-12.0% at worst (resnet, default)", False)
    assert collected.prediction_error(kept, "peak_bytes", 0.05).met
    assert collected.default_slowdown(kept).met is False
    assert collected.default_slowdown(kept).figures["from"]["date"] == "2026-02-01"


def test_whole_steps(bench: Any, tmp_path: Path) -> None:
    collected = bench["collected"]
    least, checkpoint, tutorial = collected.LEAST_NAME, "checkpoint per block", "tutorial's disk hooks"
    rows = [step("gpt", least, 0.3, 1.05), step("gpt", checkpoint, 0.38, 1.25), step("gpt", tutorial, 0.3, 2.2)]
    rows += [step("lstm", least, 0.4, 1.10), step("lstm", checkpoint, 0.38, 1.25), step("lstm", tutorial, 0.5, 1.9)]
    rows += [{"family": "gpt", "name": "absent", "ours": False, "inapplicable": "needs CUDA"}]
    leave(tmp_path, "frontier.json", "offload-frontier/1", rows)
    kept = collected.Kept(tmp_path)
    growth = collected.least_ratio(kept, "memory_over_plain", 0.33)
    assert (growth.measured, growth.met) == ("gpt 0.30, lstm 0.40 × plain", False)
    assert collected.least_ratio(kept, "step_over_plain", 1.10).met
    assert collected.below_checkpoint(kept).measured == "gpt yes, lstm no"
    assert collected.faster_than_tutorial(kept).measured == "gpt yes, lstm no"
    assert collected.faster_than_tutorial(kept).met is False


@pytest.mark.parametrize(("seconds", "met"), [(5.9, True), (6.1, False)])
def test_the_largest_batch(bench: Any, tmp_path: Path, seconds: float, met: bool) -> None:
    about = {"what": "resnet:batch"}
    rows = [{**about, "name": "plain", "ours": False, "largest": 10, "step_seconds": 1.0}]
    rows += [{**about, "name": "offload, a", "ours": True, "largest": 50, "step_seconds": seconds}]
    rows += [{**about, "name": "broken", "ours": True, "error": "no"}]
    leave(tmp_path, "largest.json", "offload-largest/1", rows)
    found = bench["collected"].largest(bench["collected"].Kept(tmp_path))
    assert found.met is met
    assert found.measured.startswith("5.0 × plain (50 against 10) at 1.")


def test_the_table_marks_what_falls_short_and_keeps_the_rest(bench: Any, tmp_path: Path) -> None:
    leave(tmp_path, "predictions.json", "offload-predictions/1", [prediction("gpt", "default", 0.5, 0.01)])
    out = tmp_path / "out.json"
    command = ["predicted-step", "default-slowdown", "largest", "gpu", "--results", str(tmp_path), "--json", str(out)]
    assert bench["goals"].main(command) == 1  # one row has no figures
    rows = json.loads(out.read_text())["rows"]
    assert [rows[name]["met"] for name in command[:4]] == [False, True, None, None]
    assert rows["largest"]["measured"].startswith("not measured: no offload-largest/1")
    assert rows["predicted-step"]["goal"] == "within 10%"
    lines = bench["goals"].table({"largest": bench["collected"].Finding("x", False)})
    assert "NOT REACHED" in lines[-1]


def test_rows_of_an_earlier_run_are_kept_when_asked_for(bench: Any, tmp_path: Path) -> None:
    leave(tmp_path, "predictions.json", "offload-predictions/1", [prediction("gpt", "default", 0.5, 0.01)])
    out = tmp_path / "out.json"

    def names(*arguments: str) -> list[str]:
        bench["goals"].main([*arguments, "--results", str(tmp_path), "--json", str(out)])
        return list(json.loads(out.read_text())["rows"])

    assert names("default-slowdown") == ["default-slowdown"]
    assert names("predicted-step", "--keep") == ["predicted-step", "default-slowdown"]
    assert names("predicted-step") == ["predicted-step"]
    assert json.loads(out.read_text())["rows"]["predicted-step"]["commit"]


def test_the_seconds_of_a_proof_reach_it(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = bench["collected"].Finding
    seen = []
    monkeypatch.setattr(
        bench["goals"].planner_goals, "joint_unseen", lambda *given: seen.append(given) or finding("x", True)
    )
    assert bench["goals"].main(["planner-joint-unseen", "--quick", "--proof-seconds", "7"]) == 0
    assert seen == [(True, 7.0)]
