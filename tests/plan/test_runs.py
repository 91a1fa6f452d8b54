"""Runs of tensors that are dropped together: against every set of drops of small steps."""

import itertools

import pytest
from test_joint_bound import drop_sets, instances

from offload.plan import Link, least_feasible_limit, recomputations, recomputed
from offload.plan.certify.runs import Run, chains_of, runs_of
from offload.plan.placement import Step
from offload.plan.trace import Node, Recompute, SavedTensor, Trace

LINK = Link(1.0, 1.0)


def maximal_runs(step, chain, dropped):
    """Return the first place and the end of each run of a chain if these tensors are dropped, empty ones included."""
    kept = [-1, *(place for place, i in enumerate(chain) if step.ids[i] not in dropped), len(chain)]
    return [(first + 1, end) for first, end in itertools.pairwise(kept)]


def chain_of(sizes, seconds=1.0):
    """Return a step of tensors of these bytes, each recomputed from the one before."""
    count = len(sizes)
    nodes = tuple(Node(str(k), 1.0, k >= count) for k in range(2 * count))
    tensors = tuple(
        SavedTensor(i, size, i, i, i, 2 * count - 1 - i, 2 * count - 1 - i, Recompute(seconds, (i - 1,)) if i else None)
        for i, size in enumerate(sizes)
    )
    return Trace(nodes, (0,) * (2 * count), tensors)


def test_a_chain_has_a_tensor_and_those_made_from_it_one_after_another():
    for trace, _, _ in instances(60):
        step = Step(trace, LINK)
        tensors = {tensor.id: tensor for tensor in trace.tensors}
        chains = [[step.ids[i] for i in chain] for chain in chains_of(trace, step)]
        for chain in chains:
            for source, made in itertools.pairwise(chain):
                assert source in tensors[made].recompute.inputs
        members = sorted(itertools.chain.from_iterable(chains))
        assert len(members) == len(set(members))
        assert {tensor.id for tensor in trace.tensors if tensor.recompute} <= set(members)


def test_every_set_of_drops_within_the_limit_is_made_of_runs():
    left_out = 0
    for trace, _, limit in instances(60):
        step = Step(trace, LINK)
        chains = chains_of(trace, step)
        runs = [{(run.first, run.end): run for run in runs_of(trace, step, chain, limit)} for chain in chains]
        for dropped in drop_sets(trace):
            feasible = least_feasible_limit(recomputed(trace, dropped)) <= limit
            nodes = {row.id: row.at for row in recomputations(trace, dropped)}
            for chain, known in zip(chains, runs, strict=True):
                for first, end in maximal_runs(step, chain, dropped):
                    if not feasible:
                        left_out += (first, end) not in known
                        continue
                    ids = [step.ids[i] for i in chain[first:end]]
                    assert all(nodes[i] <= at for i, at in zip(ids, known[first, end].at, strict=True))
    assert left_out


def test_the_first_use_of_a_run_makes_all_of_it():
    trace = chain_of([4, 1, 1, 1])
    step = Step(trace, LINK)
    (chain,) = chains_of(trace, step)
    assert chain == [0, 1, 2, 3]
    runs = list(runs_of(trace, step, chain, 100))
    assert Run(1, 4, (4, 4, 4)) in runs
    assert Run(2, 3, (5,)) in runs
    assert not any(run.first == 0 and run.end > 0 for run in runs), "the first tensor has no recipe"


def test_a_run_that_does_not_fit_is_none():
    trace = chain_of([1, 4, 4, 4])
    step = Step(trace, LINK)
    (chain,) = chains_of(trace, step)
    ends = {limit: max(run.end for run in runs_of(trace, step, chain, limit) if run.first == 1) for limit in (12, 13)}
    assert ends == {12: 3, 13: 4}


@pytest.mark.parametrize("makers", [1, 2])
def test_a_tensor_from_which_several_are_made_is_in_one_chain(makers):
    nodes = tuple(Node(str(k), 1.0, k > 2) for k in range(6))
    source = SavedTensor(0, 4, 0, 0, 0, 5, 5)
    made = tuple(SavedTensor(i, 4, i, i, i, 5 - i, 5 - i, Recompute(1.0, (0,))) for i in range(1, makers + 1))
    trace = Trace(nodes, (0,) * 6, (source, *made))
    assert sorted(chains_of(trace, Step(trace, LINK))) == [[0, 1], [2]][:makers]
