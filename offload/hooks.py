"""Autograd's pack and unpack. They decide nothing: the session says what may move, the engine moves it.

On the data path: a `Round` is one forward pass and the backward passes over it. Its pack stands in every graph node
that the pass creates; its unpack answers when backward asks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from offload.engine import Engine, Lease, LeaseReference, StorageKey, SwappedView, raise_changed
from offload.options import Options
from offload.profiler import Recorder, Schedule
from offload.report import Counts

# What a graph node holds in a saved tensor's place: the tensor without its history and its version, or a swapped view
# and None; and the pack's number where the schedule or the recorder wants to hear of its unpack.
Packed = tuple[Any, "int | None", "int | None"]

_STRIDED = torch.strided
_PLAIN = (Tensor, Parameter)


class Policy(Protocol):
    """What a round asks before it moves a tensor; the session answers."""

    options: Options
    engine: Engine
    counts: Counts

    def supports(self, tensor: Tensor) -> bool:
        """Whether the engine can move tensors of this kind."""

    def why_held(self, tensor: Tensor) -> str | None:
        """Who holds this storage anyway, so that moving it would free nothing; None where nobody is known to."""

    def is_excluded(self) -> bool:
        """Whether the module now running in this thread is to be left alone."""

    def forget_schedule(self, signature: object) -> None:
        """This signature behaves otherwise than recorded."""

    def warn_once(self, error: Exception) -> None:
        """Say that the store could not take a tensor."""


class Round:
    """One forward pass and the backward passes over it.

    Until `attach` its packs move, but nothing is prefetched.
    """

    def __init__(self, policy: Policy) -> None:
        self._engine = policy.engine
        self._min_nbytes = policy.options.min_tensor_bytes
        self._counts = policy.counts
        self._reason_unchosen = "needed soon" if policy.options.n_tensors is None else "n_tensors"
        self.policy = policy
        self.attached = False
        self._signature: object = None
        self._schedule: Schedule | None = None
        self._recorder: Recorder | None = None
        self._watched: dict[int, int] = {}
        self._packs = 0
        self._kept: set[StorageKey] = set()
        self._leases: dict[int, LeaseReference] = {}
        self._next_use = 0
        self._node = -1
        self._used: set[int] = set()

    def attach(self, signature: object, schedule: Schedule | None, recorder: Recorder | None) -> None:
        """Start to follow a schedule, or to record one; packs are numbered from here."""
        self.attached = True
        self._signature = signature
        self._schedule = schedule
        self._recorder = recorder
        self._watched = schedule.node_of if schedule is not None else {}
        self._packs = 0

    def pack(self, tensor: Tensor) -> Packed:
        """What the graph node shall hold instead of `tensor`."""
        index = self._packs
        self._packs = index + 1
        if type(tensor) in _PLAIN and tensor.layout is _STRIDED and not tensor.is_nested:
            nbytes = tensor.nbytes
            if nbytes < self._min_nbytes and not tensor._is_view():
                return self._keep(tensor, index, "small", nbytes)
            if type(tensor) is Parameter or type(tensor._base) is Parameter:
                return self._keep(tensor, index, "parameter", nbytes)
            return self._pack_candidate(tensor, index, nbytes)
        return self._keep(tensor, index, "unsupported kind", 0)

    def unpack(self, packed: Packed) -> Tensor:
        """The tensor that `pack` was given, as it was.

        Raises
        ------
        RuntimeError
            It was changed in place since.
        OSError
            Its bytes could not be read back; a later call tries again.
        """
        held, version, index = packed
        if index is not None:
            self._unpacked(index)
        if version is None:
            self._engine.collect()
            restored: Tensor = held.restore()
            return restored
        tensor: Tensor = held
        if tensor._version != version:
            raise_changed(tensor.type(), tensor.shape, tensor._version, version)
        return tensor

    def _keep(self, tensor: Tensor, index: int, reason: str, nbytes: int) -> Packed:
        count = self._counts[reason]
        count.tensors += 1
        count.nbytes += nbytes
        watched = index if self._recorder is not None or index in self._watched else None
        # A leaf as it is: autograd too saves the tensor itself, and no history hangs on it.
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version, watched

    def _pack_candidate(self, tensor: Tensor, index: int, nbytes: int) -> Packed:
        policy = self.policy
        if nbytes == 0:
            return self._keep(tensor, index, "small", 0)
        if not policy.supports(tensor):
            return self._keep(tensor, index, "unsupported kind", nbytes)
        if self._engine.is_untracked_part(tensor):
            return self._keep(tensor, index, "view of a larger storage", nbytes)
        key = self._engine.key_of(tensor)
        lease = self._engine.find(tensor, key)
        if lease is not None:
            return self._pack_duplicate(tensor, index, lease)
        if key[3] < self._min_nbytes:
            small = tensor.untyped_storage().nbytes() < self._min_nbytes
            return self._keep(tensor, index, "small" if small else "view of a larger storage", nbytes)
        reason = policy.why_held(tensor) or self._reason_to_keep(index, key[3])
        if reason is not None:
            again = key in self._kept  # a storage that is saved twice takes its bytes once
            self._kept.add(key)
            return self._keep(tensor, index, reason, 0 if again else nbytes)
        try:
            lease = self._engine.swap_out(tensor, key, self._need(index))
        except (MemoryError, OSError) as error:  # PoolExhausted and SpillError among them
            policy.warn_once(error)
            return self._keep(tensor, index, "host limit", nbytes)
        self._leases[index] = self._engine.watch(lease)
        self._counts.swapped.tensors += 1
        self._counts.swapped.nbytes += key[3]
        return SwappedView.of(tensor, lease), None, index

    def _pack_duplicate(self, tensor: Tensor, index: int, lease: Lease) -> Packed:
        count = self._counts.duplicates
        count.tensors += 1
        count.nbytes += tensor.nbytes
        if self._recorder is not None:
            first = next((i for i, ref in self._leases.items() if ref() is lease), None)
            if first is not None:
                self._recorder.packed_again(index, first)
        return SwappedView.of(tensor, lease), None, index

    def _reason_to_keep(self, index: int, nbytes: int) -> str | None:
        """Why policy keeps this storage; None: it moves. Notes it for the recorder, checks it against the schedule."""
        if self.policy.is_excluded():
            return "excluded"
        if self._recorder is not None:
            self._recorder.packed(index, nbytes)
            return None
        schedule = self._schedule
        if schedule is None:
            return None
        if index in schedule.duplicates:
            return self._reason_unchosen
        if not schedule.expects(index, nbytes):
            # Another branch than the recorded one: go on by demand, and record that signature anew.
            self._schedule = None
            self._watched = {}
            self.policy.forget_schedule(self._signature)
            return None
        return None if index in schedule.swapped else self._reason_unchosen

    def _need(self, index: int) -> int:
        """Rank for the disk: the larger, the later it is needed."""
        schedule = self._schedule
        if schedule is None:
            return 2**32 - index
        first_use = schedule.entries[index].first_use
        return 2**32 if first_use is None else first_use

    def _unpacked(self, index: int) -> None:
        if self._recorder is not None:
            self._recorder.unpacked(index)
            return
        schedule = self._schedule
        if schedule is None:
            return
        node = self._watched.get(index)
        if node is None:
            if index in schedule.swapped:  # the recorded backward did not ask for it: it saw a part of the graph only
                self.policy.forget_schedule(self._signature)
            return
        if node < self._node:
            self._start_over(schedule, index, node)
        self._node = node
        self._used.add(index)
        order = schedule.use_order
        limit = node + schedule.lookahead_nodes
        while self._next_use < len(order) and order[self._next_use][0] <= limit:
            wanted = order[self._next_use][1]
            self._next_use += 1
            if wanted != index:
                self._begin_return(wanted)

    def _start_over(self, schedule: Schedule, index: int, node: int) -> None:
        """Backward went back: a second pass over a retained graph, or another order than the recorded one."""
        if index not in self._used:
            self.policy.forget_schedule(self._signature)
        self._used.clear()
        order = schedule.use_order
        self._next_use = next((i for i, (use, _) in enumerate(order) if use >= node), len(order))

    def _begin_return(self, index: int) -> None:
        reference = self._leases.get(index)
        lease = reference() if reference is not None else None
        if lease is None:
            return
        try:
            if lease.record.begin_return():
                self._counts.prefetched += 1
        except (torch.OutOfMemoryError, MemoryError):
            self._counts.prefetches_without_memory += 1  # asked for again on demand, when there may be room
