"""How exactly a plan's slowdown is known from a few pairs of steps, and how many pairs a search needs to keep the plan.

    offload run -- python bench/pairs.py --json bench/results/pairs-cpu-DATE.json [--family NAME …] [--pairs N]
    offload run -- python bench/pairs.py --json bench/results/pairs-cpu-DATE.json --keep --beside --family gpt

Each network follows the first plan of a search with the default `max_slowdown`; with `--beside`, next to a program that
computes on one processor. A pair is a reference step and the step of this plan after it. No plan is judged: the first
one is followed until all pairs have been measured. Then all windows of n consecutive pairs are compared, as a search
does. *Off by* is the standard deviation of the results. The windows overlap, so it is too small: by about 5 % with 8 of
96 pairs, by 16 % with 24.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest import mock

import machine
import models
import slowdown
from control_tables import PAIRS_IN_TIME
from result_file import ResultFile, read_json
from same_script import neighbour
from training import Setting, Trainer, same_bits, warm_up

from offload.control.limits import LIMITS
from offload.control.measured_slowdown import standard_error
from offload.control.plan_search import PlanSearch
from offload.control.step_cost import StepCost
from offload.devices import allocator
from offload.plan import Plan

FORMAT = "offload-pairs/1"
FAMILIES = ("gpt", "vit", "encoder")
COUNTS = (3, 8, 12, 24)
PAIRS = 96
PERCENT = 5
STEPS_MAX = 6  # for each pair; more mean that no reference steps come


class Pairs:
    """Stands in for the judgement of plans: keeps each step and the reference step beside it, and judges nothing."""

    def __init__(self) -> None:
        self.steps: list[StepCost] = []
        self.references: list[StepCost] = []
        self.waits: frozenset[int] = frozenset()
        self.plan: Plan | None = None

    def judge(self, search: PlanSearch, plan: Plan, steps: Sequence[StepCost], *_: object) -> None:
        """Take the last reference step out of the search, so that further ones are due."""
        if search.references and (not self.steps or steps[-1] is not self.steps[-1]):
            self.steps.append(steps[-1])
            self.references.append(search.references[-1])
            self.waits, self.plan = search.waits, plan
            search.references.clear()


def measure(setting: Setting, pairs: int, *, beside: bool) -> dict[str, Any]:
    """One row."""
    contestant, found = slowdown.contestant_of(PERCENT), Pairs()
    with same_bits("cpu"):
        warm_up(setting, contestant)
    with (
        neighbour() if beside else nullcontext(),
        same_bits("cpu"),
        mock.patch.object(PlanSearch, "judge", lambda *args, **_: found.judge(*args)),
    ):
        trainer = Trainer(setting, contestant)
        for _ in range(STEPS_MAX * pairs):
            trainer.step()
            if len(found.references) >= pairs:
                break
        trainer.close()
    plan = found.plan
    if plan is None or len(found.references) < pairs:
        raise RuntimeError(f"{setting.family}: {len(found.references)} pairs were measured, not {pairs}")
    if not plan.swaps:
        raise RuntimeError(f"{setting.family}: the first plan swaps nothing")
    return {
        "family": setting.family,
        "size": setting.size,
        "beside": beside,
        "peak_bytes": plan.peak_bytes,
        "unswapped_peak_bytes": plan.unswapped_peak_bytes,
        "pairs": pairs,
        "max_slowdown": PERCENT / 100,
        "allocator": allocator.current(),
        "all": result_of(found, 0, pairs)[0],
        "counts": [counted(found, count) for count in COUNTS if count <= max(PAIRS_IN_TIME, pairs // 4)],
    }


def counted(found: Pairs, count: int) -> dict[str, Any]:
    """What searches would find that measure so many pairs."""
    results = [result_of(found, first, count) for first in range(len(found.references) - count + 1)]
    slowdowns, errors = zip(*results, strict=True)
    return {
        "count": count,
        "mean": fmean(slowdowns),
        "deviation": stdev(slowdowns),
        "error": fmean(errors),
        "kept": fmean(slow + error <= PERCENT / 100 for slow, error in results),
    }


def result_of(found: Pairs, first: int, count: int) -> tuple[float, float]:
    """The slowdown by these pairs, and its standard error."""
    search = PlanSearch(replace(LIMITS, judged_steps_max=count))
    search.references.extend(found.references[first : first + count])
    search.waits = found.waits
    compute, taken, deviation = search.compare(found.steps[first : first + count])
    return taken / compute - 1, standard_error(deviation, count, [], LIMITS)


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    parts = [
        f"{each['count']} pairs: off by {each['deviation']:.2%}, found {each['error']:.2%}, kept {each['kept']:.0%}"
        for each in row["counts"]
    ]
    beside = "beside another program, " if row["beside"] else ""
    return f"{row['family']:<9} {beside}{row['all']:.2%} slower; {'; '.join(parts)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to keep the rows")
    parser.add_argument("--family", choices=[*models.FAMILIES, *models.OTHERS], action="append")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="full")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--beside", action="store_true", help="beside a program that computes on one processor")
    parser.add_argument("--keep", action="store_true", help="add to the rows that the file holds")
    args = parser.parse_args(argv)
    if args.pairs < 2 * PAIRS_IN_TIME:
        parser.error(f"--pairs: at least {2 * PAIRS_IN_TIME}")
    results = ResultFile(args.json)
    before = read_json(args.json).get("rows", []) if args.keep else []
    for name, value in (("format", FORMAT), ("machine", machine.describe()), ("rows", before)):
        results.set(name, value)
    least = 1024 if args.size == "tiny" else None
    for family in args.family or FAMILIES:
        setting = Setting(family, getattr(models.family_of(family), args.size), min_tensor_bytes=least)
        row = measure(setting, args.pairs, beside=args.beside)
        results.append("rows", row)
        print(line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
