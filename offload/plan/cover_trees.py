"""Segment trees over the tensors that cover a node, updated while the node moves through the step.

A tensor covers the nodes between its last use in forward and its first use in backward: at these it can be swapped out.
For every node the bounds need the bytes that the covering tensors could free, and the cost.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from offload.plan.trace import SavedTensor

__all__ = ["CopyQueue", "PriceList"]


class _CoverTree(ABC):
    """A segment tree over tensors in a fixed order: sums of the bytes of the tensors that cover the current node."""

    def __init__(self, order: Sequence[SavedTensor], node_count: int) -> None:
        self.order = order
        self.width = 1 << max(1, (len(order) - 1).bit_length())
        self.covering = [0] * (2 * self.width)
        self._from: list[list[int]] = [[] for _ in range(node_count + 1)]
        self._until: list[list[int]] = [[] for _ in range(node_count + 1)]
        for q, tensor in enumerate(order):
            self._from[tensor.last_forward + 1].append(q)
            self._until[tensor.first_backward].append(q)

    def move_to(self, k: int) -> None:
        """Move to node `k`, which must be the node after the current one (at the beginning, the first node)."""
        for q in self._until[k]:
            self._update(q, is_covering=False)
        for q in self._from[k]:
            if self.order[q].first_backward > k:
                self._update(q, is_covering=True)

    @abstractmethod
    def _update(self, leaf: int, *, is_covering: bool) -> None:
        """Add a tensor to the sums, or remove it."""


class CopyQueue(_CoverTree):
    """The copies of one direction: a bound on when the given number of bytes of the covering tensors has been copied.

    Parameters
    ----------
    order : sequence of SavedTensor
        In copy-out order; for copy-ins, in reverse order.
    offsets : sequence of float
        For each tensor, the earliest time at which its copy can begin, in seconds.
    bandwidth : float
        Bandwidth of the channel, in bytes per second.
    node_count : int
        Number of nodes.
    """

    def __init__(
        self, order: Sequence[SavedTensor], offsets: Sequence[float], bandwidth: float, node_count: int
    ) -> None:
        super().__init__(order, node_count)
        self._offsets, self._bandwidth = offsets, bandwidth
        # For each range of tensors: the maximum over q of offsets[q] - A_q / bandwidth, with A_q within the range.
        self._best = [-math.inf] * (2 * self.width)

    def bound(self, needed: int | float) -> float:
        """Return the maximum over q with A_q < needed of offsets[q] + (needed - A_q) / bandwidth, up to rounding.

        q runs over the covering tensors; A_q is the sum of the bytes of those before q. The result is infinite if the
        covering tensors have fewer than `needed` bytes.
        """
        covering, best, bandwidth = self.covering, self._best, self._bandwidth
        if covering[1] < needed:
            return math.inf
        at, before, value = 1, 0, -math.inf
        while at < self.width:
            left = 2 * at
            if before + covering[left] < needed:
                value = max(value, best[left] - before / bandwidth)
                before += covering[left]
                at = left + 1
            else:
                at = left
        return max(value, best[at] - before / bandwidth) + needed / bandwidth

    def _update(self, leaf: int, *, is_covering: bool) -> None:
        covering, best, bandwidth = self.covering, self._best, self._bandwidth
        at = self.width + leaf
        covering[at] = self.order[leaf].bytes if is_covering else 0
        best[at] = self._offsets[leaf] if is_covering else -math.inf
        at >>= 1
        while at:
            left, right = 2 * at, 2 * at + 1
            covering[at] = covering[left] + covering[right]
            best[at] = max(best[left], best[right] - covering[left] / bandwidth)
            at >>= 1


class PriceList(_CoverTree):
    """The least time to recompute a number of bytes of the covering tensors.

    Parameters
    ----------
    order : sequence of SavedTensor
        The tensors that have a recipe, sorted by recomputation time per byte, least first.
    seconds : sequence of float
        For each tensor, the least time that recomputing it takes, in seconds.
    node_count : int
        Number of nodes.
    """

    def __init__(self, order: Sequence[SavedTensor], seconds: Sequence[float], node_count: int) -> None:
        super().__init__(order, node_count)
        self._seconds = seconds
        self._sums = [0.0] * (2 * self.width)

    def bound(self, needed: int | float) -> float:
        """Return the least seconds for `needed` bytes, parts of tensors allowed; infinite if there are fewer bytes."""
        covering, sums = self.covering, self._sums
        if covering[1] < needed:
            return math.inf
        at, before, value = 1, 0, 0.0
        while at < self.width:
            left = 2 * at
            if before + covering[left] < needed:
                before += covering[left]
                value += sums[left]
                at = left + 1
            else:
                at = left
        return value + sums[at] * ((needed - before) / covering[at] if covering[at] else 0.0)

    def _update(self, leaf: int, *, is_covering: bool) -> None:
        covering, sums = self.covering, self._sums
        at = self.width + leaf
        covering[at] = self.order[leaf].bytes if is_covering else 0
        sums[at] = self._seconds[leaf] if is_covering else 0.0
        at >>= 1
        while at:
            covering[at] = covering[2 * at] + covering[2 * at + 1]
            sums[at] = sums[2 * at] + sums[2 * at + 1]
            at >>= 1
