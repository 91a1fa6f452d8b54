"""The fastest release and prefetch nodes for a given set of swapped tensors, by dynamic programming.

`joint_proof` uses it once it is decided what a plan does with each tensor. `placement` chooses these nodes quickly, but
not always at best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from offload.plan.placement import Step
from offload.plan.simulate import Swap

__all__ = ["ExactPlacement", "exact_placement"]

_LABELS_MAX = 1_000_000  # about half a minute


@dataclass(frozen=True, slots=True)
class ExactPlacement:
    """The outcome of the search.

    Parameters
    ----------
    swaps : tuple of Swap or None
        The fastest swaps of these tensors, sorted by id; None if none faster than the cutoff was found.
    complete : bool
        Whether all releases and prefetches were searched: no faster ones exist.
    """

    swaps: tuple[Swap, ...] | None
    complete: bool


class _Chain(NamedTuple):
    """The prefetches of a label: those at one node, and the chain of those before."""

    before: _Chain | None
    node: int
    positions: tuple[int, ...]


class _Label(NamedTuple):
    """What the nodes before some node leave behind.

    Parameters
    ----------
    now : float
        When the last node ended.
    out_end, in_end : tuple of float
        When the copy-out and the copy-in of each tensor end; 0 if `now` or before, or not yet queued.
    prefetched : _Chain or None
        All prefetches.
    """

    now: float
    out_end: tuple[float, ...]
    in_end: tuple[float, ...]
    prefetched: _Chain | None

    def is_no_later(self, other: _Label) -> bool:
        """Return whether none of the times is later than that of the other label."""
        return (
            self.now <= other.now
            and all(a <= b for a, b in zip(self.out_end, other.out_end, strict=True))
            and all(a <= b for a, b in zip(self.in_end, other.in_end, strict=True))
        )


def exact_placement(
    step: Step, indices: Sequence[int], limit_bytes: int, cutoff_seconds: float, *, labels_max: int = _LABELS_MAX
) -> ExactPlacement:
    """Return the fastest releases and prefetches of a set of tensors, by the rules of `simulate`.

    Parameters
    ----------
    step : Step
        The step.
    indices : sequence of int
        The tensors to swap, all of them.
    limit_bytes : int
        Limit on the resident bytes, in bytes.
    cutoff_seconds : float
        Only a faster step counts, in seconds.
    labels_max : int, default 1,000,000
        Number of labels at which the search gives up.

    Notes
    -----
    The nodes are passed in order. A label is the state after some of them: when they end, which tensors have been
    prefetched, and when the copies end. At each node, every set of tensors that have been released by then can be
    prefetched, those used there at the latest. These rules lose no fastest plan:

    1. The node waits for as few copy-outs as it needs: those of the tensors that are prefetched there, and of so many
       others that the rest fits within the limit. To wait for more at this node delays all copies and nodes behind it,
       and frees nothing that a later node cannot free by waiting for as long.
    2. A tensor is released at the first node, after its last use in forward, that is ready once its copy-out has ended.
    3. Prefetched tensors need memory up to their use. Sets that do not fit at a later node are left out.
    4. If all tensors that are left fit up to their uses and need no wait, all are prefetched, in the order of their
       uses. No other order has the first of them, for any number of them, back earlier.
    5. Of two labels with the same prefetched tensors, one without a later time serves as well: times are monotone.
    6. A label is left out if the step cannot end before the cutoff: its last node ends too late, or the copies that are
       left end too late for the nodes that follow their uses.
    """
    search = _Placements(step, indices, limit_bytes, cutoff_seconds)
    if not search.fits:
        return ExactPlacement(None, complete=True)
    labels: dict[int, list[_Label]] = {0: [search.first()]}
    count = 0
    for k in range(step.node_count):
        following: dict[int, list[_Label]] = {}
        for back, label in ((back, label) for back, several in labels.items() for label in several):
            for now_back, after in search.after(k, back, label):
                count += 1
                beside = following.setdefault(now_back, [])
                if not any(other.is_no_later(after) for other in beside):
                    beside[:] = [other for other in beside if not after.is_no_later(other)]
                    beside.append(after)
            if count > labels_max:
                return ExactPlacement(None, complete=False)
        labels = following
    ended = [label for several in labels.values() for label in several]
    best = min(ended, key=lambda label: label.now, default=None)
    return ExactPlacement(search.swaps(best) if best else None, complete=True)


class _Placements:
    """The labels of one step and set. Tensors are positions in the set, sets of tensors are bits."""

    def __init__(self, step: Step, indices: Sequence[int], limit_bytes: int, cutoff_seconds: float) -> None:
        self._step, self._cutoff = step, cutoff_seconds
        self._all = chosen = sorted(indices)
        self._bytes = [step.bytes[i] for i in chosen]
        self._first = [step.release_min[i] for i in chosen]
        self._use = [step.first_backward[i] for i in chosen]
        self._in_order = sorted(range(len(chosen)), key=lambda p: step.copy_in_rank[chosen[p]])
        self._packs: dict[int, list[int]] = {}
        for p, i in enumerate(chosen):
            self._packs.setdefault(step.packed[i], []).append(p)
        self._headroom = step.headroom(chosen, limit_bytes)
        self._free: dict[int, tuple[list[int], int]] = {}
        self.fits = int(self._headroom.min(initial=0)) >= 0
        self._rest = [step.clock[-1] - at for at in step.clock]

    def first(self) -> _Label:
        """Return the label before the first node."""
        zeros = (0.0,) * len(self._all)
        return _Label(0.0, zeros, zeros, None)

    def after(self, k: int, back: int, label: _Label) -> Iterator[tuple[int, _Label]]:
        """Yield what can follow node k: the tensors prefetched by then, and the label."""
        for now_back, positions in self._prefetches(k, back, label):
            after = self._run(k, self._ready(k, now_back, positions, label), positions, label)
            if self._in_time(k + 1, now_back, after):
                yield now_back, after

    def swaps(self, label: _Label) -> tuple[Swap, ...]:
        """Return the swaps of a label behind the last node, by rule 2."""
        chains = []
        chain = label.prefetched
        while chain:
            chains.append(chain)
            chain = chain.before
        swaps, back, label = [], 0, self.first()
        released: dict[int, int] = {}
        prefetches = {chain.node: chain.positions for chain in chains}
        for k in range(self._step.node_count):
            positions = prefetches.get(k, ())
            back |= sum(1 << p for p in positions)
            ready = self._ready(k, back, positions, label)
            for p, end in enumerate(label.out_end):
                if self._first[p] <= k and end <= ready:
                    released.setdefault(p, k)
            swaps += [Swap(self._step.ids[self._all[p]], released[p], k) for p in positions]
            label = self._run(k, ready, positions, label)
        return tuple(sorted(swaps))

    def _free_of(self, back: int) -> tuple[list[int], int]:
        """Return the free bytes of each node if these tensors are back, and the node from which on they fit."""
        if back not in self._free:
            free = self._headroom.copy()
            for p, count in enumerate(self._bytes):
                if back >> p & 1:
                    free[self._first[p] : self._use[p]] -= count
            over = np.flatnonzero(free < 0)
            self._free[back] = free.tolist(), int(over[-1]) + 1 if over.size else 0
        return self._free[back]

    def _prefetches(self, k: int, back: int, label: _Label) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the sets of tensors that can be prefetched at node k, each with those of before."""
        left = [p for p in self._in_order if not back >> p & 1]
        every = (1 << len(self._all)) - 1
        if all(self._first[p] <= k and not label.out_end[p] for p in left) and self._free_of(every)[1] <= k:
            yield every, tuple(left)
            return
        sets: list[tuple[int, tuple[int, ...]]] = [(back, ())]
        for p in left:
            if self._first[p] <= k:
                more = [(now_back | 1 << p, (*positions, p)) for now_back, positions in sets]
                sets = [*(sets if self._use[p] > k else ()), *(each for each in more if self._free_of(each[0])[1] <= k)]
        yield from sets

    def _ready(self, k: int, back: int, positions: Sequence[int], label: _Label) -> float:
        """Return when node k is ready, by rule 1."""
        ready = max([label.now, *(label.out_end[p] for p in positions)])
        free = self._free_of(back)[0][k]
        waiting = [p for p, end in enumerate(label.out_end) if end > ready and self._first[p] <= k]
        held = sum(self._bytes[p] for p in waiting)
        for p in waiting:
            if held <= free:
                break
            ready = label.out_end[p]
            held -= self._bytes[p]
        return ready

    def _run(self, k: int, ready: float, positions: tuple[int, ...], label: _Label) -> _Label:
        """Return the label behind node k."""
        step = self._step
        start, in_end, in_free = ready, list(label.in_end), max((ready, *label.in_end))
        for p in positions:
            in_free = in_end[p] = in_free + step.in_seconds[self._all[p]]
        for p, use in enumerate(self._use):
            if use == k:
                start = max(start, in_end[p])
        now = start + step.seconds[k]
        out_end, out_free = list(label.out_end), max((now, *label.out_end))
        for p in self._packs.get(k, ()):
            out_free = out_end[p] = out_free + step.out_seconds[self._all[p]]
        return _Label(
            now,
            tuple(end if end > now else 0.0 for end in out_end),
            tuple(end if end > now else 0.0 for end in in_end),
            _Chain(label.prefetched, k, positions) if positions else label.prefetched,
        )

    def _in_time(self, k: int, back: int, label: _Label) -> bool:
        """Return whether the step can end before the cutoff, by rule 6; node k is the next."""
        rest, cutoff = self._rest, self._cutoff
        if label.now + rest[k] >= cutoff:
            return False
        end = max((label.now, *label.in_end))
        for p in self._in_order:
            if not back >> p & 1:
                end += self._step.in_seconds[self._all[p]]
            if (label.in_end[p] if back >> p & 1 else end) + rest[self._use[p]] >= cutoff:
                return False
        return True
