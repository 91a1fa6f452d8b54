"""Records when each saved tensor is in memory during a step.

It is in memory from its pack until its storage is freed, and again each time that backward loads or recomputes it.
`step_recording` reports packs and unpacks, and calls `look` at each of its marks. A freed storage is noticed at the
next mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from offload._core import SwappedView
from offload.diagnostics.timeline import RecordedTensor, Span
from offload.runtime.engine import Engine
from offload.runtime.hooks import Packed
from offload.torch_compat.tensors import StorageWatch

__all__ = ["RecordedTensors"]


@dataclass
class _Stay:
    """One time in memory: the numbers of the marks at which it began and at which the storage was found freed."""

    begin: int
    watch: StorageWatch
    end: int | None = None


@dataclass
class _Saved:
    """One saved storage: the module that saved it, its bytes, the ticket of its copies (-1: none), and its stays."""

    module: str
    kind: str
    nbytes: int
    ticket: int
    stays: list[_Stay] = field(default_factory=list)


class RecordedTensors:
    """The storages that a step saves for backward, without parameters and buffers.

    Parameters
    ----------
    engine
        The engine, which identifies storages.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saved: list[_Saved] = []
        self._of: dict[int, _Saved] = {}  # by identity of the object that the autograd node holds
        self._by_storage: dict[int, _Saved] = {}  # by identity of the storage in memory, which a watch reserves
        self._leaving: dict[int, _Stay] = {}  # by identity of the storage: stays that may end at any moment

    def packed(self, packed: Packed, tensor: Tensor, module: str, mark: int) -> None:
        """Record a saved tensor: its hook began at `mark`, and the autograd node holds `packed`."""
        storage = self._engine.identity(tensor)
        is_moved = isinstance(packed, SwappedView)
        saved = self._by_storage.get(storage)
        if saved is None:
            saved = _Saved(module, "kept", tensor.untyped_storage().nbytes(), -1)
            self._saved.append(saved)
            self._begin(saved, storage, tensor, mark, may_leave=is_moved)
        if isinstance(packed, SwappedView) and saved.kind == "kept":
            saved.ticket = packed.ticket_id
            saved.kind = "swapped" if packed.ticket_id >= 0 else "recomputed"
            self._leaving[storage] = saved.stays[-1]
        self._of[id(packed)] = saved

    def unpacked(self, packed: Packed, tensor: Tensor, mark: int) -> None:
        """Record that backward has unpacked a tensor, in a hook that began at `mark`."""
        saved = self._of.get(id(packed))
        if saved is None:
            return
        storage = self._engine.identity(tensor)
        if self._by_storage.get(storage) is saved:
            self._leaving[storage] = saved.stays[-1]  # freed with the graph, after the operation
        else:
            self._begin(saved, storage, tensor, mark, may_leave=True)

    def look(self, mark: int, *, at_all: bool = False) -> None:
        """Record which storages have been freed by now. Checks those that may be freed at any moment, or all."""
        stays = self._leaving
        if at_all:
            stays = {storage: saved.stays[-1] for storage, saved in self._by_storage.items()}
        for storage, stay in list(stays.items()):
            if stay.watch.expired():
                stay.end = mark
                self._leaving.pop(storage, None)
                self._by_storage.pop(storage, None)

    def found(self, times: Sequence[float], copies: Sequence[Span]) -> Iterator[RecordedTensor]:
        """Yield the tensors, given the times of the marks and the copies that were made."""
        by_ticket: dict[int, list[Span]] = {}
        for span in copies:
            by_ticket.setdefault(span.ticket, []).append(span)
        for saved in self._saved:
            spans = by_ticket.get(saved.ticket, []) if saved.ticket >= 0 else []
            starts = [span.start for span in spans if span.kind in ("in", "fill")]
            resident: list[float] = []
            before = 0.0
            for stay in saved.stays:
                begin, end = times[stay.begin], times[-1 if stay.end is None else stay.end]
                if resident:  # memory is allocated when the copy-in begins, and was freed before that
                    begin = min([begin, *(start for start in starts if start > before)])
                    resident[-1] = min(resident[-1], begin)
                before = times[stay.begin]
                resident += [begin, end]
            has_left = len(saved.stays) > 1 or any(span.kind == "out" for span in spans)
            kind = saved.kind if saved.kind != "swapped" or has_left else "cancelled"
            yield RecordedTensor(saved.module, kind, saved.nbytes, saved.ticket, tuple(resident))

    def _begin(self, saved: _Saved, storage: int, tensor: Tensor, mark: int, *, may_leave: bool) -> None:
        stay = _Stay(mark, StorageWatch(tensor.untyped_storage()))
        saved.stays.append(stay)
        self._by_storage[storage] = saved
        if may_leave:
            self._leaving[storage] = stay
