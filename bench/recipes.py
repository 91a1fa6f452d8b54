"""Estimates recipes for traces without recipes, from the order of their kernels.

`planner_table.py` plans recomputation with them. At run time a trial step finds the recipes instead.
"""

from __future__ import annotations

from dataclasses import replace

from offload.plan.trace import Recompute, SavedTensor, Trace

IN_PLACE = "ReLU"  # an activation that overwrites its input: the saved tensor is complete only after it
NO_KERNEL = "LoadData"  # what no kernel makes


def with_recipes(trace: Trace) -> Trace:
    """Return the trace with a recipe for each tensor whose kernels can be told.

    Notes
    -----
    A step runs its kernels in order, and most read what the one before them wrote. So a tensor is taken to be made by
    the nodes since the tensor that was saved before it, from that tensor and from all that forward uses there for the
    last time. Of two tensors saved at the same node, the one that backward needs later is the node's input, made by the
    nodes before. A ReLU right after the node that works in place belongs to the tensor.
    """
    order = sorted(trace.tensors, key=lambda x: (x.produced, -x.first_backward, x.id))
    made = {}
    for j in range(1, len(order)):
        tensor, previous = order[j], order[j - 1]
        following = order[j + 1].produced if j + 1 < len(order) else -1
        nodes = _nodes(trace, tensor, previous.produced, following)
        if any(trace.nodes[k].backward or NO_KERNEL in trace.nodes[k].name for k in nodes):
            continue
        first = min(nodes, default=tensor.produced)
        sources = {x.id for x in order[:j] if first <= x.last_forward <= tensor.produced} | {previous.id}
        seconds = sum(trace.nodes[k].seconds for k in nodes)
        made[tensor.id] = Recompute(seconds, tuple(sorted(sources)))
    return replace(trace, tensors=tuple(replace(x, recompute=made.get(x.id)) for x in trace.tensors))


def _nodes(trace: Trace, tensor: SavedTensor, previous: int, following: int) -> list[int]:
    """Return the nodes that make a tensor; `previous` and `following` are where its neighbours in order are made."""
    node = tensor.produced
    if previous == node:
        first, last = node, node
    else:
        first, last = previous + 1, node - 1 if following == node else node
    nodes = list(range(first, last + 1))
    after = node + 1
    in_place = after < len(trace.nodes) and trace.nodes[after].name.startswith(IN_PLACE)
    if in_place and last == node and after <= tensor.last_forward and following != after:
        nodes.append(after)
    return nodes
