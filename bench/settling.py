"""The first steps of a training under `max_slowdown`: time and memory of each, and what the controller decided.

    python bench/settling.py --json bench/results/settling-cpu-DATE.json [--family NAME …] [--steps N]

Plain training and the default train the same batches in two live processes, step by step in turn. A step is forward,
backward and optimizer. Memory is the largest resident set of the step, beyond that of the process before training.
Decisions are what the library logs. `report.py` draws the picture. Exit status 1 where losses or gradients differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import models
from contestants import PLAIN, SLOWDOWNS
from race import Runner
from result_file import ResultFile, read_json
from training import Setting

FORMAT = "offload-settling/1"
STEPS = 60
SECONDS_MAX = 600.0  # of all steps of one row
DEFAULT = next(each for each in SLOWDOWNS if each.options["max_slowdown"] == 0.05)


def measure(setting: Setting, steps: int) -> dict[str, Any]:
    """One row."""
    with (
        Runner(setting, PLAIN, settle=1, seconds_max=SECONDS_MAX, watch=True) as plain,
        Runner(setting, DEFAULT, settle=1, seconds_max=SECONDS_MAX, watch=True) as own,
    ):
        while len(own.steps) < steps:
            plain.step()
            own.step()
        allocator = own.finish()["allocator"]
    pairs = list(zip(plain.steps, own.steps, strict=True))
    return {
        "family": setting.family,
        "size": setting.size,
        "max_slowdown": DEFAULT.options["max_slowdown"],
        "allocator": allocator,
        "bits_equal": all((a["loss"], a["gradients"]) == (b["loss"], b["gradients"]) for a, b in pairs),
        "plain": [figures(step) for step in plain.steps],
        "steps": [figures(step) for step in own.steps],
    }


def figures(step: dict[str, Any]) -> dict[str, Any]:
    """What the row keeps of a step."""
    return {"seconds": step["seconds"], **step["watched"]}


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    kinds = [step["kind"] for step in row["steps"]]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    lines = [f"{row['family']}: {len(kinds)} steps ({counted}), bits {'equal' if row['bits_equal'] else 'DIFFER'}"]
    for number, (step, plain) in enumerate(zip(row["steps"], row["plain"], strict=True), 1):
        for _, text in step["decisions"]:
            lines.append(f"  {number:>3}  {step['seconds'] / plain['seconds']:.2f} ×  {text}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where losses or gradients differ."""
    families = [*models.FAMILIES, *models.OTHERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to keep the rows")
    parser.add_argument("--family", choices=families, action="append", help="only this one (repeatable; gpt)")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="full")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--keep", action="store_true", help="add to the rows that the file holds")
    args = parser.parse_args(argv)
    results = ResultFile(args.json)
    before = read_json(args.json).get("rows", []) if args.keep else []
    results.set("format", FORMAT)
    results.set("machine", machine.describe())
    results.set("rows", before)
    equal = True
    for family in args.family or ["gpt"]:
        least = 1024 if args.size == "tiny" else None
        setting = Setting(family, getattr(models.family_of(family), args.size), min_tensor_bytes=least)
        row = measure(setting, args.steps)
        equal = equal and row["bits_equal"]
        results.append("rows", row)
        print(line(row), flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
