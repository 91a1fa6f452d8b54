"""The planner's figures: gaps on recorded and on unseen traces, distance to the optimum, planning time.

    python bench/planner_table.py [--traces DIRECTORY] [--output planner_table.json]
                                  [--only shared small unseen time joint joint-unseen joint-time]

Budgets are 50/25/10/3 % of the way from the least feasible limit to the unswapped peak. Times are processor time of
one core. Each figure stands beside its goal; nothing here fails when it is missed. The joint parts plan recomputation
beside swapping, with recipes estimated by the order of kernels, over links of 12 and 15.754 GB/s at 10 %.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import joint_rows
from shapes import SHAPES, small

from offload.plan import (
    Link,
    cut_bounds,
    fastest_plan,
    fastest_swaps,
    least_feasible_limit,
    prove,
    unswapped_bytes,
)
from offload.plan.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = (0.5, 0.25, 0.1, 0.03)
SHARED_BANDWIDTH = 15.754e9
SMALL_COUNT = 200
CANDIDATES = (1_000, 10_000)
GAP_SHARED_MAX = (0.0005, 0.008)  # median, largest
GAP_UNSEEN_MAX = (0.005, 0.035)
PROOF_SECONDS_MAX = 30.0
# Seconds of copying, out and in together, for each second of computation, if everything swapped.
TRAFFIC = (0.3, 0.8)
SHARES = ("gap", "above_", "slowdown")  # figures that begin so are shown in percent
PARTS = ("shared", "small", "unseen", "time", *joint_rows.GOALS)


def traces_folder() -> Path:
    """Return the folder of recorded traces, which may not exist."""
    return Path(os.environ.get("OFFLOAD_TRACES", ROOT.parent / "shared" / "traces"))


def limits(trace: Trace) -> list[tuple[float, int]]:
    """Return each budget with its limit in bytes."""
    least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace), default=0)
    return [(budget, int(least + budget * (peak - least))) for budget in BUDGETS]


def link_for(trace: Trace, traffic: float, latency: float = 0.0) -> Link:
    """Return the link over which swapping everything takes `traffic` times the computation."""
    copied = 2 * sum(tensor.copied_bytes for tensor in trace.tensors)
    bandwidth = copied / (traffic * sum(node.seconds for node in trace.nodes))
    return Link(bandwidth, bandwidth, latency)


def planned(
    name: str, trace: Trace, link: Link, budgets: Sequence[float] = BUDGETS, goal: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Yield one row per budget; with the least possible gap, as far as proven, where the gap is above `goal`."""
    for budget, limit in limits(trace):
        if budget not in budgets:
            continue
        start = time.process_time()
        plan = fastest_plan(trace, link, limit)
        seconds = time.process_time() - start
        if plan.peak_bytes > limit:
            raise AssertionError(f"{name} at {budget}: peak {plan.peak_bytes} over the limit {limit}")
        proven = max(cut_bounds(trace, limit, link).double, plan.bound_seconds)
        two_cuts_seconds = proven
        if plan.gap > goal >= proven / plan.bound_seconds - 1:
            proven = prove(trace, link, limit, plan.swaps, seconds_max=PROOF_SECONDS_MAX).bound_seconds
        least = proven / plan.bound_seconds - 1
        yield {
            "trace": name,
            "budget": budget,
            "tensors": len(trace.tensors),
            "gap": plan.gap,
            "gap_two_cuts": max(0.0, plan.step_seconds / two_cuts_seconds - 1),
            "slowdown": plan.step_seconds / plan.compute_seconds - 1,
            "swaps": len(plan.swaps),
            "planning_s": seconds,
            **({"gap_least": least, "out_of_reach": least > goal} if plan.gap > goal else {}),
        }


def shared_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the recorded traces' rows."""
    for path in sorted(directory.glob("*.json")):
        link = Link(SHARED_BANDWIDTH, SHARED_BANDWIDTH)
        yield from planned(path.stem, Trace.load(path), link, goal=GAP_SHARED_MAX[1])


def unseen_rows(quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the synthetic traces' rows; where `quick`, of the small ones of one seed."""
    for name, make in SHAPES.items():
        for count in (60,) if quick else (60, 250):
            for seed in (0,) if quick else (0, 1, 2):
                trace = make(count, seed)
                for traffic in TRAFFIC:
                    link = link_for(trace, traffic)
                    yield from planned(f"{name}/{count}/{seed}/{traffic}", trace, link, goal=GAP_UNSEEN_MAX[1])


def small_rows(instances: int = SMALL_COUNT) -> Iterator[dict[str, Any]]:
    """Yield the distance of the search from the optimum on small random instances."""
    for seed in range(instances):
        trace = small(seed)
        link = link_for(trace, (0.5, 1.0, 2.0)[seed % 3], 0.01 if seed % 2 else 0.0)
        least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace))
        budget = (0.6, 0.3, 0.1, 0.03, 0.0)[seed % 5]
        limit = int(least + budget * (peak - least))
        plan = fastest_plan(trace, link, limit)
        exact = fastest_swaps(trace, link, limit, plan.swaps)
        yield {
            "seed": seed,
            "tensors": len(trace.tensors),
            "budget": budget,
            "above": plan.step_seconds / exact.step_seconds - 1,
            "proven": exact.optimal,
        }


def time_rows(counts: Sequence[int] = CANDIDATES) -> Iterator[dict[str, Any]]:
    """Yield planning times for so many candidates."""
    for count in counts:
        for name, make in SHAPES.items():
            trace = make(count, 7)
            yield from planned(f"{name}/{count}", trace, link_for(trace, TRAFFIC[1]), BUDGETS[2:3])


def gap_figures(rows: list[dict[str, Any]], key: str = "gap") -> dict[str, float]:
    """Return the median and the largest gap."""
    gaps = [row[key] for row in rows]
    return {f"{key}_median": statistics.median(gaps), f"{key}_max": max(gaps)}


def small_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean and the largest distance from the optimum, and how many optima are proven."""
    above = [row["above"] for row in rows]
    return {
        "above_mean": statistics.fmean(above),
        "above_max": max(above),
        "proven": sum(row["proven"] for row in rows),
    }


def both_gap_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the gaps to the bound and to the tighter one of two cuts; for how many no plan has the gap asked for."""
    proofs = [row["out_of_reach"] for row in rows if "out_of_reach" in row]
    return gap_figures(rows) | gap_figures(rows, "gap_two_cuts") | {"short": len(proofs), "out_of_reach": sum(proofs)}


def time_figures(rows: list[dict[str, Any]], counts: Sequence[int] = CANDIDATES) -> dict[str, float]:
    """Return the longest planning time for each size."""
    return {
        f"planning_s_max_{count}": max(row["planning_s"] for row in rows if row["trace"].endswith(f"/{count}"))
        for count in counts
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=traces_folder())
    parser.add_argument("--output", type=Path, default=Path("planner_table.json"))
    parser.add_argument("--only", nargs="*", default=list(PARTS))
    args = parser.parse_args()
    parts: dict[str, tuple[str, Callable[[], Iterable[dict[str, Any]]], Callable[..., dict[str, float]]]] = {
        "shared": ("gap median <= 0.05 %, max <= 0.8 %", lambda: shared_rows(args.traces), both_gap_figures),
        "small": ("above the optimum: mean <= 0.5 %, max <= 5 %", small_rows, small_figures),
        "unseen": ("gap median <= 0.5 %, max <= 3.5 %", unseen_rows, both_gap_figures),
        "time": ("1,000 candidates <= 1 s, 10,000 <= 10 s", time_rows, time_figures),
        "joint": (joint_rows.GOALS["joint"], lambda: joint_rows.shared_joint_rows(args.traces), joint_rows.figures),
        "joint-unseen": (joint_rows.GOALS["joint-unseen"], joint_rows.unseen_joint_rows, joint_rows.figures),
        "joint-time": (joint_rows.GOALS["joint-time"], joint_rows.joint_time_rows, joint_rows.figures),
    }
    report: dict[str, Any] = {}
    for name in args.only:
        goal, measure, figures = parts[name]
        rows = list(measure())
        if not rows:
            print(f"{name}: no traces in {args.traces}, skipped")
            continue
        report[name] = {"goal": goal, **figures(rows), "rows": rows}
        print(f"{name}: {goal}")
        if name in joint_rows.GOALS:
            print(joint_rows.text(rows, *joint_rows.MOST[name]))
        for key, value in figures(rows).items():
            print(
                f"  {key:26s} {value:.4%}"
                if key.startswith(("gap", "above_", "slowdown"))
                else f"  {key:26s} {value:.3g}"
            )
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
