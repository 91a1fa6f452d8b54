"""One swapped storage: its copy-out, its copy-in, and who still needs its bytes.

On the data path: the engine makes one at pack; graph nodes hold a `SlotHandle` on it, unpack asks it for its bytes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any, Protocol

import torch

from offload import _core

log = logging.getLogger("offload")

# Identity of the tensor that owns the version counter, its version, first byte, bytes, identity of the storage.
StorageKey = tuple[int, int, int, int, int]


class Memory(Protocol):
    """The device's memory, as the engine keeps it."""

    resident: _core.Gauge
    unswapped: _core.Gauge
    dropped: _core.Gauge
    misses: int

    def current_stream(self) -> int:
        """Handle of the compute stream that the calling thread uses now."""

    def allocate(self, nbytes: int, residue: int) -> tuple[torch.UntypedStorage, int, _core.HostBlock | None, int]:
        """Fresh memory: storage, stream, the owner a copy must hold, address."""

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without elements."""

    def finish_copy_out(self, copy_out: CopyOut) -> None:
        """Wait until its copy has ended, and release the source."""

    def retire(self, ticket: _core.Ticket, storage: torch.UntypedStorage) -> None:
        """Hold a target that nobody wants any more until the copy into it has ended."""


class CopyOut:
    """A source that is being copied out: held until the copy no longer reads it. The store sets `ticket`."""

    __slots__ = ("nbytes", "record", "source", "stream", "ticket")
    ticket: _core.Ticket

    def __init__(self, source: torch.UntypedStorage, nbytes: int, stream: int) -> None:
        self.source: torch.UntypedStorage | None = source
        self.nbytes = nbytes
        self.stream = stream
        self.record: SwappedStorage | None = None


class Record(Protocol):
    """The bytes of one storage at one version, which are not where they were: swapped, or to be made again."""

    key: StorageKey
    nbytes: int
    views: int
    ticket: Any  # None where nothing was copied

    @property
    def is_swapped_out(self) -> bool:
        """Whether a copy-in would bring the bytes to the device, and none of them is there."""

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the device without elements."""

    def add_view(self) -> None:
        """One more asks for the bytes."""

    def remove_view(self) -> None:
        """One less asks for the bytes; they leave again where no other view is in use."""

    def prefetch(self) -> bool:
        """Start the copy-in to fresh device memory. False where there is none to start."""

    def swap_in(self) -> tuple[torch.UntypedStorage, int]:
        """The bytes on the device, ready for the current stream: a storage and where in it they begin."""

    def wait_copied_out(self) -> None:
        """Wait until the copy-out has ended."""

    def free(self) -> None:
        """Free slot and memory; the last handle is gone."""


class SlotHandle:
    """What keeps a record's slot: held by the graph nodes that saved views of it, and by nothing else.

    A thin object of its own, without a finalizer: a weak reference to it is dead before anybody can take it up again,
    and tells the engine that the graph is gone. No Python code runs then, on whichever thread: an exception that the
    handler of a signal raised in it would be lost.
    """

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: Record) -> None:
        self.record = record


class WeakSlotHandle(weakref.ref[SlotHandle]):
    """A weak reference to a handle that still knows the record when the handle is gone."""

    __slots__ = ("record",)
    record: Record


class SwappedStorage:
    """The bytes of one storage (or of one span of it) at one version, out of the device."""

    __slots__ = (
        "_begin",
        "_copy_out",
        "_counted",
        "_engine",
        "_incoming",
        "_lock",
        "_owner",
        "_storage",
        "_stream",
        "_views_left",
        "key",
        "nbytes",
        "residue",
        "ticket",
        "views",
    )

    def __init__(
        self,
        engine: Memory,
        ticket: _core.Ticket,
        owner: object,
        key: StorageKey,
        nbytes: int,
        residue: int,
        copy_out: CopyOut,
    ) -> None:
        self._engine = engine
        self.ticket = ticket
        self.key = key
        self.nbytes = nbytes
        self.residue = residue
        self.views = 0
        self._views_left = 0
        self._counted = nbytes  # of the engine's `unswapped`
        # Where the bytes are. One thread may take it again: a signal or the collector inside may drain the engine.
        self._lock = threading.RLock()
        # A weak reference keeps the owner's address from being used again: identity, not coincidence.
        self._owner = owner
        self._copy_out: CopyOut | None = copy_out
        self._storage: torch.UntypedStorage | None = None
        self._begin = 0  # where in that storage they begin, in bytes
        self._incoming = False
        self._stream = 0

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the device without elements."""
        return self._engine.empty(dtype)

    def add_view(self) -> None:
        """One more asks for the bytes."""
        self.views += 1
        self._views_left += 1

    def remove_view(self) -> None:
        """One less asks for the bytes; they leave again where no other view is in use."""
        with self._lock:
            self.views -= 1
            self._views_left = min(self._views_left, self.views)
            if self._views_left == self.views and self._storage is not None:
                self._drop_storage()

    @property
    def is_swapped_out(self) -> bool:
        """Whether neither the source nor a reloaded copy is on the device."""
        copy_out = self._copy_out
        return self._storage is None and (copy_out is None or copy_out.source is None)

    def prefetch(self) -> bool:
        """Start the copy-in to fresh device memory. False where the bytes are there or a copy-in is under way."""
        with self._lock:
            if not self.is_swapped_out:
                return False
            self._prefetch()
            return True

    def _prefetch(self) -> None:
        engine = self._engine
        self._storage, self._stream, owner, address = engine.allocate(self.nbytes, self.residue)
        self._begin = 0
        self._incoming = True
        engine.resident.add(self.nbytes)
        try:
            self.ticket.prefetch(address, self._stream, owner)
        except BaseException:
            engine.retire(self.ticket, self._storage)  # an interrupt may come after the copy has begun
            self._drop_storage()
            raise

    def swap_in(self) -> tuple[torch.UntypedStorage, int]:
        """The bytes on the device, ready for the current stream: a storage and where in it, in bytes, they begin.

        One view is served per call.

        Raises
        ------
        OSError
            The bytes could not be read back; a later call tries again.
        """
        engine = self._engine
        with self._lock:
            copy_out = self._copy_out
            source = copy_out.source if copy_out is not None else None
            if source is not None:
                self._count_view()
                return source, self.key[2]
            stream = engine.current_stream()
            if self._storage is not None and self._stream != stream:
                self._abandon_incoming()  # prefetched for another stream: its memory belongs to that one
            if self._storage is not None and self._incoming:
                try:
                    self._await_incoming(stream)
                except OSError as error:
                    log.warning("a read ahead of need failed, and is repeated: %s", str(error))
            if self._storage is None:
                engine.misses += 1
                self._prefetch()
                self._await_incoming(stream)
            storage, begin = self._storage, self._begin
            assert storage is not None
            self._count_view()
            return storage, begin

    def _await_incoming(self, stream: int) -> None:
        storage = self._storage
        assert storage is not None
        try:
            self.ticket.swap_in(stream)
        except BaseException:
            self._engine.retire(self.ticket, storage)
            self._drop_storage()
            raise
        self._incoming = False

    def _count_view(self) -> None:
        self._views_left -= 1
        if self._views_left <= 0:
            self._views_left = self.views  # a retained graph may come again
            if self._storage is not None:
                self._drop_storage()

    def _drop_storage(self) -> None:
        self._storage = None
        self._incoming = False
        self._engine.resident.add(-self.nbytes)

    def _abandon_incoming(self) -> None:
        storage = self._storage
        if self._incoming and storage is not None:
            self.ticket.swap_in(self._stream)
        self._drop_storage()

    def wait_copied_out(self) -> None:
        """Wait until the copy-out has ended. The bytes stay where it fails, or where some views are in use again."""
        copy_out = self._copy_out
        if copy_out is not None and copy_out.source is not None:
            self._engine.finish_copy_out(copy_out)

    def copied_out(self) -> None:
        """The copy-out no longer reads the source: release it, unless backward has begun to use it."""
        with self._lock:
            copy_out, self._copy_out = self._copy_out, None
            if copy_out is None:
                return  # torn down meanwhile
            if self._views_left < self.views:
                # Views of one storage come back onto one: where some are on the source, so are those that follow.
                self._storage, self._begin, self._stream = copy_out.source, self.key[2], copy_out.stream
            else:
                self._engine.resident.add(-self.nbytes)

    def free(self) -> None:
        """Free slot and memory; the last handle is gone. Waits for nothing; an interrupted call may be repeated."""
        engine = self._engine
        counted, self._counted = self._counted, 0
        engine.unswapped.add(-counted)
        copy_out, self._copy_out = self._copy_out, None
        if copy_out is not None:
            engine.resident.add(-self.nbytes)
            copy_out.record = None
            if copy_out.ticket.cancel() or copy_out.ticket.out_done():
                copy_out.source = None
        if self._storage is not None:
            if self._incoming:
                engine.retire(self.ticket, self._storage)
            self._drop_storage()
        self.ticket = None  # type: ignore[assignment]  # the slot is free once the copies that touch it have ended
