"""Run the campaigns and write what they found: docs/reliability.json and docs/reliability.md.

    python tests/reliability.py            in the size of a CI run
    python tests/reliability.py --long     in full
    python tests/reliability.py --table    only the page, from the JSON as it stands

The seeded schedules and the mutants stand in the same JSON, under "seeds" and "mutants", which campaign.mutants writes.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JSON = ROOT / "docs" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
CAMPAIGNS = ["tests/autograd", "tests/core/test_faults_below.py", "tests/processes", "tests/test_databases.py"]
COUNTED = [
    "faults injected",
    "real limits met",
    "blocks through a memory of one",
    "events of the stateful test",
    "forwards abandoned",
    "kills survived",
    "exits with copies in flight",
    "forks",
    "steps of the long runs",
]
NOT_RUN = "not run"


def run_campaigns(is_long: bool) -> int:
    """Run pytest on the campaigns, then the seeds; merge what was counted into the JSON. Returns 0 where all passed."""
    counted = JSON.with_suffix(".part")
    JSON.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", *CAMPAIGNS, f"--reliability-json={counted}"]
    command += ["--long", "--all-databases"] if is_long else []
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    seeds = [sys.executable, "-m", "campaign.mutants", *(["--seeds", "100000"] if is_long else [])]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    status |= subprocess.run(seeds, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
    merged = read() | {"campaigns": json.loads(counted.read_text())}
    counted.unlink()
    JSON.write_text(json.dumps(merged, indent=2, ensure_ascii=False, sort_keys=True) + "\n")
    return status


def read() -> dict:
    """What has been found so far."""
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def rows(found: dict) -> list[tuple[str, str]]:
    """The figures' names and values; what has not been run says so."""
    campaigns = found.get("campaigns", {})
    counts = campaigns.get("figures", {}).get("campaigns", {})
    seeds = found.get("seeds", {})
    passed = campaigns.get("passed", {})
    scenarios = sum(count for path, count in passed.items() if path.startswith("tests/autograd/"))
    mutants = found.get("mutants")
    caught = sum(bool(mutant["caught"]) for mutant in mutants or [])
    databases = {
        name: f"{outcomes.get('bit-equal', 0)} of {sum(outcomes.values())}"
        for name, outcomes in campaigns.get("databases", {}).items()
    }
    return [
        ("seeds run, each under every schedule", number(seeds.get("run"))),
        ("seeds that failed", number(seeds.get("failed"))),
        ("faults injected by the seeds", number(seeds.get("faults_injected"))),
        *((what, number(counts.get(what))) for what in COUNTED),
        ("autograd scenarios × setups, all bit-equal", number(scenarios or None)),
        *((f"{name}: cases bit-equal", value) for name, value in sorted(databases.items())),
        *([] if databases else [("databases' cases bit-equal", NOT_RUN)]),
        ("mutants caught of mutants planted", f"{caught} of {len(mutants)}" if mutants else NOT_RUN),
        ("tests that failed", number(campaigns.get("failed"))),
        ("seconds taken: seeds", number(seeds.get("seconds"))),
        ("seconds taken: everything else", number(campaigns.get("seconds"))),
    ]


def number(value: object) -> str:
    """A count for the page."""
    if value is None:
        return NOT_RUN
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def page(found: dict) -> str:
    """The Markdown page."""
    size = found.get("campaigns", {}).get("long")
    lines = [
        "# How hard it is tested",
        "",
        "Written by `python tests/reliability.py`; with `--long` the campaigns run in full. Edit nothing here.",
        "",
        f"Size of the last run: {NOT_RUN if size is None else 'full' if size else 'that of a CI run'}.",
        "",
        "| figure | value |",
        "|---|---:|",
        *(f"| {name} | {value} |" for name, value in rows(found)),
        "",
        "## Mutants: guards that were broken on purpose",
        "",
    ]
    mutants = found.get("mutants")
    if not mutants:
        return "\n".join([*lines, NOT_RUN.capitalize() + ".", ""])
    lines += ["| mutant | caught by | caught |", "|---|---|---|"]
    for mutant in mutants:
        by = mutant["caught_by"]
        by = ", ".join(by) if isinstance(by, list) else str(by)
        lines.append(f"| {mutant['name']} | {by} | {'yes' if mutant['caught'] else '**no**'} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Run what was asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", action="store_true", help="run the campaigns in full")
    parser.add_argument("--table", action="store_true", help="only write the page, from docs/reliability.json")
    options = parser.parse_args()
    status = 0 if options.table else run_campaigns(options.long)
    PAGE.write_text(page(read()))
    return status


if __name__ == "__main__":
    sys.exit(main())
