"""The timing of a plan and the bound on it, read literally from their definitions: slow, and on their own.

A copy takes latency + bytes / bandwidth. All functions take a trace; `swaps` is a list of (id, release, prefetch).
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from offload.plan.trace import Node, Recompute, SavedTensor, Trace


def first_uses(trace, dropped):
    """Return the node at which each tensor is first used after forward, where some are dropped."""
    use = {x.id: x.first_backward for x in trace.tensors}
    for _ in range(len(dropped) + 1):  # of tensors made at the same node any may be a source: go over them again
        for x in sorted(trace.tensors, key=lambda x: -x.produced):
            if x.id in dropped:
                use.update({i: min(use[i], use[x.id]) for i in x.recompute.inputs})
    return use


def timing(trace, swaps, out_bandwidth, in_bandwidth, latency, dropped=()):
    """Return the lists ready, start, finish and the dictionaries of copy intervals, out and in."""
    tensor = {x.id: x for x in trace.tensors}
    use = first_uses(trace, dropped)
    longer = [
        sum(x.recompute.seconds for x in trace.tensors if x.id in dropped and use[x.id] == k)
        for k in range(len(trace.nodes))
    ]
    release = {i: k for i, k, _ in swaps}
    prefetch = {i: k for i, _, k in swaps}
    ready, start, finish, outs, ins = [], [], [], {}, {}
    out_free = in_free = 0.0
    for k in range(len(trace.nodes)):
        before = finish[k - 1] if k else 0.0
        ready.append(max([before] + [outs[i][1] for i in release if release[i] == k]))
        queue = [i for i in prefetch if prefetch[i] == k]
        for i in sorted(queue, key=lambda i: (use[i], i)):
            begin = max(ready[k], in_free, outs[i][1])
            in_free = begin + (latency + (tensor[i].copy_bytes or tensor[i].bytes) / in_bandwidth)
            ins[i] = (begin, in_free)
        start.append(max([ready[k]] + [ins[i][1] for i in prefetch if use[i] == k]))
        finish.append(start[k] + (trace.nodes[k].seconds + longer[k]))
        for i in sorted(i for i in release if tensor[i].packed == k):
            begin = max(finish[k], out_free)
            out_free = begin + (latency + (tensor[i].copy_bytes or tensor[i].bytes) / out_bandwidth)
            outs[i] = (begin, out_free)
    return ready, start, finish, outs, ins


def resident(trace, swaps):
    """Return the bytes resident during each node, tensor by tensor and node by node."""
    away = {i: range(release, prefetch) for i, release, prefetch in swaps}
    return [
        base + sum(x.bytes for x in trace.tensors if x.produced <= k <= x.last_use and k not in away.get(x.id, ()))
        for k, base in enumerate(trace.base_bytes)
    ]


def joint_resident(trace, swaps, dropped):
    """Return the bytes resident during each node where some tensors are dropped."""
    use = first_uses(trace, dropped)
    away = {i: range(release, prefetch) for i, release, prefetch in swaps}
    away |= {x.id: range(x.last_forward + 1, use[x.id]) for x in trace.tensors if x.id in dropped}
    last = {x.id: x.last_use for x in trace.tensors}
    counts = list(trace.base_bytes)
    for x in trace.tensors:
        if x.id in dropped:
            counts[use[x.id]] += x.recompute.workspace_bytes
            for i in x.recompute.inputs:
                last[i] = max(last[i], use[x.id])
    for x in trace.tensors:
        for k in range(x.produced, last[x.id] + 1):
            counts[k] += x.bytes if k not in away.get(x.id, ()) else 0
    return counts


def joint_cut(trace, k, e, dropped_bytes, out_bandwidth, in_bandwidth):
    """Return, for e bytes to be away at node k of which some are dropped: start, copies in, least recomputation."""
    c = [0.0]
    for node in trace.nodes:
        c.append(c[-1] + node.seconds)
    n, moved = len(trace.nodes), e - dropped_bytes
    covering = [x for x in trace.tensors if x.last_forward < k < x.first_backward]
    start, copies, a = c[k], -math.inf, 0
    for x in sorted(covering, key=lambda x: x.packed):
        if a < moved:
            start = max(start, c[x.packed + 1] + (moved - a) / out_bandwidth)
        a += x.bytes
    a = 0
    for x in sorted(covering, key=lambda x: -x.first_backward):
        if a < moved:
            copies = max(copies, trace.nodes[k].seconds + (moved - a) / in_bandwidth + c[n] - c[x.first_backward])
        a += x.bytes
    cost, left = 0.0, dropped_bytes
    priced = [(x.recompute.bound_seconds / x.bytes, x.bytes) for x in covering if x.recompute and x.bytes]
    for price, count in sorted(priced):
        cost += price * min(left, count)
        left -= min(left, count)
    return start, copies, cost if left <= 0 else math.inf


def joint_bounds(trace, limit_bytes, out_bandwidth, in_bandwidth, cells=64):
    """Return the joint bound from below, by cells of dropped bytes, and from above, by the points between them."""
    total = sum(node.seconds for node in trace.nodes)
    low = high = total
    for k, count in enumerate(resident(trace, [])):
        e = count - limit_bytes
        if e <= 0:
            continue
        if sum(x.bytes for x in trace.tensors if x.last_forward < k < x.first_backward) < e:
            return math.inf, math.inf
        rest = total - sum(node.seconds for node in trace.nodes[:k])
        cuts = [joint_cut(trace, k, e, e * i / cells, out_bandwidth, in_bandwidth) for i in range(cells + 1)]
        high = max(high, min(start + max(rest + cost, copies) for start, copies, cost in cuts))
        low = max(low, min(right[0] + max(rest + left[2], right[1]) for left, right in pairwise(cuts)))
    return low, high


def bound(trace, limit_bytes, out_bandwidth, in_bandwidth):
    """Return the cut bound, node by node and term by term."""
    n = len(trace.nodes)
    c = [0.0]
    for node in trace.nodes:
        c.append(c[-1] + node.seconds)
    best = c[n]
    for k, count in enumerate(resident(trace, [])):
        e = max(0, count - limit_bytes)
        covering = [x for x in trace.tensors if x.last_forward < k < x.first_backward]
        if sum(x.bytes for x in covering) < e:
            return math.inf
        start, a = c[k], 0
        for x in sorted(covering, key=lambda x: x.packed):
            if a < e:
                start = max(start, c[x.packed + 1] + (e - a) / out_bandwidth)
            a += x.bytes
        rest, a = c[n] - c[k], 0
        for x in sorted(covering, key=lambda x: -x.first_backward):
            if a < e:
                rest = max(rest, trace.nodes[k].seconds + (e - a) / in_bandwidth + c[n] - c[x.first_backward])
            a += x.bytes
        best = max(best, start + rest)
    return best


def least_limit(trace):
    """Return the least feasible limit from its definition: everything away for as long as it can be."""
    return max(resident(trace, [(x.id, x.last_forward + 1, x.first_backward) for x in trace.tensors]), default=0)


def random_trace(seed, node_count=40, tensor_count=25):
    """Return a trace without structure; some nodes take no time, ids are not in order."""
    rng = np.random.default_rng(seed)
    seconds = rng.exponential(1.0, node_count) * (rng.random(node_count) > 0.1)
    nodes = tuple(Node(f"n{k}", float(x), k >= node_count // 2) for k, x in enumerate(seconds))
    tensors = []
    for i in rng.permutation(tensor_count).tolist():
        a, b, c, d, e = sorted(rng.integers(0, node_count, 5).tolist())
        if c < d:
            tensors.append(SavedTensor(i, int(rng.integers(1, 100)), a, b, c, d, e))
    return Trace(nodes, tuple(rng.integers(0, 50, node_count).tolist()), tuple(tensors), f"seed {seed}")


def with_recipes(trace, seed, share=0.7):
    """Return the trace with a recipe for most tensors, from some that are made before."""
    rng = np.random.default_rng(seed)
    tensors = []
    for x in trace.tensors:
        before = [y.id for y in trace.tensors if (y.produced, y.id) < (x.produced, x.id)]
        sources = tuple(i for i in before if rng.random() < min(0.5, 2 / len(before)))
        seconds = float(rng.choice([0.0, 0.1, 0.4, 1.5]))
        recipe = Recompute(seconds, sources, int(rng.integers(0, 4)), seconds / 2 if rng.random() < 0.2 else None)
        tensors.append(replace(x, recompute=recipe if rng.random() < share else None))
    return replace(trace, tensors=tuple(tensors))


def with_views(trace, seed, share=0.6):
    """Return the trace in which only parts of most tensors are copied."""
    rng = np.random.default_rng(seed)
    tensors = [
        replace(x, copy_bytes=int(rng.integers(1, x.bytes + 1))) if x.bytes and rng.random() < share else x
        for x in trace.tensors
    ]
    return replace(trace, tensors=tuple(tensors))


def random_swaps(trace, seed):
    """Return a valid plan that makes no sense."""
    rng = np.random.default_rng(seed)
    swaps = []
    for x in trace.tensors:
        if rng.random() < 0.6:
            release, prefetch = sorted(rng.integers(x.last_forward + 1, x.first_backward + 1, 2).tolist())
            swaps.append((x.id, release, prefetch))
    return swaps


@st.composite
def traces(draw, tensors_max=8):
    """Draw a small trace: few distinct durations and sizes, so that ties and zeros are common."""
    count = draw(st.integers(1, 14))
    seconds = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.25]), min_size=count, max_size=count))
    base = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    tensors = []
    for i in range(draw(st.integers(0, tensors_max if count > 1 else 0))):
        last_forward = draw(st.integers(0, count - 2))
        packed = draw(st.integers(0, last_forward))
        first_backward = draw(st.integers(last_forward + 1, count - 1))
        last_use = draw(st.integers(first_backward, count - 1))
        size = draw(st.integers(1, 20))
        tensors.append(
            SavedTensor(i, size, draw(st.integers(0, packed)), packed, last_forward, first_backward, last_use)
        )
    nodes = tuple(Node(f"n{k}", x, 2 * k >= count) for k, x in enumerate(seconds))
    return Trace(nodes, tuple(base), tuple(tensors))
