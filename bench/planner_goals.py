"""Goals of the planner: gaps on recorded and on unseen traces, distance to the optimum, planning time.

`goals.py` shows them. Needs no torch.
"""

from __future__ import annotations

from typing import Any

import joint_rows
from collected import Finding
from planner_table import (
    GAP_SHARED_MAX,
    GAP_UNSEEN_MAX,
    SMALL_COUNT,
    both_gap_figures,
    shared_rows,
    small_figures,
    small_rows,
    time_figures,
    time_rows,
    traces_folder,
    unseen_rows,
)

ABOVE_OPTIMUM_MAX = (0.005, 0.05)  # mean, largest
PLANNING_SECONDS_MAX = {1_000: 1.0, 10_000: 10.0}


def gaps(rows: list[dict[str, Any]], limits: tuple[float, float]) -> Finding:
    """The median and the largest gap between a plan and what no plan can beat.

    Raises
    ------
    RuntimeError
        There are no rows.
    """
    if not rows:
        raise RuntimeError("no recorded traces: name their folder in OFFLOAD_TRACES")
    figures = both_gap_figures(rows)
    middle, most = figures["gap_median"], figures["gap_max"]
    words = f"{middle:.3%} and {most:.2%} ({figures['gap_two_cuts_max']:.2%} by the tighter bound of two cuts)"
    if figures["short"]:
        words += f"; proven out of reach for {figures['out_of_reach']:.0f} of the {figures['short']:.0f} above that"
    return Finding(words, middle <= limits[0] and most <= limits[1], {**figures, "rows": rows})


def shared() -> Finding:
    """Plans of recorded traces."""
    return gaps(list(shared_rows(traces_folder())), GAP_SHARED_MAX)


def unseen(quick: bool) -> Finding:
    """Plans of shapes that nothing was tuned on."""
    return gaps(list(unseen_rows(quick=quick)), GAP_UNSEEN_MAX)


def small(quick: bool) -> Finding:
    """Plans of small instances against the optimum."""
    rows = list(small_rows(5 if quick else SMALL_COUNT))
    figures = small_figures(rows)
    mean, most = figures["above_mean"], figures["above_max"]
    words = f"{mean:.2%} and {most:.1%} of {len(rows)}, {figures['proven']:.0f} optima proven"
    return Finding(words, mean <= ABOVE_OPTIMUM_MAX[0] and most <= ABOVE_OPTIMUM_MAX[1], {**figures, "rows": rows})


def planning_time(quick: bool) -> Finding:
    """Processor time of one core for a plan; the slowest shape counts."""
    counts = tuple(PLANNING_SECONDS_MAX)[: 1 if quick else None]
    rows = list(time_rows(counts))
    figures = time_figures(rows, counts)
    words = ", ".join(f"{figures[f'planning_s_max_{count}']:.2f} s for {count:,}" for count in counts)
    met = all(figures[f"planning_s_max_{count}"] <= PLANNING_SECONDS_MAX[count] for count in counts)
    return Finding(words, met, {**figures, "rows": rows})


def joint_shared() -> Finding:
    """Plans of recorded traces that swap and recompute.

    Raises
    ------
    RuntimeError
        There are no recorded traces.
    """
    rows = list(joint_rows.shared_joint_rows(traces_folder()))
    if not rows:
        raise RuntimeError("no recorded traces: name their folder in OFFLOAD_TRACES")
    figures = joint_rows.figures(rows)
    slowest, middle, most = figures["slowdown_max"], figures["gap_median"], figures["gap_max"]
    alone = max(row["swap_only_slowdown"] for row in rows)
    words = f"{slowest:+.1%} at most (by swapping alone {alone:+.1%}), gaps {middle:.2%} and {most:.2%}"
    median_max, gap_max = joint_rows.GAP_SHARED_MAX
    met = slowest <= joint_rows.SLOWDOWN_MAX and middle <= median_max and most <= gap_max
    return Finding(words, met, {**figures, "rows": rows})


def joint_unseen(quick: bool, proof_seconds: float) -> Finding:
    """Plans of shapes that nothing was tuned on, that swap and recompute."""
    rows = list(joint_rows.unseen_joint_rows(quick, proof_seconds))
    figures = joint_rows.figures(rows)
    middle, most = figures["gap_median"], figures["gap_max"]
    words = f"{middle:.2%} and {most:.1%}; {figures['above']:.0f} of {len(rows)} above 10 %"
    words += f", {figures['unproven']:.0f} of them not proven to 2 %"
    met = middle <= joint_rows.GAP_UNSEEN_MAX[0] and not figures["unproven"]
    return Finding(words, met, {**figures, "rows": rows})
