"""Tensors ↔ bytes: the only file that touches addresses, streams, versions and strides.

On the data path: hooks hand a saved tensor in, the engine finds its storage, has the swap store copy the bytes out,
holds the source until the copy has ended, and later puts the same bytes back under the same size, stride and offset.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from offload import _core
from offload.devices.device import device_of

log = logging.getLogger("offload")

LANE_NICENESS = 0

# What a store adds up over its life; its other figures are those of the moment.
_SUMS = frozenset(
    f"{direction}_{figure}" for direction in ("out", "in") for figure in ("bytes", "copies", "transfers", "seconds")
) | {"stall_seconds", "spilled_bytes", "spill_written_bytes", "spill_read_bytes", "cancelled", "failed"}

Entry = TypeVar("Entry")
# Identity of the tensor that owns the version counter, its version, first byte, bytes, identity of the storage.
StorageKey = tuple[int, int, int, int, int]


def raise_changed(kind: str, shape: torch.Size, found: int, expected: int) -> None:
    """Raise what autograd raises without hooks when a saved tensor was changed in place."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}] is at version {found}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True)."
    )


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one, with one storage of its own or shared with others of its kind."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    )


@dataclass
class ByteCounter:
    """Bytes of saved storages at one moment, and the most there ever were."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more (or, negative, fewer)."""
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now


class Departure:
    """A source on its way out: kept whole until its copy no longer reads it. The store sets `ticket`."""

    __slots__ = ("nbytes", "record", "source", "stream", "ticket")
    ticket: _core.Ticket

    def __init__(self, source: torch.UntypedStorage, nbytes: int, stream: int) -> None:
        self.source: torch.UntypedStorage | None = source
        self.nbytes = nbytes
        self.stream = stream
        self.record: SwappedStorage | None = None


class StorageWatch:
    """Tells when nobody holds a storage any more. It has to be closed: a finalizer would run Python code."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = storage._weak_ref()

    def expired(self) -> bool:
        """Whether nobody holds it any more."""
        if self._reference is not None and torch.UntypedStorage._expired(self._reference):
            self.close()
        return self._reference is None

    def close(self) -> None:
        """Watch no longer."""
        reference, self._reference = self._reference, None
        if reference is not None:
            torch.UntypedStorage._free_weak_ref(reference)  # type: ignore[no-untyped-call]


class Lease:
    """What keeps a record's slot: held by the graph nodes that saved views of it, and by nothing else.

    A thin object of its own, without a finalizer: a weak reference to it is dead before anybody can take it up again,
    and tells the engine that the graph is gone. No Python code runs then, on whichever thread: an exception that the
    handler of a signal raised in it would be lost.
    """

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: SwappedStorage) -> None:
        self.record = record


class LeaseReference(weakref.ref[Lease]):
    """A weak reference to a lease that still knows the record when the lease is gone."""

    __slots__ = ("record",)
    record: SwappedStorage


class SwappedStorage:
    """The bytes of one storage (or of one span of it) at one version, out of the device."""

    __slots__ = (
        "_begin",
        "_counted",
        "_departure",
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
        engine: Engine,
        ticket: _core.Ticket,
        owner: object,
        key: StorageKey,
        nbytes: int,
        residue: int,
        departure: Departure,
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
        self._departure: Departure | None = departure
        self._storage: torch.UntypedStorage | None = None
        self._begin = 0  # where in that storage they begin, in bytes
        self._incoming = False
        self._stream = 0

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the device without elements."""
        return self._engine.empty(dtype)

    def add_view(self) -> None:
        """Count one more saved view of these bytes."""
        self.views += 1
        self._views_left += 1

    @property
    def is_away(self) -> bool:
        """Whether neither the source nor a reloaded copy is on the device."""
        departure = self._departure
        return self._storage is None and (departure is None or departure.source is None)

    def begin_return(self) -> bool:
        """Start to bring the bytes back into fresh device memory. False where they are there or coming already."""
        with self._lock:
            if not self.is_away:
                return False
            self._begin_return()
            return True

    def _begin_return(self) -> None:
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

    def bring_back(self) -> tuple[torch.UntypedStorage, int]:
        """The bytes on the device, ready for the current stream: a storage and where in it, in bytes, they begin.

        One view is served per call.

        Raises
        ------
        OSError
            The bytes could not be read back; a later call tries again.
        """
        engine = self._engine
        with self._lock:
            departure = self._departure
            source = departure.source if departure is not None else None
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
                self._begin_return()
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

    def leave(self) -> None:
        """Wait until the bytes have left. They stay where copying them fails, or where some views are in use again."""
        departure = self._departure
        if departure is not None and departure.source is not None:
            self._engine.see_off(departure)

    def has_left(self) -> None:
        """The copy-out no longer reads the source: it goes, unless backward has begun to use it."""
        with self._lock:
            departure, self._departure = self._departure, None
            if departure is None:
                return  # torn down meanwhile
            if self._views_left < self.views:
                # Views of one storage come back onto one: where some are on the source, so are those that follow.
                self._storage, self._begin, self._stream = departure.source, self.key[2], departure.stream
            else:
                self._engine.resident.add(-self.nbytes)

    def tear_down(self) -> None:
        """Give everything back; the last lease is gone. Waits for nothing; an interrupted call may be repeated."""
        engine = self._engine
        counted, self._counted = self._counted, 0
        engine.unswapped.add(-counted)
        departure, self._departure = self._departure, None
        if departure is not None:
            engine.resident.add(-self.nbytes)
            departure.record = None
            if departure.ticket.cancel() or departure.ticket.out_done():
                departure.source = None
        if self._storage is not None:
            if self._incoming:
                engine.retire(self.ticket, self._storage)
            self._drop_storage()
        self.ticket = None  # type: ignore[assignment]  # the slot is free once the copies that touch it have ended


class SwappedView:
    """One saved tensor whose bytes are out: what the graph node holds in its place."""

    __slots__ = (
        "_dtype",
        "_is_conj",
        "_is_neg",
        "_lease",
        "_offset",
        "_probe",
        "_shape",
        "_stride",
        "_version",
    )

    def __init__(self, tensor: torch.Tensor, lease: Lease, offset: int) -> None:
        self._lease = lease
        record = lease.record
        record.add_view()
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = offset
        self._dtype = tensor.dtype
        self._is_conj = tensor.is_conj()
        self._is_neg = tensor.is_neg()
        self._version = tensor._version
        # Shares the tensor's version counter, and holds none of its memory.
        self._probe = tensor.detach()
        self._probe.data = record.empty(tensor.dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor, lease: Lease) -> SwappedView:
        """A saved view of the bytes on lease."""
        begin = lease.record.key[2]
        return cls(tensor, lease, int(tensor.storage_offset()) - begin // tensor.itemsize)

    @property
    def ticket_id(self) -> int:
        """Which copies of the store's log are those of these bytes."""
        return self._lease.record.ticket.id

    def restore(self) -> torch.Tensor:
        """The tensor as it was saved: same bytes, size, stride, offset and lazy bits.

        Raises
        ------
        RuntimeError
            The tensor was changed in place after it was saved.
        OSError
            Its bytes could not be read back; calling again tries again.
        """
        found = self._probe._version
        if found != self._version:
            raise_changed(self._probe.type(), self._shape, found, self._version)
        storage, begin = self._lease.record.bring_back()
        # Nothing here requires a gradient, so none of it is recorded where grad is on (create_graph).
        tensor = self._lease.record.empty(self._dtype).detach()
        tensor.set_(storage, self._offset + begin // tensor.itemsize, self._shape, self._stride)
        if self._is_conj:
            tensor = torch._conj(tensor)
        if self._is_neg:
            tensor = torch._neg_view(tensor)
        # Under the original's version counter: a backward that writes to it is noticed by whoever saved it too.
        restored = self._probe.detach()
        restored.data = tensor
        return restored


def _oldest(queue: deque[Entry]) -> Entry | None:
    """The front of a queue that other threads use too."""
    try:
        return queue[0]
    except IndexError:
        return None


def _discard(queue: deque[Any], entry: object) -> bool:
    """Take an entry out of a queue that other threads use too. False where it is gone already."""
    try:
        queue.remove(entry)
    except ValueError:
        return False
    return True


class Engine:
    """One device's swap store, seen as storages.

    Parameters
    ----------
    store
        The data plane.
    device
        ``cpu`` or one accelerator.
    in_flight_bytes_max
        Sources held at a time for copies that have not ended; beyond it the compute stream waits for the oldest.
    """

    def __init__(self, store: _core.SwapStore, device: torch.device, in_flight_bytes_max: int | None = None) -> None:
        self.store = store
        self.device = device
        self.in_flight_bytes_max = in_flight_bytes_max or device_of(device).in_flight_bytes_max
        self.in_flight_bytes = 0
        self.resident = ByteCounter()  # of swapped storages: what is on the device
        self.unswapped = ByteCounter()  # the same storages, had they stayed
        self.misses = 0
        self.failed = 0
        self.failure: str = ""
        self._device = device_of(device)
        self._is_accelerator = self._device.is_accelerator
        self._stats_before = store.stats()
        self._alignment = store.alignment_bytes
        self._live: dict[StorageKey, LeaseReference] = {}
        self._dead: deque[LeaseReference] = deque()  # whose graph is gone, and whose record is still to be torn down
        self._reaping = threading.RLock()
        self._departing: deque[Departure] = deque()
        self._begin_copy = store.swap_out
        self._enter = self._departing.append
        self._retired: deque[tuple[_core.Ticket, torch.UntypedStorage]] = deque()
        self._empty: dict[torch.dtype, torch.Tensor] = {}

    def current_stream(self) -> int:
        """Handle of the compute stream that the calling thread uses now; 0 on the CPU."""
        return self._device.current_stream() if self._is_accelerator else 0

    def allocate(self, nbytes: int, residue: int) -> tuple[torch.UntypedStorage, int, _core.HostBlock | None, int]:
        """Fresh device memory on the current stream: storage, stream, the owner a copy must hold, address."""
        if self._is_accelerator:
            # Not torch.empty: that fills its memory where algorithms shall be deterministic.
            storage = torch.UntypedStorage(nbytes, device=self.device)  # type: ignore[no-untyped-call]
            return storage, self.current_stream(), None, storage.data_ptr()
        # At least 64, as torch aligns its own: vendor kernels may round otherwise on less.
        block = _core.HostBlock(nbytes, max(self._alignment, 64), residue)
        return torch.frombuffer(block, dtype=torch.uint8).untyped_storage(), 0, block, block.address

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the device without elements."""
        empty = self._empty.get(dtype)
        if empty is None:
            empty = self._empty[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return empty

    def mark(self) -> Any:
        """A point in time: of the clock on the CPU, of the current stream on an accelerator."""
        return self._device.mark() if self._is_accelerator else time.perf_counter()

    def busy_seconds(self) -> float:
        """What this thread has taken of the processor that computes: on an accelerator nothing."""
        return 0.0 if self._is_accelerator else time.thread_time()

    def seconds_since(self, first: Any, marks: Sequence[Any]) -> list[float] | None:
        """Seconds from one mark to others; None while the device has not come that far."""
        return self._device.seconds_since(first, marks)

    @staticmethod
    def watch_storage(tensor: torch.Tensor) -> StorageWatch:
        """Watch for the moment at which nobody holds the tensor's storage any more."""
        return StorageWatch(tensor.untyped_storage())

    @staticmethod
    def place_of(tensor: torch.Tensor) -> int:
        """Where its storage begins, as allocators tell it."""
        return tensor.untyped_storage().data_ptr()

    @staticmethod
    def identity(tensor: torch.Tensor) -> int:
        """What tells its storage from every other one alive: the same for all views."""
        return int(tensor.untyped_storage()._cdata)

    @staticmethod
    def key_of(tensor: torch.Tensor) -> StorageKey:
        """Which bytes to move: all of the storage, or the span of a view that covers less than half of it.

        Views share the version counter of their base; aliases that autograd does not know as views (`unsafe_chunk`,
        `.data`) have their own, so that a write through one goes unnoticed by the others: they are not the same.
        """
        storage = tensor.untyped_storage()
        storage_nbytes = storage.nbytes()
        base = tensor._base
        owner = int((tensor if base is None else base)._cdata)
        if 2 * tensor.nbytes < storage_nbytes:
            extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            span_nbytes = int(extent) * tensor.itemsize
            if 2 * span_nbytes < storage_nbytes:
                begin = int(tensor.storage_offset()) * tensor.itemsize
                return owner, tensor._version, begin, span_nbytes, storage._cdata
        return owner, tensor._version, 0, storage_nbytes, storage._cdata

    @staticmethod
    def is_untracked_part(tensor: torch.Tensor) -> bool:
        """Whether it is a part of a storage whose other parts autograd does not connect with it (`unsafe_chunk`).

        They may be written at any time without its version telling, while its bytes are being copied among theirs.
        """
        base = tensor._base
        owner = tensor if base is None else base
        return owner.nbytes < owner.untyped_storage().nbytes()

    def find(self, tensor: torch.Tensor, key: StorageKey) -> Lease | None:
        """The lease on these bytes, or on the whole storage around them, where they have been swapped out already."""
        reference = self._live.get(key)
        if reference is None and 2 * key[3] < (whole_nbytes := tensor.untyped_storage().nbytes()):
            reference = self._live.get((key[0], key[1], 0, whole_nbytes, key[4]))
        return reference() if reference is not None else None

    def swap_out(self, tensor: torch.Tensor, key: StorageKey, need: int) -> Lease:
        """Begin to copy bytes out. When nobody holds the lease any more, `collect` frees its slot.

        Ordering: the copy starts after what the current stream has queued. The source is held until it has ended.

        Raises
        ------
        MemoryError, OSError, RuntimeError
            The store cannot take them; nothing was begun.
        """
        self.collect()
        _, _, begin, nbytes, _ = key
        storage = tensor.untyped_storage()
        address = storage.data_ptr() + begin
        stream = self.current_stream()
        if self._is_accelerator:
            # Nothing where the block is this stream's own; a block of another stream must outlive what reads it here.
            self._device.record_use(tensor)
        departure = Departure(storage, nbytes, stream)
        # The store enters the departure itself: no interrupt can come between the copy's start and the source's hold.
        ticket = self._begin_copy(address, nbytes, stream, need, departure, self._enter)
        base = tensor._base
        owner = torch._C._WeakTensorRef(tensor if base is None else base)  # type: ignore[attr-defined]
        record = SwappedStorage(self, ticket, owner, key, nbytes, address % self._alignment, departure)
        lease = Lease(record)
        reference = LeaseReference(lease, self._dead.append)
        reference.record = departure.record = record
        self.unswapped.add(nbytes)
        self.resident.add(nbytes)
        self._live[key] = reference
        self.in_flight_bytes += nbytes
        return lease

    def limit_in_flight(self) -> None:
        """Wait until the sources that are still held for their copy are few enough."""
        while len(self._departing) > 1 and self.in_flight_bytes > self.in_flight_bytes_max:
            self._await_oldest()

    def watch(self, lease: Lease) -> LeaseReference:
        """A weak reference to a lease that was just given out."""
        return self._live[lease.record.key]

    def collect(self) -> None:
        """Free what graphs held that are gone, and every source and target that no copy touches any more.

        Waits for nothing.
        """
        if self._dead:
            self._reap()
        if not self._departing and not self._retired:
            return
        while (departure := _oldest(self._departing)) is not None and departure.ticket.out_done():
            self._depart(departure)
        while (entry := _oldest(self._retired)) is not None and entry[0].in_done():
            _discard(self._retired, entry)

    def _await_oldest(self) -> None:
        departure = _oldest(self._departing)
        if departure is not None:
            self.see_off(departure)

    def see_off(self, departure: Departure) -> None:
        """Wait until its copy has ended, and let go of the source."""
        departure.ticket.wait_out(departure.stream)
        self._depart(departure)

    def _depart(self, departure: Departure) -> None:
        if not _discard(self._departing, departure):
            return  # another thread was faster
        # An interrupt in swap_out may leave a departure uncounted: an empty queue says zero whatever was added up.
        self.in_flight_bytes = self.in_flight_bytes - departure.nbytes if self._departing else 0
        state = departure.ticket.state
        failed = state == "failed"
        if failed:
            self.failed += 1
            self.failure = departure.ticket.failure
            if self.failed == 1:
                log.warning("a tensor stays on the device, and others may: %s", self.failure)
        record, departure.record = departure.record, None
        if record is not None and (failed or state == "cancelled"):
            return  # the source stays, as if it had not been swapped
        if record is not None:
            record.has_left()
        departure.source = None

    def retire(self, ticket: _core.Ticket, storage: torch.UntypedStorage) -> None:
        """Hold a target that nobody wants any more until the copy into it has ended."""
        if self._is_accelerator or self._alignment == 1:
            self._retired.append((ticket, storage))

    def _reap(self) -> None:
        with self._reaping:
            while (reference := _oldest(self._dead)) is not None:
                record = getattr(reference, "record", None)  # none yet where an interrupt came at once
                if record is not None:
                    if self._live.get(record.key) is reference:
                        del self._live[record.key]
                    record.tear_down()
                _discard(self._dead, reference)  # last: an interrupt before this has it all repeated

    def drain(self) -> None:
        """Wait until every copy that this engine has begun has ended, and let go of what they held."""
        self._reap()
        while self._departing:
            self._await_oldest()
        self.in_flight_bytes = 0
        while (entry := _oldest(self._retired)) is not None:
            entry[0].settle()
            _discard(self._retired, entry)

    def store_stats(self) -> dict[str, float]:
        """The store's figures; those that add up count from this engine's beginning, as other sessions may share it."""
        now: dict[str, float] = self.store.stats()
        return {name: value - self._stats_before[name] if name in _SUMS else value for name, value in now.items()}

    @property
    def live_records(self) -> int:
        """Records whose graph is alive."""
        self._reap()
        return len(self._live)
