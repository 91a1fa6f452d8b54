"""Whether `max_slowdown` is kept: ten networks, each plain and offloaded in two live processes that step in turn.

    python bench/slowdown.py --json bench/results/slowdown-cpu-DATE.json [--slowdown PERCENT …] [--family NAME …]
    python bench/slowdown.py --json bench/results/slowdown-cpu-DATE.json --keep --plain --runs 8 --family gpt

A step is forward, backward and optimizer. The first `SETTLE_STEPS` may be profiled, tried and planned anew; the ratio
is that of the medians of the steps after them, the *measured* steps. Memory is the largest resident set, beyond that of
the process before training: of all steps, and of the measured ones. "kept" allows 1 % for noise. Bits of losses and
gradients are compared in every step; exit status 1 where they differ, not where a slowdown is not kept: the table
tells. With `--plain` the second process trains without offload too: the ratio shows how far two processes that do the
same differ on this machine.
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
from contest import spread
from contestants import PLAIN, SLOWDOWNS, Contestant
from control_tables import decisions, last_change, peak
from race import Runner
from result_file import ResultFile, read_json
from training import Setting

from offload.units import format_bytes, format_seconds

FORMAT = "offload-slowdown/1"
SETTLE_STEPS = 40
MEASURED_STEPS = 40
SECONDS_MAX = 150.0  # of steps of one row: long steps are fewer, and never fewer than MEASURED_STEPS_MIN
MEASURED_STEPS_MIN = 7
NOISE = 0.01
SIZES = ("quick", "full")


def measure(setting: Setting, contestant: Contestant, steps: int | None = None, malloc: str = "") -> dict[str, Any]:
    """One row; `steps`: how many after the settling, by default as many as there is time for."""
    with ExitStack() as stack:
        plain, own = (
            stack.enter_context(Runner(setting, each, settle=1, seconds_max=4 * SECONDS_MAX, watch=True, malloc=malloc))
            for each in (PLAIN, contestant)
        )
        settle = SETTLE_STEPS if steps is None else steps
        while len(plain.steps) < settle:
            plain.step()
            own.step()
        pair_seconds = sum(statistics.median(row["seconds"] for row in each.steps[1:]) for each in (plain, own))
        rest = steps or max(MEASURED_STEPS_MIN, min(MEASURED_STEPS, int(SECONDS_MAX / pair_seconds)))
        for _ in range(rest):
            plain.step()
            own.step()
        figures = [each.finish() for each in (plain, own)]
    watched = [[step["watched"] for step in each.steps] for each in (plain, own)]
    seconds = [[float(step["seconds"]) for step in each.steps] for each in (plain, own)]
    steady = [each[settle:] for each in seconds]
    ratio = statistics.median(steady[1]) / statistics.median(steady[0])
    max_slowdown = contestant.options.get("max_slowdown")
    return {
        "family": setting.family,
        "size": setting.size,
        "max_slowdown": max_slowdown,  # None: plain
        "bits_equal": all(
            (one["loss"], one["gradients"]) == (other["loss"], other["gradients"])
            for one, other in zip(plain.steps, own.steps, strict=True)
        ),
        "plain_seconds": statistics.median(steady[0]),
        "seconds": statistics.median(steady[1]),
        "ratio": ratio,
        "ratio_spread": spread([own / plain for plain, own in zip(*steady, strict=True)]),
        "kept": max_slowdown is None or ratio <= 1 + max_slowdown + NOISE,
        "plain_peak_bytes": figures[0]["peak_bytes"],
        "peak_bytes": figures[1]["peak_bytes"],
        "plain_steady_peak_bytes": peak(watched[0][settle:]),
        "steady_peak_bytes": peak(watched[1][settle:]),
        "plain_allocated_bytes": figures[0]["allocated_bytes"],  # after the last step; None: malloc does not count
        "allocated_bytes": figures[1]["allocated_bytes"],
        "plain_file_bytes": figures[0]["file_bytes"],  # pages of programs and files, such as code that runs
        "file_bytes": figures[1]["file_bytes"],
        "last_change": last_change(watched[1]),
        "decisions": decisions(watched[1]),
        "slowest_settling": max(own / plain for plain, own in zip(*(each[:settle] for each in seconds), strict=True)),
        "steps_seconds": seconds[1],
        "plain_steps_seconds": seconds[0],
        "allocator": figures[1]["allocator"],
        "swapped_bytes": 0 if max_slowdown is None else figures[1]["report"]["swapped"]["bytes"],
    }


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    lower, upper = row["ratio_spread"]
    limit = "plain" if row["max_slowdown"] is None else format(row["max_slowdown"], ".0%")
    return (
        f"{row['family']:<9} {limit:>5}  plain {format_seconds(row['plain_seconds']):>8}  "
        f"{row['ratio']:.3f} × ({lower:.2f}–{upper:.2f}) {'kept' if row['kept'] else 'NOT KEPT'}  memory "
        f"{row['peak_bytes'] / row['plain_peak_bytes']:.2f} × ({format_bytes(row['plain_peak_bytes'])}), measured "
        f"steps {row['steady_peak_bytes'] / max(1, row['plain_steady_peak_bytes']):.2f} ×  last change at step "
        f"{row['last_change']}  bits {'equal' if row['bits_equal'] else 'DIFFER'}"
    )


def contestant_of(percent: float | None) -> Contestant:
    """The engine under this `max_slowdown`; plain training for None."""
    if percent is None:
        return PLAIN
    for contestant in SLOWDOWNS:
        if contestant.options["max_slowdown"] == percent / 100:
            return contestant
    raise ValueError(f"no contestant for {percent} %: there are {[each.options['max_slowdown'] for each in SLOWDOWNS]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where gradients or losses differ."""
    families = [*models.FAMILIES, *models.OTHERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to keep the rows")
    parser.add_argument("--slowdown", type=float, action="append", help="in per cent (5; repeatable)")
    parser.add_argument("--family", choices=families, action="append", help="only this one (repeatable)")
    parser.add_argument("--size", choices=("tiny", *SIZES), default="quick")
    parser.add_argument("--steps", type=int, help="to settle, and again to measure")
    parser.add_argument("--plain", action="store_true", help="instead of offload, a second plain process")
    parser.add_argument("--runs", type=int, default=1, help="rows for each network and slowdown")
    parser.add_argument("--keep", action="store_true", help="add to the rows that the file holds")
    args = parser.parse_args(argv)
    results = ResultFile(args.json)
    before = read_json(args.json).get("rows", []) if args.keep else []
    results.set("format", FORMAT)
    results.set("machine", machine.describe())
    results.set("rows", before)
    equal = True
    limits = [None] if args.plain else args.slowdown or [5.0]
    for percent in limits:
        for family in [each for each in args.family or families for _ in range(args.runs)]:
            least = 1024 if args.size == "tiny" else None
            setting = Setting(family, getattr(models.family_of(family), args.size), min_tensor_bytes=least)
            row = measure(setting, contestant_of(percent), args.steps)
            equal = equal and row["bits_equal"]
            results.append("rows", row)
            print(line(row), flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
