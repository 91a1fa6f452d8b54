"""How much memory and time training takes with each malloc, and how much that varies from process to process.

    python bench/mallocs.py --json bench/results/mallocs-cpu-DATE.json [--family NAME …] [--malloc NAME …] [--rounds N]

In each round, two new processes for each malloc train the same network: one plain, one offloaded. All processes of a
round step in turn. With `max_slowdown=0.25`, the first plan is almost always kept; but each process makes its own, from
its own profile. Reference steps are not timed. Without --malloc, those that are installed, with the settings of
`offload run`, and glibc without any. Exit status 1 where losses or gradients differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import machine
import models
import slowdown
from contestants import PLAIN
from control_tables import FIRST_STEPS, decisions
from race import RUN_SECONDS_MAX, Runner, environment_with
from result_file import ResultFile
from training import Setting

from offload.devices import allocator
from offload.units import format_bytes, format_seconds

FORMAT = "offload-mallocs/1"
MALLOCS = (*allocator.MALLOCS, "glibc")
FAMILIES = ("gpt", "lstm")
PERCENT = 25
TIMED = ("plain", "planned")  # kinds of steps
WAYS = {"plain": PLAIN, "offloaded": slowdown.contestant_of(PERCENT)}


def run_round(setting: Setting, mallocs: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """One round: a row for each malloc."""
    seconds_max = len(mallocs) * len(WAYS) * RUN_SECONDS_MAX  # of each process: it waits for the others
    with ExitStack() as stack:
        runners = {
            (malloc, way): stack.enter_context(
                Runner(setting, contestant, settle=1, seconds_max=seconds_max, watch=True, malloc=malloc)
            )
            for malloc in mallocs
            for way, contestant in WAYS.items()
        }
        for _ in range(steps - 1):
            for runner in runners.values():
                runner.step()
        figures = {key: runner.finish() for key, runner in runners.items()}
    bits = {key: [(step["loss"], step["gradients"]) for step in runner.steps] for key, runner in runners.items()}
    rows = []
    for malloc in mallocs:
        equal = all(bits[malloc, way] == bits[mallocs[0], "plain"] for way in WAYS)
        row: dict[str, Any] = {"family": setting.family, "malloc": malloc, "bits_equal": equal}
        for way in WAYS:
            row[way] = figures_of(runners[malloc, way].steps, figures[malloc, way], malloc)
        row["swapped_bytes"] = figures[malloc, "offloaded"]["report"]["swapped"]["bytes"]
        row["decisions"] = decisions([step["watched"] for step in runners[malloc, "offloaded"].steps])
        rows.append(row)
    return rows


def figures_of(steps: Sequence[dict[str, Any]], figures: dict[str, Any], malloc: str) -> dict[str, Any]:
    """The time and memory of one process."""
    if figures["allocator"] != malloc:
        raise RuntimeError(f"the process was to use {malloc}, and uses {figures['allocator']}")
    timed = [step["seconds"] for step in steps[FIRST_STEPS:] if step["watched"]["kind"] in TIMED]
    if not timed:
        raise RuntimeError("no step followed a plan; take more --steps")
    kinds = [(step["watched"]["kind"], step["seconds"]) for step in steps]
    return {"seconds": statistics.median(timed), "peak_bytes": figures["peak_bytes"], "steps": kinds}


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    ways = [f"{way} {format_bytes(row[way]['peak_bytes'])}, step {format_seconds(row[way]['seconds'])}" for way in WAYS]
    return f"{row['family']:<9} {row['malloc']:<9} {'; '.join(ways)}, bits {'' if row['bits_equal'] else 'NOT '}equal"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where losses or gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to keep the rows")
    parser.add_argument("--family", choices=[*models.FAMILIES, *models.OTHERS], action="append")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="full")
    parser.add_argument("--malloc", choices=MALLOCS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args(argv)
    mallocs = args.malloc or [each for each in allocator.MALLOCS if allocator.find_recycling_allocator(each)]
    if not args.malloc:
        mallocs.append("glibc")
    for name in mallocs:
        try:
            environment_with(name)
        except ValueError as error:
            parser.error(str(error))
    results = ResultFile(args.json)
    for name, value in (("format", FORMAT), ("machine", machine.describe()), ("rows", [])):
        results.set(name, value)
    least = 1024 if args.size == "tiny" else None
    equal = True
    for family in args.family or FAMILIES:
        setting = Setting(family, getattr(models.family_of(family), args.size), min_tensor_bytes=least)
        for _ in range(args.rounds):
            for row in run_round(setting, mallocs, args.steps):
                equal = equal and row["bits_equal"]
                results.append("rows", row)
                print(line(row), flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
