"""Plans that swap and recompute beside those that swap alone: on recorded and on unseen traces, and their times.

`planner_table.py` prints these rows, `planner_goals.py` judges them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes import with_recipes
from shapes import SHAPES

from offload.plan import Link, fastest_plan, least_feasible_limit, prove_joint, unswapped_bytes
from offload.plan.trace import Trace

BANDWIDTHS = (12e9, 15.754e9)
ROOM = 0.1  # of the way from the least feasible limit to the unswapped peak
SLOWDOWN_MAX = 0.06
GAP_SHARED_MAX = (0.01, 0.05)  # median, largest
GAP_UNSEEN_MAX = (0.02, 0.1)
GAP_PROVEN_MAX = 0.02  # of a plan whose gap is above the largest, to what is proven
COUNTS = (60, 250)
SEEDS = (0, 1, 2)
BIG_COUNT = 10_000
BIG_SECONDS_MAX = 10.0
PROOF_SECONDS_MAX = 60.0  # for a plan whose gap is above the largest of unseen traces
GOALS = {
    "joint": "slowdown <= 6 %, gap median <= 1 %, max <= 5 %",
    "joint-unseen": "gap median <= 2 %, above 10 % only if proven to 2 %, never slower than by swapping alone",
    "joint-time": "10,000 candidates <= 10 s",
}

MOST = {
    "joint": (GAP_SHARED_MAX[1], SLOWDOWN_MAX),
    "joint-unseen": (GAP_UNSEEN_MAX[1], math.inf),
    "joint-time": (math.inf, math.inf),
}


def joint_row(name: str, trace: Trace, link: Link, proof_seconds: float = PROOF_SECONDS_MAX) -> dict[str, Any]:
    """Return one row: the plan with recomputation beside the one without, a tenth of the way above the least limit.

    Where the gap is large, a proof tells how much of it is the bound's (`proven_slowdown`), and the slowdown of the
    fastest plan that it met (`faster_slowdown`).
    """
    least, peak = least_feasible_limit(trace), max(unswapped_bytes(trace), default=0)
    limit = int(least + ROOM * (peak - least))
    alone = fastest_plan(trace, link, limit, recompute=False)
    start = time.process_time()
    plan = fastest_plan(trace, link, limit)
    seconds = time.process_time() - start
    if plan.peak_bytes > limit or plan.expected_seconds > alone.expected_seconds * (1 + 1e-9):
        raise AssertionError(f"{name}: over the limit, or slower than by swapping alone")
    compute = plan.compute_seconds
    size = {tensor.id: tensor.bytes for tensor in trace.tensors}
    proven = {}
    if plan.gap > GAP_UNSEEN_MAX[1] and proof_seconds:
        proof = prove_joint(plan, gap=GAP_PROVEN_MAX, seconds_max=proof_seconds)
        proven = {
            "proven_slowdown": proof.bound_seconds / compute - 1,
            "gap_proven": plan.step_seconds / proof.bound_seconds - 1,
            "faster_slowdown": proof.plan.step_seconds / compute - 1,
            "proof_seconds": proof_seconds,
        }
    return {
        "trace": name,
        "bandwidth": link.out_bandwidth,
        "tensors": len(trace.tensors),
        "swap_only_slowdown": alone.step_seconds / compute - 1,
        "slowdown": plan.step_seconds / compute - 1,
        "bound_slowdown": plan.bound_seconds / compute - 1,
        "gap": plan.gap,
        "recomputed": len(plan.recomputes),
        "recomputed_bytes": sum(size[row.id] for row in plan.recomputes),
        "recompute_seconds": plan.recompute_seconds,
        "swaps": len(plan.swaps),
        "planning_s": seconds,
        **proven,
    }


def shared_joint_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the recorded traces' rows, with recipes estimated by the order of kernels."""
    for path in sorted(directory.glob("*.json")):
        trace = with_recipes(Trace.load(path))
        for bandwidth in BANDWIDTHS:
            yield joint_row(path.stem, trace, Link(bandwidth, bandwidth))


def unseen_joint_rows(quick: bool = False, proof_seconds: float = PROOF_SECONDS_MAX) -> Iterator[dict[str, Any]]:
    """Yield the synthetic traces' rows; where `quick`, of the small ones of one seed."""
    for name, make in SHAPES.items():
        for count in COUNTS[: 1 if quick else None]:
            for seed in SEEDS[: 1 if quick else None]:
                trace = with_recipes(make(count, seed))
                for bandwidth in BANDWIDTHS:
                    link = Link(bandwidth, bandwidth)
                    yield joint_row(f"{name}/{count}/{seed}", trace, link, proof_seconds)


def joint_time_rows() -> Iterator[dict[str, Any]]:
    """Yield planning times for many candidates."""
    for name, make in SHAPES.items():
        trace = with_recipes(make(BIG_COUNT, 7))
        yield joint_row(f"{name}/{BIG_COUNT}", trace, Link(BANDWIDTHS[0], BANDWIDTHS[0]), proof_seconds=0.0)


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the gaps, the largest slowdown, and how many rows are above the largest gap, and not proven either."""
    gaps = [row["gap"] for row in rows]
    return {
        "gap_median": statistics.median(gaps),
        "gap_max": max(gaps),
        "slowdown_max": max(row["slowdown"] for row in rows),
        "above": sum(gap > GAP_UNSEEN_MAX[1] for gap in gaps),
        "unproven": sum(row.get("gap_proven", 0.0) > GAP_PROVEN_MAX for row in rows),
        "planning_s_max": max(row["planning_s"] for row in rows),
    }


def text(rows: Sequence[dict[str, Any]], gap_max: float, slowdown_max: float) -> str:
    """Return the rows as a table of text; those that miss a goal say so."""
    lines = [f"  {'trace':22s} {'GB/s':>5s} {'swap only':>10s} {'joint':>8s} {'bound':>8s} {'gap':>8s} {'planned':>8s}"]
    for row in rows:
        judged = (("gap", gap_max), ("slowdown", slowdown_max))
        missed = [key for key, most in judged if row[key] > most]
        lines.append(
            f"  {row['trace']:22s} {row['bandwidth'] / 1e9:5.1f} {row['swap_only_slowdown']:+10.2%} "
            f"{row['slowdown']:+8.2%} {row['bound_slowdown']:+8.2%} {row['gap']:8.2%} {row['planning_s']:6.2f} s"
            + (f"  misses its {' and '.join(missed)}" if missed else "")
            + (f" (proven {row['proven_slowdown']:+.1%}, gap {row['gap_proven']:.1%})" if "gap_proven" in row else "")
        )
    return "\n".join(lines)
