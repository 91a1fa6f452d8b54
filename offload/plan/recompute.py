"""Recomputation as a change of the trace: a plan that drops tensors is a swap plan of another step.

Place on the data path: between the trace and everything that plans swaps, which needs to know nothing of recipes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from offload.plan.trace import Recompute, SavedTensor, Trace

__all__ = ["Recomputation", "first_uses", "has_recipes", "recomputations", "recomputed"]


class Recomputation(NamedTuple):
    """One tensor to drop after its last use in forward and to recompute.

    Parameters
    ----------
    id : int
        Id of the tensor in the trace.
    at : int
        Node before which it is recomputed.
    """

    id: int
    at: int


def has_recipes(trace: Trace) -> bool:
    """Return whether any tensor can be recomputed."""
    return any(tensor.recompute is not None for tensor in trace.tensors)


def first_uses(trace: Trace, dropped: Collection[int]) -> dict[int, int]:
    """Return for each tensor's id the node at which it is first used after forward.

    Parameters
    ----------
    trace : Trace
        The step.
    dropped : collection of int
        Ids of the tensors that are recomputed.

    Returns
    -------
    dict of int to int
        `first_backward`, or earlier where a dropped tensor is recomputed from it.
    """
    tensors = {tensor.id: tensor for tensor in trace.tensors}
    uses = {tensor.id: tensor.first_backward for tensor in trace.tensors}
    waiting = sorted(dropped, key=lambda i: (tensors[i].produced, i))
    while waiting:  # the last produced first: a source is mostly visited after all that is made from it
        i = waiting.pop()
        for source in _recipe(tensors[i]).inputs:
            if uses[i] < uses[source]:
                uses[source] = uses[i]
                if source in dropped:
                    waiting.append(source)
    return uses


def recomputations(trace: Trace, dropped: Iterable[int]) -> tuple[Recomputation, ...]:
    """Return the tensors that are recomputed with their nodes, sorted by id.

    Parameters
    ----------
    trace : Trace
        The step.
    dropped : iterable of int
        Ids of the tensors that are recomputed.

    Raises
    ------
    ValueError
        If an id is unknown or its tensor has no recipe.
    """
    dropped = set(dropped)
    known = {tensor.id: tensor for tensor in trace.tensors}
    for i in sorted(dropped):
        if i not in known:
            raise ValueError(f"recomputes: no tensor has the id {i}")
        _recipe(known[i])
    uses = first_uses(trace, dropped)
    return tuple(Recomputation(i, uses[i]) for i in sorted(dropped))


def recomputed(trace: Trace, dropped: Iterable[int]) -> Trace:
    """Return the step in which some tensors are recomputed, as a trace without recipes.

    Parameters
    ----------
    trace : Trace
        The step.
    dropped : iterable of int
        Ids of the tensors that are recomputed.

    Returns
    -------
    Trace
        With the same nodes, some of them longer, and without the dropped tensors, which `base_bytes` counts.

    Raises
    ------
    ValueError
        If an id is unknown or its tensor has no recipe.

    Notes
    -----
    A dropped tensor is recomputed before the node at which it is first used. It is resident up to its last use in
    forward and from that node on. The node takes as much longer as the recipe takes, and needs its workspace. From then
    on each source has to be there: its first use is at most that node and its last use at least that node. A source
    that is dropped too is recomputed first.

    Examples
    --------
    >>> from offload.plan.trace import Node
    >>> nodes = tuple(Node(str(k), 1.0, k > 2) for k in range(6))
    >>> source = SavedTensor(0, 4, 0, 0, 1, 5, 5)
    >>> made = SavedTensor(1, 10, 1, 1, 1, 4, 4, Recompute(0.5, (0,)))
    >>> step = recomputed(Trace(nodes, (0,) * 6, (source, made)), [1])
    >>> step.base_bytes, step.nodes[4].seconds, step.tensors[0].first_backward
    ((0, 10, 0, 0, 10, 0), 1.5, 4)
    """
    at = {row.id: row.at for row in recomputations(trace, dropped)}
    uses = first_uses(trace, at)
    last_uses = {tensor.id: tensor.last_use for tensor in trace.tensors}
    seconds: dict[int, float] = {}
    change = np.zeros(len(trace.nodes) + 1, dtype=np.int64)
    for tensor in trace.tensors:
        if tensor.id in at:
            recipe, node = _recipe(tensor), at[tensor.id]
            seconds[node] = seconds.get(node, 0.0) + recipe.seconds
            change[node] += recipe.workspace_bytes
            change[node + 1] -= recipe.workspace_bytes
            for source in recipe.inputs:
                last_uses[source] = max(last_uses[source], node)
    kept = []
    for tensor in trace.tensors:
        if tensor.id not in at:
            first = max(uses[tensor.id], tensor.last_forward + 1)  # used before: it cannot be away at all
            kept.append(replace(tensor, first_backward=first, last_use=last_uses[tensor.id], recompute=None))
            continue
        away = range(tensor.last_forward + 1, at[tensor.id])
        change[tensor.produced] += tensor.bytes
        change[last_uses[tensor.id] + 1] -= tensor.bytes
        if away:
            change[away.start] -= tensor.bytes
            change[away.stop] += tensor.bytes
    nodes = list(trace.nodes)
    for k, more in seconds.items():
        nodes[k] = replace(nodes[k], seconds=nodes[k].seconds + more)
    base = np.asarray(trace.base_bytes, dtype=np.int64) + np.cumsum(change[:-1])
    return Trace(tuple(nodes), tuple(base.tolist()), tuple(kept), trace.source, trace.link)


def _recipe(tensor: SavedTensor) -> Recompute:
    if tensor.recompute is None:
        raise ValueError(f"recomputes: tensor {tensor.id} has no recipe")
    return tensor.recompute
