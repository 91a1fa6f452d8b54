"""The planner: its certificate's gap and the time it takes, on recorded traces and on unseen shapes.

    pytest bench/test_planner.py --benchmark-only

Recorded traces are those of OFFLOAD_TRACES, or of shared/traces beside the repository; `planner_table.py` measures
more.
"""

from __future__ import annotations

import pytest
from planner_table import SHARED_BANDWIDTH, TRAFFIC, limits, link_for, traces_folder
from pytest_benchmark.fixture import BenchmarkFixture
from shapes import SHAPES

from offload.plan import Link, Plan, fastest_plan
from offload.plan.trace import Trace

BUDGETS = {"half": 0, "a tenth": 2}  # places in planner_table.BUDGETS
UNSEEN_TENSORS = 250
ROUNDS = 3

RECORDED = {path.stem: path for path in sorted(traces_folder().glob("*.json"))}  # by name: results tell no paths


def plan_it(benchmark: BenchmarkFixture, trace: Trace, link: Link, budget: str) -> None:
    """Benchmark planning for one limit."""
    _, limit = limits(trace)[BUDGETS[budget]]
    plans: list[Plan] = []
    benchmark.pedantic(lambda: plans.append(fastest_plan(trace, link, limit)), rounds=ROUNDS)
    plan = plans[0]
    assert plan.peak_bytes <= limit
    assert all(other.swaps == plan.swaps for other in plans), "the same question had two answers"
    benchmark.extra_info |= {
        "tensors": len(trace.tensors),
        "gap_share": plan.gap,
        "slowdown_share": plan.step_seconds / plan.compute_seconds - 1,
        "swaps": len(plan.swaps),
        "peak_bytes": plan.peak_bytes,
        "limit_bytes": limit,
        "unswapped_peak_bytes": plan.unswapped_peak_bytes,
    }


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", RECORDED)
def test_recorded(benchmark: BenchmarkFixture, name: str, budget: str) -> None:
    benchmark.group = "planner, recorded traces"
    plan_it(benchmark, Trace.load(RECORDED[name]), Link(SHARED_BANDWIDTH, SHARED_BANDWIDTH), budget)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", SHAPES)
def test_unseen(benchmark: BenchmarkFixture, name: str, budget: str) -> None:
    benchmark.group = f"planner, shapes of {UNSEEN_TENSORS} tensors"
    trace = SHAPES[name](UNSEEN_TENSORS, 0)
    plan_it(benchmark, trace, link_for(trace, TRAFFIC[1]), budget)
