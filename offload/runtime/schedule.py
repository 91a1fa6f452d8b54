"""The schedule of a step: the storages that are swapped, and the releases and prefetches that are due at each node.

A schedule is made from a recorded step and either `n_tensors` and `lb` (`manual_schedule`) or a plan
(`planned_schedule`). A `ScheduleExecutor` executes it.

A step is divided into *nodes*: intervals, numbered in the order of the recorded step. Node 0 begins with the step, and
each node ends where the next one begins. In forward, a node begins after each pack of a storage that can be swapped. In
backward, a node begins when a node of autograd's graph unpacks its first saved tensor. A node that begins in backward
is a *backward node*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypedDict

from offload._core import PackTable
from offload.plan import Plan, Swap, serial_swaps
from offload.recomputation.measured import MeasuredRecipe
from offload.recomputation.template import Templates


@dataclass
class PackEntry:
    """A saved storage of the recorded step that can be swapped; or, if only a view is copied, the view's part of it."""

    pack_index: int  # number of the pack that saved it first
    nbytes: int
    packed: int  # node that ended with this pack
    first_backward: int | None = None  # first backward node that uses it; None if no node does
    last_use: int | None = None


@dataclass
class StepOrder:
    """One recorded step: the saved tensors, and the nodes that used them."""

    entries: dict[int, PackEntry] = field(default_factory=dict)  # by pack index
    duplicates: dict[int, int] = field(default_factory=dict)  # pack index → pack index of the same storage's entry
    node_after_pack: dict[int, int] = field(default_factory=dict)  # pack index → the node that begins after it
    uses: list[tuple[int, int]] = field(default_factory=list)  # (backward node, pack index), in the order of backward
    backward_nodes: list[int] = field(default_factory=list)
    compiled_nodes: set[int] = field(default_factory=set)  # the backward nodes that are graphs of torch.compile
    node_count: int = 1

    def entry_of(self, pack_index: int) -> PackEntry | None:
        """Return the entry that this pack saved, for the first time or again."""
        return self.entries.get(self.duplicates.get(pack_index, pack_index))


@dataclass(frozen=True)
class Schedule:
    """The storages that are swapped, and the nodes at which each of them is released and prefetched."""

    order: StepOrder
    swapped: frozenset[int]  # pack indices of entries
    releases: tuple[tuple[int, int], ...]  # (node that waits for the copy-out, pack index), in order
    prefetches: tuple[
        tuple[int, int, int], ...
    ]  # (node at whose start the copy-in is queued, first_backward, pack index), in order
    # pack index → node, for packs whose unpack uses a swapped or recomputed tensor, or begins a backward node (in the
    # manual mode: a backward node with a prefetch)
    watched: Mapping[int, int]
    plan: Plan | None = None
    borrowed: bool = False  # from a step with larger inputs
    is_serial: bool = False  # whether nothing is computed while a copy runs, as in some reference steps
    recomputed: frozenset[int] = frozenset()  # pack indices of entries that are dropped and recomputed
    recipes: Mapping[int, MeasuredRecipe] = field(default_factory=dict)  # of `recomputed`, as found by the trial

    @cached_property
    def table(self) -> PackTable:
        """The schedule as rows by pack index, which C++ hooks read."""
        table = PackTable()
        for index, entry in self.order.entries.items():
            if index in self.swapped or index in self.recomputed:
                table.swap(index)
                if index in self.swapped and not self.borrowed:
                    table.swap_out(index, entry.nbytes, self.need(index))
            elif not self.borrowed and index not in self._told:
                table.keep(index, entry.nbytes)
        for index, first in self.order.duplicates.items():
            table.show_again(index, first)
            if first in self.swapped or first in self.recomputed:
                table.swap(index)
            elif not self.borrowed and index not in self._told:
                table.keep_again(index)
        for index in self._recorded:
            table.record(index)
        for index, node in self.order.node_after_pack.items():
            table.weigh(index, node)
            if self.plan is not None:
                table.begin_node(index, node)
        for index, node in self.watched.items():
            table.watch(index, node)
        for node, index in self.releases:
            table.release(node, index)
        for node, use, index in self.prefetches:
            table.prefetch(node, use, index)
        table.waits_for_prefetches = self.is_serial
        return table

    @property
    def waits(self) -> frozenset[int]:
        """Nodes with a release or a prefetch. Before each of them, a reference step with copies waits for copies."""
        return frozenset({node for node, _ in self.releases} | {node for node, *_ in self.prefetches})

    @property
    def for_smaller_steps(self) -> Schedule:
        """This schedule for steps with smaller inputs.

        If it recomputes, every access returns a new schedule with empty `templates`: these fit one input size only.
        """
        return replace(self, borrowed=True) if self.recomputed else self._for_smaller_steps

    @cached_property
    def _for_smaller_steps(self) -> Schedule:
        return replace(self, borrowed=True)

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Pairs of pack indices between which operators are recorded; sorted, disjoint. -1 is the start of the step."""
        found: list[tuple[int, int]] = []
        for opens, closes in sorted((recipe.opens, index) for index, recipe in self.recipes.items()):
            if found and opens <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], closes)
            else:
                found.append((opens, closes))
        return tuple(found)

    @cached_property
    def templates(self) -> Templates:
        """The recorded operators of each window. Later steps compare their operators with these, and record nothing."""
        return Templates()

    @cached_property
    def _told(self) -> frozenset[int]:
        """Packs of kept tensors that C++ reports to Python: a window begins there, or a recipe reads the tensor."""
        return self.sources.union(opens for opens, _ in self.windows)

    @property
    def _recorded(self) -> Iterator[int]:
        """Packs that Python handles if their tensor is swapped: a recipe reads it, or a window includes the pack."""
        yield from self.sources
        for opens, closes in self.windows:
            yield from range(max(opens, 0), closes + 1)

    @cached_property
    def sources(self) -> frozenset[int]:
        """Pack indices of the entries that recipes read."""
        return frozenset(index for recipe in self.recipes.values() for index in recipe.sources)

    @cached_property
    def swapped_bytes(self) -> Mapping[int, tuple[int, int]]:
        """Bytes and spill priority (`need`) of each swapped storage, by pack index."""
        return {i: (self.order.entries[i].nbytes, self.need(i)) for i in self.swapped}

    def need(self, pack_index: int) -> int:
        """Return the spill priority: larger if backward needs the tensor later."""
        entry = self.order.entries.get(pack_index)
        if entry is None:
            return 2**32 - pack_index
        return 2**32 if entry.first_backward is None else entry.first_backward

    def matches(self, pack_index: int, nbytes: int) -> bool:
        """Return whether the recorded step saved a storage of this size (if `borrowed`: at least this size) here."""
        entry = self.order.entries.get(pack_index)
        return entry is not None and (nbytes <= entry.nbytes if self.borrowed else entry.nbytes == nbytes)


def manual_schedule(order: StepOrder, n_tensors: int, lookahead_nodes: int) -> Schedule:
    """Swap the `n_tensors` longest-lived storages (−1: all), each prefetched `lookahead_nodes` ahead.

    Parameters
    ----------
    order
        The recorded step.
    n_tensors
        Number of storages to swap, longest-lived first; −1: all.
    lookahead_nodes
        Number of backward nodes between the start of a copy-in and the tensor's use.
    """

    def lifetime(entry: PackEntry) -> tuple[int, int]:
        last = order.node_count if entry.first_backward is None else entry.first_backward
        return last - entry.packed, -entry.pack_index

    longest_lived = sorted(order.entries.values(), key=lifetime, reverse=True)
    chosen = longest_lived if n_tensors < 0 else longest_lived[:n_tensors]
    swapped = frozenset(entry.pack_index for entry in chosen)
    position = {node: i for i, node in enumerate(order.backward_nodes)}
    prefetches = []
    for entry in chosen:
        if entry.first_backward is not None:
            start = order.backward_nodes[max(position[entry.first_backward] - lookahead_nodes, 0)]
            prefetches.append((start, entry.first_backward, entry.pack_index))
    prefetches.sort()
    return Schedule(
        order=order,
        swapped=swapped,
        releases=(),
        prefetches=tuple(prefetches),
        watched=_watched(order, swapped, {start for start, _, _ in prefetches}),
    )


def planned_schedule(
    order: StepOrder,
    plan: Plan,
    members: Mapping[int, Sequence[int]],
    recipes: Mapping[int, MeasuredRecipe] | None = None,
) -> Schedule:
    """Return the schedule that executes a plan.

    Parameters
    ----------
    order
        The recorded step.
    plan
        The plan of this step; node numbers are those of `order`.
    members
        Pack indices of the entries that make up each tensor of the plan, by the tensor's id.
    recipes
        The recipes that a trial has found, by pack index of the entry.
    """
    dropped = frozenset(pack_index for row in plan.recomputes for pack_index in members[row.id])
    return Schedule(
        order=order,
        **_copies(order, plan.swaps, members, dropped),
        plan=plan,
        recomputed=dropped,
        recipes={pack_index: recipes[pack_index] for pack_index in dropped} if recipes is not None else {},
    )


def serial_schedule(order: StepOrder, plan: Plan, members: Mapping[int, Sequence[int]]) -> Schedule:
    """Return the schedule of a plan's reference steps with copies, which show how long nodes take without swapping.

    Tensors are copied in groups, and the step waits for each copy, so that no copy runs during a node. A node right
    after a copy takes longer, which is why there are few groups (`plan/serial.py`).

    Parameters
    ----------
    order, plan, members
        As in `planned_schedule`.
    """
    return Schedule(order=order, **_copies(order, serial_swaps(plan), members), plan=plan, is_serial=True)


class _Copies(TypedDict):
    """Fields of `Schedule`."""

    swapped: frozenset[int]
    releases: tuple[tuple[int, int], ...]
    prefetches: tuple[tuple[int, int, int], ...]
    watched: Mapping[int, int]


def _copies(
    order: StepOrder, swaps: Sequence[Swap], members: Mapping[int, Sequence[int]], dropped: frozenset[int] = frozenset()
) -> _Copies:
    releases, prefetches = [], []
    for swap in swaps:
        for pack_index in members[swap.id]:
            releases.append((swap.release, pack_index))
            first_backward = order.entries[pack_index].first_backward
            if first_backward is not None:
                prefetches.append((swap.prefetch, first_backward, pack_index))
    swapped = frozenset(pack_index for _, pack_index in releases)
    return {
        "swapped": swapped,
        "releases": tuple(sorted(releases)),
        "prefetches": tuple(sorted(prefetches)),
        "watched": _watched(order, swapped | dropped, order.backward_nodes),
    }


def _watched(order: StepOrder, swapped: Iterable[int], nodes: Iterable[int]) -> dict[int, int]:
    """Return the packs whose unpack is watched: those in `swapped`, and the first one to be unpacked in each node."""
    watched: dict[int, int] = {}
    swapped, wanted = set(swapped), set(nodes)
    for node, pack_index in order.uses:
        if order.duplicates.get(pack_index, pack_index) in swapped or node in wanted:
            watched.setdefault(pack_index, node)
        wanted.discard(node)
    return watched
