"""A lower bound on the step time of every plan that swaps and recomputes within a limit.

It is reported with plans that may recompute. With swap-only plans, the bound of `bounds.py` is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from offload.plan.bounds import with_copied_bytes
from offload.plan.cover_trees import CopyQueue, PriceList
from offload.plan.simulate import Link, unswapped_bytes
from offload.plan.trace import SavedTensor, Trace

__all__ = ["joint_bound"]

Floats = NDArray[np.float64]
_SAMPLES = 24  # nodes that are evaluated first, so that most others can be skipped
_TOLERANCE = 1e-5  # relative; a node that could raise the bound by less is skipped


def joint_bound(trace: Trace, limit_bytes: int, link: Link) -> float:
    """Return a lower bound on the step time of every plan that swaps and recomputes within a limit.

    Parameters
    ----------
    trace : Trace
        The step; tensors with a recipe can be recomputed.
    limit_bytes : int
        Limit on the resident memory, in bytes.
    link : Link
        Bandwidths. The bound does not use the latency.

    Returns
    -------
    float
        Seconds; infinite if the limit is below the least feasible one. Without recipes it equals `cut_bound`, up to
        rounding.

    Notes
    -----
    Suppose that the step without swaps exceeds the limit by E bytes at node k. Then E bytes of the tensors that cover k
    (they are unused at k, see `cover_trees`) must be freed. Y of these bytes are dropped and recomputed after k. The
    other E - Y bytes are copied out before k, so k begins no earlier than start(E - Y), which is computed as in
    `cut_bound`. From k on, the rest of the step needs at least rest + g(Y) for computation and at least in(E - Y) for
    the copy-ins. Here rest is the computation without recomputation, and g(Y) is the least time to recompute Y bytes (a
    fractional knapsack with the `bound_seconds` of each recipe). Computation and copies overlap. So for every k the
    step takes at least the minimum over Y of start(E - Y) + max(rest + g(Y), in(E - Y)).

    All terms are piecewise linear in Y, so the exact minimum is found at their breakpoints and intersections. Most
    nodes are skipped: a node cannot raise the bound if its value for one Y is not above the bound found so far.
    """
    cuts = _Cuts.of(with_copied_bytes(trace), limit_bytes, link)
    total = cuts.clock[-1]
    best, dropped = max((at + (total - at) for at in cuts.clock), default=0.0), 0.0
    fullest = sorted((k for k, excess in enumerate(cuts.excess) if excess > 0), key=lambda k: -cuts.excess[k])
    for k in fullest[:: max(1, len(fullest) // _SAMPLES)]:
        best, dropped = max((best, dropped), cuts.least(k))
    walk = _Walk(cuts)
    for k, excess in enumerate(cuts.excess):
        walk.move_to(k)
        if excess <= 0:
            continue
        guesses = (dropped, excess - (cuts.excess[k - 1] - dropped), 0.0, float(excess))
        for guess in guesses:  # the first drops, and the second copies, as many bytes as at the previous node
            dropped = min(max(guess, 0.0), float(excess))
            if walk.seconds(dropped) <= best * (1 + _TOLERANCE):
                break
        else:
            value, dropped = cuts.least(k)
            best = max(best, value)
    return best


@dataclass(frozen=True, slots=True)
class _Order:
    """Sorted tensors as arrays, with a value for each. A tensor covers the nodes k with `after` < k < `before`."""

    after: NDArray[np.int64]
    before: NDArray[np.int64]
    bytes: Floats
    values: Floats

    @classmethod
    def of(cls, tensors: Sequence[SavedTensor], values: Sequence[float]) -> _Order:
        return cls(
            np.asarray([x.last_forward for x in tensors], dtype=np.int64),
            np.asarray([x.first_backward for x in tensors], dtype=np.int64),
            np.asarray([x.bytes for x in tensors], dtype=np.float64),
            np.asarray(values, dtype=np.float64),
        )

    def covering(self, k: int) -> tuple[Floats, Floats]:
        """Return the bytes and the values of the tensors that cover node `k`."""
        covers = (self.after < k) & (k < self.before)
        return self.bytes[covers], self.values[covers]


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The data from which the bound of each node is computed."""

    link: Link
    clock: list[float]
    seconds: list[float]
    excess: list[int]
    tensors: tuple[list[SavedTensor], list[SavedTensor], list[SavedTensor]]
    by_pack: _Order
    by_use: _Order
    by_price: _Order

    @classmethod
    def of(cls, trace: Trace, limit_bytes: int, link: Link) -> _Cuts:
        seconds = [node.seconds for node in trace.nodes]
        clock = list(accumulate(seconds, initial=0.0))
        by_pack = sorted(trace.tensors, key=lambda x: x.packed)
        by_use = sorted(trace.tensors, key=lambda x: -x.first_backward)
        by_price = sorted((x for x in trace.tensors if x.recompute and x.bytes), key=lambda x: _seconds(x) / x.bytes)
        return cls(
            link,
            clock,
            seconds,
            [count - limit_bytes for count in unswapped_bytes(trace)],
            (by_pack, by_use, by_price),
            _Order.of(by_pack, [clock[x.packed + 1] for x in by_pack]),
            _Order.of(by_use, [clock[-1] - clock[x.first_backward] for x in by_use]),
            _Order.of(by_price, [_seconds(x) for x in by_price]),
        )

    def least(self, k: int) -> tuple[float, float]:
        """Return the bound of a node that exceeds the limit, and the Y (dropped bytes) at which it is reached."""
        excess = float(self.excess[k])
        outs = _Copies(*self.by_pack.covering(k), self.link.out_bandwidth)
        ins = _Copies(*self.by_use.covering(k), self.link.in_bandwidth)
        if outs.total < excess:
            return math.inf, 0.0
        sizes, seconds = self.by_price.covering(k)
        bytes_sum, seconds_sum = _sums(sizes), _sums(seconds)
        most = min(excess, float(bytes_sum[-1]))
        ends = np.concatenate(([0.0, most], bytes_sum, excess - outs.before, excess - ins.before))
        ends = np.sort(ends[(ends >= 0) & (ends <= most)])
        ends = ends[np.append(True, ends[1:] != ends[:-1])]  # np.unique would import numpy.ma, which takes 1.3 MiB
        rest = self.clock[-1] - self.clock[k]

        def value(dropped: Floats) -> Floats:
            copied = excess - dropped
            start = np.maximum(self.clock[k], outs.seconds(copied))
            recompute = rest + np.interp(dropped, bytes_sum, seconds_sum)
            total: Floats = start + np.maximum(recompute, self.seconds[k] + ins.seconds(copied))
            return total

        # Between two breakpoints (`ends`) each maximum can switch once: at one Y the copy-outs stop delaying k, and at
        # one Y the copy-ins take as long as the computation. These points are added.
        middle = (ends[1:] + ends[:-1]) / 2
        points = [ends]
        if middle.size:
            width = ends[1:] - ends[:-1]
            recompute = np.interp(ends, bytes_sum, seconds_sum)
            for left, right in (
                (outs.seconds(excess - middle) - self.clock[k], -width / 2 / self.link.out_bandwidth),
                (
                    self.seconds[k] + ins.seconds(excess - middle) - rest - (recompute[1:] + recompute[:-1]) / 2,
                    -width / 2 / self.link.in_bandwidth - (recompute[1:] - recompute[:-1]) / 2,
                ),
            ):
                crossing = (right < 0) & (np.abs(left) < -right)
                points.append(middle[crossing] - left[crossing] / right[crossing] * width[crossing] / 2)
        at = np.concatenate(points)
        values = value(at)
        least = int(values.argmin())
        return float(values[least]), float(at[least])


class _Copies:
    """The copies of one direction at a node, in queue order."""

    def __init__(self, sizes: Floats, values: Floats, bandwidth: float) -> None:
        ends = _sums(sizes)
        self.before, self.total = ends[:-1], float(ends[-1])  # bytes before each tensor, bytes of all tensors
        self._latest = np.maximum.accumulate(values - self.before / bandwidth)  # running maximum
        self._bandwidth = bandwidth

    def seconds(self, copied: Floats) -> Floats:
        """Return the earliest time at which the copies of `copied` bytes can end; minus infinity for no bytes."""
        last = np.searchsorted(self.before, copied, side="left") - 1
        found: Floats = np.where(last >= 0, self._latest[last] + copied / self._bandwidth, -np.inf)
        return found


class _Walk:
    """Visits the nodes in order and computes the bound of each for a given number of dropped bytes, up to rounding."""

    def __init__(self, cuts: _Cuts) -> None:
        by_pack, by_use, by_price = cuts.tensors
        count = len(cuts.seconds)
        self._cuts, self._node = cuts, 0
        self._outs = CopyQueue(by_pack, cuts.by_pack.values.tolist(), cuts.link.out_bandwidth, count)
        self._ins = CopyQueue(by_use, cuts.by_use.values.tolist(), cuts.link.in_bandwidth, count)
        self._prices = PriceList(by_price, cuts.by_price.values.tolist(), count)

    def move_to(self, k: int) -> None:
        """Move to node `k`, which must be the next one."""
        self._node = k
        for tree in (self._outs, self._ins, self._prices):
            tree.move_to(k)

    def seconds(self, dropped: float) -> float:
        """Return the bound of the node if `dropped` of its bytes are dropped."""
        cuts, k = self._cuts, self._node
        copied = cuts.excess[k] - dropped
        rest = cuts.clock[-1] - cuts.clock[k] + self._prices.bound(dropped)
        if copied <= 0:
            return cuts.clock[k] + rest
        return max(cuts.clock[k], self._outs.bound(copied)) + max(rest, cuts.seconds[k] + self._ins.bound(copied))


def _sums(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


def _seconds(tensor: SavedTensor) -> float:
    return tensor.recompute.bound_seconds if tensor.recompute else math.inf
