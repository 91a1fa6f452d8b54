"""Recomputation as a change of the trace: a plan that drops tensors is a swap plan of another step.

The code that plans swaps therefore needs no knowledge of recipes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

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
        `first_backward`, or earlier if a dropped tensor is recomputed from it.
    """
    tensors = {tensor.id: tensor for tensor in trace.tensors}
    uses = {tensor.id: tensor.first_backward for tensor in trace.tensors}
    waiting = sorted(dropped, key=lambda i: (tensors[i].produced, i))
    while waiting:  # last produced first, so that a source is mostly visited after the tensors recomputed from it
        i = waiting.pop()
        at = uses[i]
        for source in _recipe(tensors[i]).inputs:
            if at < uses[source]:
                uses[source] = at
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
    dropped = _checked(trace, dropped)
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
        It has the same nodes, some of them longer. It lacks the dropped tensors; `base_bytes` includes their bytes.

    Raises
    ------
    ValueError
        If an id is unknown or its tensor has no recipe.

    Notes
    -----
    A dropped tensor is recomputed before the node at which it is first used. It is resident up to its last use in
    forward, and from that node on. The node takes longer by the time of the recipe, and needs its workspace. Each
    source must be resident at that node: a first use that is later, and a last use that is earlier, are moved to that
    node. A source that is dropped too is recomputed first.

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
    dropped = _checked(trace, dropped)
    uses = first_uses(trace, dropped)
    last_uses: dict[int, int] = {}
    seconds: dict[int, float] = {}
    change = [0] * (len(trace.nodes) + 1)
    for tensor in trace.tensors:
        if tensor.id in dropped:
            recipe, node = _recipe(tensor), uses[tensor.id]
            seconds[node] = seconds.get(node, 0.0) + recipe.seconds
            change[node] += recipe.workspace_bytes
            change[node + 1] -= recipe.workspace_bytes
            for source in recipe.inputs:
                last_uses[source] = max(last_uses.get(source, -1), node)
    kept = []
    for tensor in trace.tensors:
        last_use = max(tensor.last_use, last_uses.get(tensor.id, -1))
        if tensor.id in dropped:
            change[tensor.produced] += tensor.bytes
            change[last_use + 1] -= tensor.bytes
            if tensor.last_forward + 1 < uses[tensor.id]:
                change[tensor.last_forward + 1] -= tensor.bytes
                change[uses[tensor.id]] += tensor.bytes
        else:
            first = max(uses[tensor.id], tensor.last_forward + 1)  # a tensor used before that is never swapped out
            nodes = (tensor.produced, tensor.packed, tensor.last_forward, first, last_use)
            kept.append(SavedTensor(tensor.id, tensor.bytes, *nodes, copy_bytes=tensor.copy_bytes))
    base = [count + more for count, more in zip(trace.base_bytes, accumulate(change), strict=False)]
    longer = list(trace.nodes)
    for k, more in seconds.items():
        longer[k] = replace(longer[k], seconds=longer[k].seconds + more)
    return Trace(tuple(longer), tuple(base), tuple(kept), trace.source, trace.link)


def _checked(trace: Trace, dropped: Iterable[int]) -> set[int]:
    """Return the ids as a set. Raise if one is unknown or its tensor has no recipe."""
    dropped = set(dropped)
    for tensor in trace.tensors:
        if tensor.id in dropped:
            _recipe(tensor)
    unknown = dropped.difference(tensor.id for tensor in trace.tensors)
    if unknown:
        raise ValueError(f"recomputes: no tensor has the id {min(unknown)}")
    return dropped


def _recipe(tensor: SavedTensor) -> Recompute:
    if tensor.recompute is None:
        raise ValueError(f"recomputes: tensor {tensor.id} has no recipe")
    return tensor.recompute
