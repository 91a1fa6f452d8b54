"""Which share of the state moves: the smallest that is as fast as any, and none where the limit is kept without."""

import pytest
from plan.test_cycle import random_cycle

from offload.plan import (
    InfeasibleLimitError,
    Link,
    StateChunk,
    Update,
    fastest_plan,
    fastest_share,
    least_feasible_limit,
)
from offload.plan import share_search as searching
from offload.plan.cycle import cycle_bytes, freed
from offload.plan.trace import Node, Trace

NOISE = 0.01


def found(trace, link, limit, update, held=0, **knobs):
    return fastest_share(
        trace, link, limit, update, held, lambda step: fastest_plan(step, link, limit), noise=NOISE, **knobs
    )


def every_share(trace, link, limit, update):
    """The seconds of each share that is possible, by its size."""
    order = searching.update_order(len(update.chunks))
    result = {}
    for count in range(len(order) + 1):
        moved = frozenset(order[:count])
        most, between = cycle_bytes(update, moved)
        if least_feasible_limit(freed(trace, update.bytes - between)) > limit or (moved and most > limit):
            continue
        make = lambda step: fastest_plan(step, link, limit)  # noqa: E731
        result[count] = searching._with_share(trace, link, update, moved, 0.0, make)[0]
    return result


@pytest.mark.parametrize("seed", range(6))
def test_no_share_is_faster_and_no_smaller_one_as_fast(seed):
    trace, update, link = random_cycle(seed, node_count=8, tensor_count=4, chunk_count=5)
    top, tried = max(trace.base_bytes) + 20, 0
    for limit in range(top - update.bytes - 20, top, 3):
        possible = every_share(trace, link, limit, update)
        if not possible:
            with pytest.raises(InfeasibleLimitError):
                found(trace, link, limit, update)
            continue
        tried += 1
        plan = found(trace, link, limit, update)
        seconds = possible[len(plan.state.moved)]
        quickest = min(possible.values())
        assert seconds <= (1 + NOISE) * quickest * (1 + 1e-9)
        assert plan.peak_bytes <= limit
        assert plan.state.bound_seconds <= plan.state.cycle_seconds
    assert tried > 3


def steps(state, others, seconds=1.0):
    """A step without saved tensors: base bytes alone decide."""
    nodes = (Node("f", seconds, False), Node("b", seconds, True))
    return Trace(nodes, (state + others,) * 2, ())


def test_nothing_moves_where_the_limit_is_kept_without():
    update = Update(tuple(StateChunk(10, 0.1) for _ in range(8)), 10, 10)
    plan = found(steps(80, 20), Link(1e3, 1e3), 100, update)
    assert plan.state.moved == frozenset()
    assert plan.state.freed_bytes == 0
    assert "none of it has to move" in plan.summary()


def test_the_least_that_the_limit_demands_moves():
    update = Update(tuple(StateChunk(10, 0.1) for _ in range(8)), 10, 10)
    for limit, count in ((99, 2), (90, 2), (89, 3), (80, 3), (61, 6), (40, 8)):
        plan = found(steps(80, 20), Link(1e3, 1e3), limit, update)
        assert (limit, len(plan.state.moved)) == (limit, count)
        assert plan.peak_bytes == 100 - plan.state.freed_bytes <= limit
        assert plan.state.freed_bytes == 10 * (count - 1)  # one chunk may still be written


def test_more_moves_where_that_is_faster_than_swapping():
    """A tensor whose copies no node hides costs more than state that is copied beside the update."""
    trace, update, _ = random_cycle(3, node_count=8, tensor_count=4, chunk_count=5)
    shares = {len(found(trace, Link(0.5, 0.5), limit, update).state.moved) for limit in range(60, 30, -3)}
    assert len(shares) > 1


def test_shares_are_parts_of_each_other_and_spread():
    for count in (1, 2, 3, 8, 13):
        assert sorted(searching.update_order(count)) == list(range(count))
    assert searching.update_order(8) == [7, 3, 5, 1, 6, 2, 4, 0]


def test_what_others_move_moves():
    update = Update(tuple(StateChunk(10, 0.1) for _ in range(8)), 10, 10)
    plan = found(steps(80, 20), Link(1e3, 1e3), 1000, update, least=3)
    assert len(plan.state.moved) == 3


def test_the_error_has_the_least_limit_with_everything_moved():
    update = Update(tuple(StateChunk(10, 0.1) for _ in range(8)), 10, 10)
    with pytest.raises(InfeasibleLimitError, match="the least that works for this step is 40 B") as caught:
        found(steps(80, 20), Link(1e3, 1e3), 39, update)
    assert found(steps(80, 20), Link(1e3, 1e3), caught.value.least_limit_bytes, update)
    with pytest.raises(InfeasibleLimitError, match="of optimizer state that is read or written at a time") as caught:
        found(steps(80, 20), Link(1e3, 1e3), 45, update, held=20)
    assert found(steps(80, 20), Link(1e3, 1e3), caught.value.least_limit_bytes, update, held=20)


def test_the_plan_says_what_moves():
    update = Update(tuple(StateChunk(10, 0.1, f"chunk {i}") for i in range(8)), 10, 10, micro_batches=2)
    plan = found(steps(80, 20), Link(1e3, 1e3), 89, update)
    told = plan.explain()
    assert "optimizer state of chunk 7 (chunk 7), 10 B: written in the background" in told
    assert "optimizer state of the other 5 chunks, 50 B: kept" in told
    state = plan.to_dict()["state"]
    assert (state["moved_bytes"], state["state_bytes"], state["micro_batches"]) == (30, 80, 2)
    assert state["moved"] == [3, 5, 7]
    assert "state" not in fastest_plan(steps(80, 20), Link(1e3, 1e3), 100).to_dict()
