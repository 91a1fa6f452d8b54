"""Estimates a recorded step at another batch size, or on another device. `offload fit` plans such steps.

Nothing here is measured: each function computes its result from recorded steps and states its assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload.plan.simulate import Link
from offload.plan.trace import SavedTensor, Trace

__all__ = ["SizedStep", "in_proportion", "largest_batch", "on_a_line", "on_the_line_of", "retimed"]

_BATCH_MAX = 1 << 40  # larger than every batch: if this fits, the step does not depend on the batch size


@dataclass(frozen=True)
class SizedStep:
    """A step as a function of its batch size: each of its values is linear in it.

    Attributes
    ----------
    trace
        The step at `batch`.
    batch
        Batch size of `trace`.
    base_slopes, tensor_slopes
        Bytes per item of the batch, for each node's `base_bytes` and for each tensor.
    second_slopes
        Seconds per item of the batch, for each node.
    """

    trace: Trace
    batch: int
    base_slopes: tuple[float, ...]
    tensor_slopes: tuple[float, ...]
    second_slopes: tuple[float, ...]

    def at(self, batch: int) -> Trace:
        """Return the step at another batch size.

        The durations and workspaces of recipes are multiplied by `batch / self.batch`.

        Examples
        --------
        >>> from offload.plan.trace import Node
        >>> nodes = tuple(Node(str(k), 1.0, k > 1) for k in range(4))
        >>> step = Trace(nodes, (10, 10, 14, 10), (SavedTensor(7, 6, 0, 0, 0, 3, 3),))
        >>> doubled = in_proportion(step, 2, fixed_bytes=(10,) * 4).at(4)
        >>> doubled.base_bytes, doubled.tensors[0].bytes, doubled.nodes[0].seconds
        ((10, 10, 18, 10), 12, 2.0)
        """
        if batch == self.batch:
            return self.trace
        more, factor = batch - self.batch, batch / self.batch
        nodes = tuple(
            replace(node, seconds=max(0.0, node.seconds + more * slope))
            for node, slope in zip(self.trace.nodes, self.second_slopes, strict=True)
        )
        base = tuple(map(_line, self.trace.base_bytes, self.base_slopes, [more] * len(nodes)))
        tensors = tuple(
            _recipe_times(_resized(tensor, _line(tensor.bytes, slope, more)), factor, factor)
            for tensor, slope in zip(self.trace.tensors, self.tensor_slopes, strict=True)
        )
        return Trace(nodes, base, tensors, self.trace.source, self.trace.link)


def in_proportion(trace: Trace, batch: int, fixed_bytes: Sequence[int]) -> SizedStep:
    """Return the step as a function of its batch size, estimated from one batch size.

    It assumes that all tensors, all durations, and the bytes of a node beyond `fixed_bytes` are proportional to the
    batch size. If some of these bytes do not grow with it, such as a workspace, larger batches are overestimated.
    """
    more = [base - fixed for base, fixed in zip(trace.base_bytes, fixed_bytes, strict=True)]
    return SizedStep(
        trace,
        batch,
        tuple(max(0, nbytes) / batch for nbytes in more),
        tuple(tensor.bytes / batch for tensor in trace.tensors),
        tuple(node.seconds / batch for node in trace.nodes),
    )


def on_a_line(trace: Trace, batch: int, other: Trace, other_batch: int) -> SizedStep | None:
    """Return the step as a function of its batch size, estimated from two batch sizes.

    The size of each tensor, and the duration and `base_bytes` of each node, are assumed to be linear in the batch size.
    None if the two steps do not consist of the same nodes and tensors.
    """
    is_same = len(trace.nodes) == len(other.nodes) and list(map(_place, trace.tensors)) == list(
        map(_place, other.tensors)
    )
    if not is_same:
        return None
    more = batch - other_batch
    pairs = zip(trace.nodes, other.nodes, strict=True)
    return SizedStep(
        trace,
        batch,
        tuple(max(0.0, (a - b) / more) for a, b in zip(trace.base_bytes, other.base_bytes, strict=True)),
        tuple(max(0.0, (a.bytes - b.bytes) / more) for a, b in zip(trace.tensors, other.tensors, strict=True)),
        # Slopes are at least 0, although measured durations may fall as the batch grows, and so small that no duration
        # is negative at a batch of 0.
        tuple(min(max(0.0, (a.seconds - b.seconds) / more), a.seconds / batch) for a, b in pairs),
    )


def on_the_line_of(
    trace: Trace,
    fixed_bytes: Sequence[int],
    full: Trace,
    full_fixed_bytes: Sequence[int],
    smaller: Trace,
    batch: int,
    smaller_batch: int,
) -> SizedStep | None:
    """Return a step as a function of its batch size, from two steps that repeat a part of it.

    What the part needs lies on the line through these two. What `trace` needs beyond `full` and `fixed_bytes` is taken
    in proportion to the batch.

    Parameters
    ----------
    trace
        The whole step.
    fixed_bytes, full_fixed_bytes
        By node: the bytes of `trace`, and of `full`, that do not depend on the batch.
    full, smaller
        The part, at `batch` and at `smaller_batch`.

    Returns
    -------
    SizedStep or None
        None if the three do not consist of the same nodes and tensors, or if the tensors of `trace` and `full` differ
        in size.
    """
    line = on_a_line(full, batch, smaller, smaller_batch)
    is_part = list(map(_sized_place, trace.tensors)) == list(map(_sized_place, full.tensors))
    if line is None or not is_part or len(trace.nodes) != len(full.nodes):
        return None
    own = [base - fixed for base, fixed in zip(trace.base_bytes, fixed_bytes, strict=True)]
    parts = [base - fixed for base, fixed in zip(full.base_bytes, full_fixed_bytes, strict=True)]
    more = [max(0, whole - max(0, part)) / batch for whole, part in zip(own, parts, strict=True)]
    return SizedStep(
        trace,
        batch,
        tuple(slope + rest for slope, rest in zip(line.base_slopes, more, strict=True)),
        line.tensor_slopes,
        tuple(min(slope, a.seconds / batch) for slope, a in zip(line.second_slopes, trace.nodes, strict=True)),
    )


def largest_batch(step: SizedStep, limit_bytes: int, peak_bytes: Callable[[Trace], int]) -> int | None:
    """Return the largest batch size at which a step stays within a limit.

    Parameters
    ----------
    step
        The step.
    limit_bytes
        Limit on the resident bytes, in bytes.
    peak_bytes
        Returns the peak of a step, for example without swaps, or the least that swapping can reach. It must not fall as
        the batch grows.

    Returns
    -------
    int or None
        0 if not even one item fits; None if every batch fits.
    """
    low, high = 0, 1
    while peak_bytes(step.at(high)) <= limit_bytes:
        low, high = high, 2 * high
        if high > _BATCH_MAX:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak_bytes(step.at(middle)) <= limit_bytes else (low, middle)
    return low


def retimed(trace: Trace, factor: float, link: Link) -> Trace:
    """Return the step on a device where every node and every recipe takes `factor` times as long. Bytes stay."""
    nodes = tuple(replace(node, seconds=factor * node.seconds) for node in trace.nodes)
    tensors = tuple(_recipe_times(tensor, factor, 1.0) for tensor in trace.tensors)
    return Trace(nodes, trace.base_bytes, tensors, trace.source, link)


def _line(nbytes: int, slope: float, more: int) -> int:
    return max(0, nbytes + math.ceil(slope * more))


def _resized(tensor: SavedTensor, nbytes: int) -> SavedTensor:
    """Return the tensor with another size, of which its copies have the same share."""
    copied = tensor.copy_bytes
    if copied is not None:
        copied = math.ceil(nbytes * copied / tensor.bytes) if tensor.bytes else nbytes
    return replace(tensor, bytes=nbytes, copy_bytes=copied)


def _place(tensor: SavedTensor) -> tuple[int, int, int]:
    return tensor.packed, tensor.first_backward, tensor.last_use


def _sized_place(tensor: SavedTensor) -> tuple[int, int, int, int]:
    return (*_place(tensor), tensor.bytes)


def _recipe_times(tensor: SavedTensor, seconds_factor: float, workspace_factor: float) -> SavedTensor:
    recipe = tensor.recompute
    if recipe is None:
        return tensor
    least = recipe.least_seconds
    longer = replace(
        recipe,
        seconds=seconds_factor * recipe.seconds,
        workspace_bytes=math.ceil(workspace_factor * recipe.workspace_bytes),
        least_seconds=None if least is None else seconds_factor * least,
    )
    return replace(tensor, recompute=longer)
