"""A lower bound on the step time of every plan that swaps and recomputes within a limit.

Place on the data path: the certificate of plans with recomputation, as `bounds` is that of swap-only plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from offload.plan.cover_trees import CopyQueue, PriceList
from offload.plan.simulate import Link, unswapped_bytes
from offload.plan.trace import SavedTensor, Trace

__all__ = ["joint_bound"]

Floats = NDArray[np.float64]
_SAMPLES = 24  # nodes that are evaluated first, so that most others can be passed over
_TOLERANCE = 1e-5  # relative; a node that could raise the bound by less is passed over


def joint_bound(trace: Trace, limit_bytes: int, link: Link) -> float:
    """Return a lower bound on the step time of every plan that swaps and recomputes within a limit.

    Parameters
    ----------
    trace : Trace
        The step; tensors with a recipe can be recomputed.
    limit_bytes : int
        Limit on the resident bytes, in bytes.
    link : Link
        Bandwidths. The bound does not use the latency.

    Returns
    -------
    float
        Seconds; infinite where the limit is below the least feasible one. Without recipes it is `cut_bound`, up to
        rounding.

    Notes
    -----
    Let the unswapped step exceed the limit by E bytes at node k. Of the covering tensors, Y of these bytes are dropped
    and the other E - Y swap. Copying these out bounds the start of k as in `cut_bound`. After k, the nodes take the
    rest of the step and the recomputations of Y bytes, at least the fractional knapsack g(Y) of `bound_seconds`; and
    E - Y bytes are copied in. So the step takes at least the minimum over Y of start(E - Y) + max(rest + g(Y),
    in(E - Y)), for every k.

    The minimum is exact: all parts are linear in Y between the Y at which a tensor is copied or dropped in full. Most
    nodes need none: where any Y gives no more than the maximum so far, the minimum is no more either.
    """
    cuts = _Cuts.of(trace, limit_bytes, link)
    nodes = [k for k, excess in enumerate(cuts.excess) if excess > 0]
    best = max((at + (cuts.clock[-1] - at) for at in cuts.clock), default=0.0)
    warmest = 0.0
    by_excess = sorted(nodes, key=lambda k: cuts.excess[k])
    for k in by_excess[:: -max(1, len(nodes) // _SAMPLES)]:
        value, dropped = cuts.least(k)
        if value > best:
            best, warmest = value, dropped
    outs, ins, prices = cuts.trees()
    dropped = warmest
    for k, excess in enumerate(cuts.excess):
        outs.move_to(k)
        ins.move_to(k)
        prices.move_to(k)
        if excess <= 0:
            continue
        threshold = best * (1 + _TOLERANCE)
        for guess in (dropped, excess - (cuts.excess[k - 1] - dropped), 0.0, float(excess)):
            y = min(max(guess, 0.0), float(excess))
            copied = excess - y
            start = max(cuts.clock[k], outs.bound(copied) if copied > 0 else -math.inf)
            back = cuts.seconds[k] + ins.bound(copied) if copied > 0 else -math.inf
            value = start + max(cuts.clock[-1] - cuts.clock[k] + prices.bound(y), back)
            if value <= threshold:
                dropped = y
                break
        else:
            value, dropped = cuts.least(k)
            best = max(best, value)
    return best


@dataclass(frozen=True, slots=True)
class _Order:
    """Tensors in an order, as arrays: the nodes between which each may be away, its bytes, and a figure of each."""

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
        """Return the bytes and the figures of the tensors that cover a node."""
        covers = (self.after < k) & (k < self.before)
        return self.bytes[covers], self.values[covers]


@dataclass(frozen=True, slots=True)
class _Cuts:
    """What the bound of a node needs of the step, the limit and the link."""

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

    def trees(self) -> tuple[CopyQueue, CopyQueue, PriceList]:
        """Return the three orders as trees, for walking through the nodes."""
        by_pack, by_use, by_price = self.tensors
        count = len(self.seconds)
        return (
            CopyQueue(by_pack, self.by_pack.values.tolist(), self.link.out_bandwidth, count),
            CopyQueue(by_use, self.by_use.values.tolist(), self.link.in_bandwidth, count),
            PriceList(by_price, self.by_price.values.tolist(), count),
        )

    def least(self, k: int) -> tuple[float, float]:
        """Return the bound of a node over its limit, and the dropped bytes at which it is reached."""
        excess = float(self.excess[k])
        outs, ins = _Copies(*self.by_pack.covering(k), self.link.out_bandwidth), None
        if outs.total < excess:
            return math.inf, 0.0
        ins = _Copies(*self.by_use.covering(k), self.link.in_bandwidth)
        sizes, seconds = self.by_price.covering(k)
        bytes_sum, seconds_sum = _sums(sizes), _sums(seconds)
        most = min(excess, float(bytes_sum[-1]))
        ends = np.concatenate(([0.0, most], bytes_sum, excess - outs.before, excess - ins.before))
        ends = np.unique(ends[(ends >= 0) & (ends <= most)])
        rest = self.clock[-1] - self.clock[k]

        def value(dropped: Floats) -> Floats:
            copied = excess - dropped
            start = np.maximum(self.clock[k], outs.seconds(copied))
            recompute = rest + np.interp(dropped, bytes_sum, seconds_sum)
            total: Floats = start + np.maximum(recompute, self.seconds[k] + ins.seconds(copied))
            return total

        # Between two ends the copies out cease to delay k at one Y, and those in are as long as the rest at another.
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


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies of one direction at a node, in their order."""

    before: Floats  # bytes before each tensor
    latest: Floats  # max over the tensors up to each: its figure minus the time of the copies before it
    total: float
    bandwidth: float

    def __init__(self, sizes: Floats, values: Floats, bandwidth: float) -> None:
        ends = _sums(sizes)
        object.__setattr__(self, "before", ends[:-1])
        object.__setattr__(self, "latest", np.maximum.accumulate(values - ends[:-1] / bandwidth))
        object.__setattr__(self, "total", float(ends[-1]))
        object.__setattr__(self, "bandwidth", bandwidth)

    def seconds(self, copied: Floats) -> Floats:
        """Return when so many bytes have been copied at the earliest; minus infinity for none."""
        last = np.searchsorted(self.before, copied, side="left") - 1
        found: Floats = np.where(last >= 0, self.latest[last] + copied / self.bandwidth, -np.inf)
        return found


def _sums(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


def _seconds(tensor: SavedTensor) -> float:
    return tensor.recompute.bound_seconds if tensor.recompute else math.inf
