"""A search with little effort tries few plans, whatever it searches for. Tries are counted, not seconds."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from some_rows import one_in

from offload.plan import Link, fastest_plan, least_feasible_limit, least_memory_plan, unswapped_bytes
from offload.plan.local_search import SearchBudget
from offload.plan.placement import Step
from offload.plan.trace import Recompute

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
try:
    from shapes import transformer
finally:
    sys.path.pop(0)

EFFORT = 1 / 16
SHARE_MAX = 0.3  # of the usual tries: each limit of a bisection and each ranking is tried at least once
SIZES = (8, 40)  # about how many saved tensors; of up to twelve, every set is tried
KINDS = ("fastest", "least memory")


def step(count, *, recompute):
    trace = transformer(count, seed=0)
    tensors = trace.tensors
    if recompute:
        made = sum(node.seconds for node in trace.nodes) / len(tensors)
        tensors = tuple(
            replace(each, recompute=Recompute(0.1 * made * (1 + n % 5), ())) for n, each in enumerate(tensors)
        )
    return replace(trace, tensors=tensors)


def make(kind, trace, effort):
    seconds, copied = sum(node.seconds for node in trace.nodes), sum(tensor.bytes for tensor in trace.tensors)
    link = Link(1.5 * copied / seconds, 1.5 * copied / seconds, 1e-5, byte_seconds=0.1 * seconds / copied)
    if kind == "least memory":
        return least_memory_plan(trace, link, 0.05, effort=effort)
    least, most = least_feasible_limit(trace), max(unswapped_bytes(trace))
    return fastest_plan(trace, link, least + (most - least) // 4, effort=effort)


@pytest.fixture
def tries(monkeypatch):
    count = [0]
    place = Step.place

    def counted(*args, **kwargs):
        count[0] += 1
        return place(*args, **kwargs)

    monkeypatch.setattr(Step, "place", counted)

    def of(*args):
        count[0] = 0
        return make(*args), count[0]

    return of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("count", one_in(2, SIZES))
def test_little_effort_tries_few_plans(kind, recompute, count, tries):
    trace = step(count, recompute=recompute)
    usual, all_tries = tries(kind, trace, 1.0)
    quick, few_tries = tries(kind, trace, EFFORT)
    assert few_tries <= SHARE_MAX * all_tries
    assert bool(quick.swaps or quick.recomputes) == bool(usual.swaps or usual.recomputes)
    assert quick.peak_bytes <= (1.15 * usual.peak_bytes if kind == "least memory" else usual.limit_bytes)


def test_sets_are_tried_one_by_one_only_with_effort(tries, monkeypatch):
    """Without this guard, a small step's search does not end before it has tried every set."""
    trace = step(8, recompute=False)
    _, with_guard = tries("fastest", trace, EFFORT)
    monkeypatch.setattr(SearchBudget, "exhaustive", lambda budget, count_max: count_max)
    _, without = tries("fastest", trace, EFFORT)
    _, usual = tries("fastest", trace, 1.0)
    assert with_guard <= SHARE_MAX * usual < without


@pytest.mark.parametrize(("effort", "most"), [(1.0, 12), (0.5, 11), (0.3, 10), (1 / 16, 8), (1e-9, -18), (0.0, 0)])
def test_up_to_how_many_tensors_every_set_is_tried(effort, most):
    assert SearchBudget(1.0, effort).exhaustive(12) == most
    assert SearchBudget(1.0, effort).part(0.5) == SearchBudget(0.5, effort)
