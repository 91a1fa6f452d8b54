"""The frontier of memory and step time on the CPU, by a sweep over memory limits, and where `max_slowdown` ends on it.

    python bench/sweep.py --json bench/results/sweep-cpu-DATE.json [--family NAME …]

For each network copies train the same batches in turn, in one process: a plain one, one under `max_slowdown`, and one
under each memory limit of the sweep. A limit is a share of the way from the lowest feasible limit to the peak without
swaps. *Growth* is the predicted peak of tensors above what is in memory before the step, relative to the same without
swaps. Times are those of forward and backward.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from contest import spread
from models import FAMILIES, OTHERS, family_of
from recomputation import Contestant, least_and_peak, min_bytes
from result_file import write_json
from result_tables import least_kept

import offload
from offload.devices import allocator
from offload.plan import Plan
from offload.units import format_seconds

SHARES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
SETTLE_STEPS = 40
MEASURED_STEPS = 15
MAX_SLOWDOWN = 0.05


def measure(name: str, size_name: str, settle: int, measured: int) -> dict[str, Any]:
    """One row."""
    network = family_of(name)
    size = getattr(network, size_name)
    least, peak = least_and_peak(network, size)
    goals: dict[str, dict[str, Any]] = {"max_slowdown": {"max_slowdown": MAX_SLOWDOWN}}
    goals |= {f"{share:.0%}": {"memory_limit": int(least + share * (peak - least))} for share in SHARES}
    plain, contestants = Contestant(network, size), {key: Contestant(network, size) for key in goals}
    with ExitStack() as stack:
        handles = {
            key: stack.enter_context(
                offload.enable(contestants[key].model, min_tensor_bytes=min_bytes(size), **goals[key])
            )
            for key in goals
        }
        equal = True
        for number in range(settle + measured):
            expected = plain.step(number)
            for each in contestants.values():
                equal = all(map(torch.equal, each.step(number), expected)) and equal
        seconds = {key: each.seconds[-measured:] for key, each in contestants.items()}
        base = plain.seconds[-measured:]
        points = {key: point(handle.plan, seconds[key], base) for key, handle in handles.items()}
    return {
        "family": name,
        "size": size,
        "bits_equal": equal,
        "plain_seconds": median(base),
        "max_slowdown": MAX_SLOWDOWN,
        "chosen": points.pop("max_slowdown"),
        "points": points,
    }


def point(plan: Plan | None, seconds: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    """Memory and step time of one copy."""
    assert plan is not None
    before, unswapped = min(plan.trace.base_bytes), plan.unswapped_peak_bytes
    return {
        "growth": (plan.peak_bytes - before) / (unswapped - before),
        "ratio": median(seconds) / median(plain),
        "ratio_spread": spread([own / other for own, other in zip(seconds, plain, strict=True)]),
        "swaps": len(plan.swaps),
        "recomputes": len(plan.recomputes),
    }


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    best, chosen = least_kept(row), row["chosen"]
    points = ", ".join(f"{each['growth']:.2f} × at {each['ratio']:.2f} ×" for each in row["points"].values())
    return (
        f"{row['family']:<9} plain {format_seconds(row['plain_seconds'])}, bits "
        f"{'equal' if row['bits_equal'] else 'DIFFER'}; max_slowdown {row['max_slowdown']:.0%}: growth "
        f"{chosen['growth']:.2f} × at {chosen['ratio']:.3f} ×; least growth within it by the sweep: "
        f"{'none' if best is None else format(best['growth'], '.2f') + ' ×'} ({points})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--family", choices=[*FAMILIES, *OTHERS], action="append", help="only this one (repeatable)")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="quick")
    parser.add_argument("--settle", type=int, default=SETTLE_STEPS, help="steps before those that are measured")
    parser.add_argument("--measured", type=int, default=MEASURED_STEPS, help="steps that are measured")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        print(json.dumps(measure(args.worker, args.size, args.settle, args.measured)))
        return 0
    rows = []
    for name in args.family or [*FAMILIES, *OTHERS]:
        options = ["--size", args.size, "--settle", str(args.settle), "--measured", str(args.measured)]
        command = [sys.executable, __file__, *options, "--worker", name]
        environment = {**allocator.preload_environment()}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(line(rows[-1]), flush=True)
        if args.json is not None:
            write_json(args.json, {"format": "offload-sweep/1", "machine": machine.describe(), "rows": rows})
    return 0 if all(row["bits_equal"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
