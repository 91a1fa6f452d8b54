"""Runs of tensors that are recomputed from one another: what dropping a whole run takes, for the proof of joint plans.

A tensor and a tensor that is recomputed from it are linked; links make chains. Of each chain a plan drops some tensors.
Those between two that are not dropped are a run: its first use brings all of it back to memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.plan.bounds import unavoidable_bytes
from offload.plan.placement import Step
from offload.plan.trace import Trace

__all__ = ["Run", "chains_of", "runs_of"]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tensors of a chain, all dropped, between two tensors that are not.

    Parameters
    ----------
    first, end : int
        Positions in the chain: of the first dropped tensor, and after the last one. Equal if there are none.
    at : tuple of int
        For each dropped tensor, the node at which it is recomputed at the latest.
    """

    first: int
    end: int
    at: tuple[int, ...]


def chains_of(trace: Trace, step: Step) -> list[list[int]]:
    """Return chains in which each tensor but the first is recomputed from the one before; indices of `step`.

    Each tensor that has a recipe is in exactly one chain. Of several sources, the one produced last is its link.
    """
    place = {tensor_id: i for i, tensor_id in enumerate(step.ids)}
    produced = {place[tensor.id]: (tensor.produced, tensor.id) for tensor in trace.tensors}
    following: dict[int, int] = {}
    heads = []
    for tensor in sorted(trace.tensors, key=lambda x: (x.produced, x.id)):
        if tensor.recompute is None:
            continue
        free = [place[j] for j in tensor.recompute.inputs if place[j] not in following and place[j] != place[tensor.id]]
        if free:
            following[max(free, key=produced.__getitem__)] = place[tensor.id]
        else:
            heads.append(place[tensor.id])
    linked = set(following.values())
    heads += [i for i in following if i not in linked and i not in heads]
    chains = []
    for head in heads:
        chain = [head]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        chains.append(chain)
    return chains


def runs_of(trace: Trace, step: Step, chain: Sequence[int], limit_bytes: int) -> Iterator[Run]:
    """Yield the runs of a chain that a plan within the limit may have, those without tensors included.

    At the nodes at which a run's tensors are recomputed, those that are back and the tensor before the run have to fit
    beside what every plan keeps there. If they do not, no longer run from the same tensor fits.
    """
    has_recipe = {tensor.id for tensor in trace.tensors if tensor.recompute}
    resident = unavoidable_bytes(trace)
    for first in range(len(chain) + 1):
        yield Run(first, first, ())
        at: tuple[int, ...] = ()
        for end in range(first + 1, len(chain) + 1):
            last = chain[end - 1]
            if step.ids[last] not in has_recipe:
                break
            at = (*(min(node, step.first_backward[last]) for node in at), step.first_backward[last])
            needed = list(zip(chain[first:end], at, strict=True))
            if first:
                needed.append((chain[first - 1], at[0]))
            if any(resident[k] + _back_bytes(step, needed, k) > limit_bytes for k in set(at)):
                break
            yield Run(first, end, at)


def _back_bytes(step: Step, needed: Sequence[tuple[int, int]], k: int) -> int:
    """Return the bytes of the tensors needed from a node up to k on, of those that could be swapped out at k."""
    covering = (i for i, at in needed if at <= k and step.release_min[i] <= k < step.first_backward[i])
    return sum(step.bytes[i] for i in covering)
