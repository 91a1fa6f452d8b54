"""Deliberately broken guards, and who catches each.

    python -m campaign.mutants [--seeds N]     (with tests/ and the checkout on PYTHONPATH)

runs the whole table and N seeds of the unbroken build, and writes both into docs/reliability.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from campaign.build import ROOT, build_mutants
from campaign.seeds import run_apart

RELIABILITY = ROOT / "docs" / "reliability.json"
SEEDS_MAX = 400  # most are missed within the first few; batches need blocks that meet in a queue
SECONDS_MAX = 240
WALK = "tests/campaign/test_seeds.py::test_every_seed_survives"

# The five that the oracle, too, must report, from the log alone.
JUDGED = {
    "copy-out waits for compute",
    "copy-in waits for its copy-out",
    "copy-in waits for compute",
    "consumer waits for copy-in",
    "slot waits for its last read",
}
EDGES = JUDGED | {
    "batch waits for compute",
    "batch waits for its copy-outs",
    "bounce waits for its last read",
    "cancel refuses a copy that has begun",
    "checksum is verified",
    "copy-in holds its target's owner",
    "event is recycled after its last waiter",
    "extent outlives its fill",
    "failure is told after the slices before it",
    "in_done counts every slice",
    "short write is continued",
    "source outlives its copy-out",
    "spill waits for copy-out",
}
# A lock is not an edge that one order of steps can miss: the thread sanitizer has to say so.
RACES = {"event pool is locked": "tests/stress/test_stress.py::test_a_planted_race_is_found"}

# Broken in Python, by campaign/broken_engine.py: the tests that must fail then, and must pass otherwise.
IN_PLACE = "tests/autograd/test_in_place.py::test_"
PYTHON = {
    "source is held until its copy ends": (
        "tests/autograd/test_copies_in_flight.py::test_a_freed_source_may_be_overwritten"
    ),
    "version of a swapped tensor is checked": IN_PLACE + "write_after_save_is_the_usual_error",
    "identity is more than an address": IN_PLACE + "freed_addresses_that_come_back_are_other_tensors",
    "a duplicate keeps its stride": "tests/autograd/test_tensor_kinds.py::test_views_come_back_onto_one_storage",
    "version of a kept tensor is checked": IN_PLACE + "tensors_that_pass_through_are_watched_too",
}


def edges_in_sources() -> set[str]:
    """Every guard that can be left out."""
    text = "".join(path.read_text() for path in (ROOT / "csrc").glob("*.[ch]*"))
    return set(re.findall(r'OFFLOAD_(?:EDGE|BROKEN)\(\s*"([^"]+)"', text))


def walk_without(core: Path, edge: str) -> dict[str, Any]:
    """Leave one guard out, and walk until somebody notices."""
    tally = run_apart(core, 0, SEEDS_MAX, edge, timeout=SECONDS_MAX)
    row: dict[str, Any] = {"name": edge, "caught_by": WALK, "caught": bool(tally.failures)}
    row["first"] = tally.failures[0] if tally.failures else ""
    if edge in JUDGED:
        row["oracle"] = tally.oracle_reports[0] if tally.oracle_reports else ""
        row["caught"] = row["caught"] and bool(tally.oracle_reports)
    return row


def break_engine() -> list[dict[str, Any]]:
    """Run each named test unbroken, where it must pass, and then broken, where it must fail."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "campaign.broken_engine", json.dumps(PYTHON)]
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if run.returncode != 0:
        raise RuntimeError(run.stdout + run.stderr)
    rows: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return rows


def without_paths(row: dict[str, Any]) -> dict[str, Any]:
    """A row that says nothing of the machine it was made on."""
    return {key: re.sub(r" of /[^\s:]+", "", value) if isinstance(value, str) else value for key, value in row.items()}


def record(**figures: Any) -> None:
    """Put figures into docs/reliability.json beside those of others."""
    held = json.loads(RELIABILITY.read_text()) if RELIABILITY.exists() else {}
    RELIABILITY.parent.mkdir(exist_ok=True)
    RELIABILITY.write_text(json.dumps(held | figures, indent=2, ensure_ascii=False, sort_keys=True) + "\n")


def main() -> int:
    """Everything, recorded."""
    from stress.build import find_planted_race

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    count = parser.parse_args().seeds
    core = build_mutants()
    rows = [walk_without(core, edge) for edge in sorted(EDGES)]
    for edge, test in RACES.items():
        said = find_planted_race(edge)
        rows.append(
            {"name": edge, "caught_by": test, "caught": "data race" in said, "first": "ThreadSanitizer: data race"}
        )
    rows += break_engine()
    tally = run_apart(core, 0, count)
    record(
        mutants=[without_paths(row) for row in rows],
        seeds={
            "run": tally.seeds,
            "failed": len(tally.failures) + len(tally.oracle_reports),
            "walks": tally.walks,
            "blocks_brought_back": tally.returned,
            "faults_injected": tally.faults,
            "operations_judged": tally.operations_judged,
            "seconds": round(tally.seconds),
        },
    )
    missed = [row["name"] for row in rows if not row["caught"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} mutants caught; {tally.seeds} seeds, {len(tally.failures)} failed")
    return 1 if missed or tally.failures or tally.oracle_reports else 0


if __name__ == "__main__":
    sys.exit(main())
