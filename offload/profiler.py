"""Watches one step: what autograd saves in forward, and in which order backward asks for it.

On the data path: rounds report every pack and unpack here during a signature's first step; from then on they follow the
schedule made of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from offload.compiled import is_compiled_node

SOON_LOOKAHEADS = 2


@dataclass
class SavedEntry:
    """One storage worth moving, as the recorded step saw it."""

    pack_index: int  # number of the pack that saved it first
    nbytes: int
    first_use: int | None = None  # backward node that asks for it first; None: never asked for


@dataclass(frozen=True)
class Schedule:
    """Which storages a signature swaps and when each starts to come back.

    Packs are numbered in forward order, backward nodes in the order observed.
    """

    entries: dict[int, SavedEntry]  # by pack index
    duplicates: dict[int, int]  # pack index → pack index of the same storage's entry
    swapped: frozenset[int]
    use_order: tuple[tuple[int, int], ...]  # (first use, pack index) of the swapped ones, in order
    node_of: dict[int, int]  # pack index → node, for the packs whose unpack moves the schedule on
    lookahead_nodes: int

    def expects(self, pack_index: int, nbytes: int) -> bool:
        """Whether the recorded step saved a storage of this size at this point."""
        entry = self.entries.get(pack_index)
        return entry is not None and entry.nbytes == nbytes


@dataclass
class Recorder:
    """Takes down one forward pass and the backward pass over it."""

    entries: dict[int, SavedEntry] = field(default_factory=dict)
    duplicates: dict[int, int] = field(default_factory=dict)
    uses: list[tuple[int, int]] = field(default_factory=list)  # (node, pack index), as they came
    compiled_nodes: set[int] = field(default_factory=set)  # those that are graphs of torch.compile
    _node: object = None
    _nodes: int = -1

    def packed(self, pack_index: int, nbytes: int) -> None:
        """A storage worth moving was saved."""
        self.entries[pack_index] = SavedEntry(pack_index, nbytes)

    def packed_again(self, pack_index: int, first_index: int) -> None:
        """Another view of a storage saved before."""
        self.duplicates[pack_index] = first_index

    def unpacked(self, pack_index: int) -> None:
        """Backward asked for the tensor of this pack."""
        node = torch._C._current_autograd_node()
        if node is None:
            return  # somebody looks at grad_fn's attributes outside of backward
        identity = (node.name(), id(node))  # not the node: it would be kept alive
        if identity != self._node:
            self._node = identity
            self._nodes += 1
            if is_compiled_node(identity[0]):
                self.compiled_nodes.add(self._nodes)
        self.uses.append((self._nodes, pack_index))
        entry = self.entries.get(self.duplicates.get(pack_index, pack_index))
        if entry is not None and entry.first_use is None:
            entry.first_use = self._nodes

    def schedule(self, n_tensors: int | None, lookahead_nodes: int) -> Schedule:
        """Choose the `n_tensors` longest-lived storages (−1: all), each asked back `lookahead_nodes` ahead.

        Parameters
        ----------
        n_tensors
            Storages to swap, longest-lived first: the earlier saved and the later used, the longer it lives. None: all
            but those that backward wants within its first `SOON_LOOKAHEADS` times `lookahead_nodes` nodes; they would
            cost a copy each way for hardly any time away.
        lookahead_nodes
            Backward nodes between the start of a copy-in and its use.
        """

        def lifetime(entry: SavedEntry) -> tuple[int, int]:
            last = self._nodes + 1 if entry.first_use is None else entry.first_use
            return last - entry.pack_index, -entry.pack_index

        longest_lived = sorted(self.entries.values(), key=lifetime, reverse=True)
        if n_tensors is None:
            soon = SOON_LOOKAHEADS * lookahead_nodes
            chosen = [entry for entry in longest_lived if entry.first_use is None or entry.first_use >= soon]
        else:
            chosen = longest_lived if n_tensors < 0 else longest_lived[:n_tensors]
        swapped = frozenset(entry.pack_index for entry in chosen)
        use_order = tuple(
            sorted((entry.first_use, entry.pack_index) for entry in chosen if entry.first_use is not None)
        )
        return Schedule(
            entries=self.entries,
            duplicates=self.duplicates,
            swapped=swapped,
            use_order=use_order,
            node_of=self._watched(swapped, [node - lookahead_nodes for node, _ in use_order]),
            lookahead_nodes=lookahead_nodes,
        )

    def _watched(self, swapped: Collection[int], starts: list[int]) -> dict[int, int]:
        """The packs to watch: the swapped ones, and one unpack at or before every node where a copy-in starts."""
        watched: dict[int, int] = {}
        wanted = sorted({max(start, 0) for start in starts})
        latest: tuple[int, int] | None = None
        for node, pack_index in self.uses:
            if self.duplicates.get(pack_index, pack_index) in swapped:
                watched.setdefault(pack_index, node)
            while wanted and wanted[0] < node:
                if latest is not None:
                    watched.setdefault(latest[1], latest[0])
                wanted.pop(0)
            if latest is None or node > latest[0]:
                latest = (node, pack_index)
                if wanted and wanted[0] == node:
                    watched.setdefault(pack_index, node)
                    wanted.pop(0)
        return watched
