"""`bench/settling.py`: each step with its kind, memory and decisions, and what the page says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEW = "new plan: step 1.0 s: compute 1.0 s\npeak 1 MiB instead of 2 MiB"
AGAIN = "planning again (1 of at most 5): steps were 9.0% ± 1.2% slower than without swapping"
BACK = "back to a plan with a peak of 9 MiB: the last one tried, with 7 MiB, was 9.0% ± 1.2% slower than without"


def step(seconds: float, kind: str = "planned", *texts: str) -> dict[str, Any]:
    decisions = [["DEBUG" if text.startswith("phase") else "INFO", text] for text in texts]
    return {"seconds": seconds, "peak_bytes": 1 << 20, "kind": kind, "decisions": decisions}


@pytest.fixture
def run() -> dict[str, Any]:
    """A run that goes back in its fifth step."""
    steps = [
        step(5.0, "profiled"),
        step(1.5, "planned", "phase: profiling → planning"),
        step(1.75, "reference"),
        step(1.25, "planned", AGAIN, NEW),
        step(1.5, "planned", BACK, "phase: measuring → steady"),
        step(1.0),
        step(1.25),
        step(1.5),
    ]
    plain = [{**step(1.0, "plain"), "peak_bytes": 2 << 20} for _ in steps]
    return {"family": "gpt", "max_slowdown": 0.05, "bits_equal": True, "plain": plain, "steps": steps}


def page_of(run: dict[str, Any], tmp_path: Path, *options: str) -> str:
    """What `report.py` writes about a run."""
    results, page = tmp_path / "settling.json", tmp_path / "page.md"
    content = {"format": "offload-settling/1", "machine": {"processor": "a processor"}, "rows": [run]}
    results.write_text(json.dumps(content), encoding="utf-8")
    subprocess.run(
        [sys.executable, "bench/report.py", str(results), "--docs", str(page), *options], cwd=ROOT, check=True
    )
    return page.read_text(encoding="utf-8")


def test_the_page_has_every_decision_and_says_what_they_led_to(run: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(run, tmp_path)
    assert "## The first 8 steps: GPT, 1.000 s, a processor" in page
    assert "changes for the last time at step 5 (target: 20 or fewer)" in page
    assert "The slowest step besides profiled and trial steps takes 1.75 ×" in page
    assert "After the last change, the median is 1.25 ×, at 0.50 × memory." in page
    assert "The controller goes back to an earlier plan at step 5." in page
    assert f"| 4 | planned | 1.250 s | 1.00 MiB | {AGAIN} |" in page
    assert f"|  |  |  |  | {NEW.replace(chr(10), '; ')} |" in page
    assert "| 5 | planned | 1.500 s | 1.00 MiB | back to a plan" in page


def test_a_run_that_never_goes_back_says_so(run: dict[str, Any], tmp_path: Path) -> None:
    run["steps"][4]["decisions"] = []
    page = page_of(run, tmp_path)
    assert "changes for the last time at step 4" in page
    assert "goes back to no earlier plan" in page


def test_the_picture_is_drawn(run: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page_of(run, tmp_path, "--html", str(tmp_path / "page.html"))
    said = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'alt="The first 8 steps: GPT, 1.000 s, a processor"' in said
    assert "data:image/svg+xml;base64," in said


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "settling.json"
    command = [sys.executable, "bench/settling.py", "--json", str(out), "--size", "tiny", "--steps", "12"]
    subprocess.run([*command, "--family", "encoder"], cwd=ROOT, check=True)
    (found,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert found["bits_equal"]
    assert len(found["steps"]) == len(found["plain"]) == 12
    kinds = [each["kind"] for each in found["steps"]]
    assert kinds[0] == "profiled"
    assert "profiled" not in kinds[1:]
    assert {"planned", "bare"} & set(kinds)
    assert {each["kind"] for each in found["plain"]} == {"plain"}
    assert not any(each["decisions"] for each in found["plain"])
    logged = [text for each in found["steps"] for _, text in each["decisions"]]
    assert "phase: profiling → planning" in logged
    assert not any(text.startswith("node ") for text in logged)
    assert all(each["peak_bytes"] > 0 for each in found["steps"][1:])
