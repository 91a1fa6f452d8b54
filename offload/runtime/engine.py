"""Tensors ↔ bytes: which storage a saved tensor is of, where its bytes are, and which copies are under way.

On the data path: hooks hand a saved tensor in, the engine finds its storage, has the swap store copy the bytes out,
holds the source until the copy has ended, and later puts the same bytes back under the same size, stride and offset.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from offload import _core
from offload._core import find_saved, version_owner
from offload.devices.device import device_of
from offload.recomputation.recipe import Recipe
from offload.runtime.recomputed_storage import RecomputedStorage
from offload.runtime.swapped_storage import (
    CopyOut,
    SlotHandle,
    StorageKey,
    SwappedStorage,
    WeakSlotHandle,
)
from offload.torch_compat.tensors import StorageWatch, address_keeper, storage_identity

log = logging.getLogger("offload")

LANE_NICENESS = 0

# What a store adds up over its life; its other figures are those of the moment.
_SUMS = frozenset(
    f"{direction}_{figure}" for direction in ("out", "in") for figure in ("bytes", "copies", "transfers", "seconds")
) | {"stall_seconds", "spilled_bytes", "spill_written_bytes", "spill_read_bytes", "cancelled", "failed"}

Entry = TypeVar("Entry")


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one, with one storage of its own or shared with others of its kind."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    )


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
        self.resident = _core.Gauge()  # of swapped storages: what is on the device
        self.unswapped = _core.Gauge()  # the same storages, had they stayed
        self.dropped = _core.Gauge()  # of tensors to be recomputed: what forward still holds, as far as it is known
        self.misses = 0
        self.failed = 0
        self.failure: str = ""
        self._device = device_of(device)
        self.is_accelerator = self._device.is_accelerator
        self._stats_before = store.stats()
        self._alignment = store.alignment_bytes
        self._live: dict[StorageKey, WeakSlotHandle] = {}
        self._dead: deque[WeakSlotHandle] = deque()  # whose graph is gone, and whose record is still to be torn down
        self._reaping = threading.RLock()
        self._copies_out: deque[CopyOut] = deque()
        self._begin_copy = store.swap_out
        self._enter = self._copies_out.append
        self._dropped: deque[RecomputedStorage] = deque()  # whose tensor is still there
        self._retired: deque[tuple[_core.Ticket, torch.UntypedStorage]] = deque()
        self._empty: dict[torch.dtype, torch.Tensor] = {}

    @property
    def queues(self) -> tuple[deque[Any], ...]:
        """What `collect` looks at: all empty where it has nothing to do."""
        return self._dead, self._copies_out, self._retired

    def current_stream(self) -> int:
        """Handle of the compute stream that the calling thread uses now; 0 on the CPU."""
        return self._device.current_stream() if self.is_accelerator else 0

    def allocate(self, nbytes: int, residue: int) -> tuple[torch.UntypedStorage, int, _core.HostBlock | None, int]:
        """Fresh device memory on the current stream: storage, stream, the owner a copy must hold, address."""
        if self.is_accelerator:
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
        return self._device.mark() if self.is_accelerator else time.perf_counter()

    def seconds_since(self, first: Any, marks: Sequence[Any]) -> list[float] | None:
        """Seconds from one mark to others; None while the device has not come that far."""
        return self._device.seconds_since(first, marks)

    @staticmethod
    def watch_storage(tensor: torch.Tensor) -> StorageWatch:
        """Watch for the moment at which nobody holds the tensor's storage any more."""
        return StorageWatch(tensor.untyped_storage())

    @staticmethod
    def address_of(tensor: torch.Tensor) -> int:
        """Where its storage begins, as allocators tell it."""
        return tensor.untyped_storage().data_ptr()

    @staticmethod
    def identity(tensor: torch.Tensor) -> int:
        """What tells its storage from every other one alive: the same for all views."""
        return storage_identity(tensor.untyped_storage())

    def look(self, tensor: torch.Tensor, nbytes: int) -> tuple[StorageKey | None, SlotHandle | None]:
        """Which bytes to move, and the handle on them where they have been swapped out already.

        That is all of the storage, or the span of a view that covers less than half of it. There is no key where bytes
        may change unseen while they are copied: views share the version counter of their base, but parts that autograd
        does not know as views (`unsafe_chunk`, `.data`) have their own, and a write through one is unknown to the rest.
        """
        found = find_saved(tensor, nbytes, self._live)
        if found is None:
            return None, None
        key, slot = found
        if slot is None and 2 * nbytes < key[3]:
            extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            span_nbytes = int(extent) * tensor.itemsize
            if 2 * span_nbytes < key[3]:
                begin = int(tensor.storage_offset()) * tensor.itemsize
                key = key[0], key[1], begin, span_nbytes, key[4]
                reference = self._live.get(key)
                slot = reference() if reference is not None else None
        return key, slot

    def swap_out(self, tensor: torch.Tensor, key: StorageKey, need: int) -> SlotHandle:
        """Start the copy-out. When nobody holds the handle any more, `collect` frees its slot.

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
        if self.is_accelerator:
            # Nothing where the block is this stream's own; a block of another stream must outlive what reads it here.
            self._device.record_use(tensor)
        copy_out = CopyOut(storage, nbytes, stream)
        # The store enters the copy-out itself: no interrupt can come between the copy's start and the source's hold.
        ticket = self._begin_copy(address, nbytes, stream, need, copy_out, self._enter)
        owner = address_keeper(version_owner(tensor))
        record = SwappedStorage(self, ticket, owner, key, nbytes, address % self._alignment, copy_out)
        slot = SlotHandle(record)
        reference = WeakSlotHandle(slot, self._dead.append)
        reference.record = copy_out.record = record
        self.unswapped.add(nbytes)
        self.resident.add(nbytes)
        self._live[key] = reference
        self.in_flight_bytes += nbytes
        return slot

    def drop(
        self, tensor: torch.Tensor, key: StorageKey, recipe: Recipe, ran: Callable[[int, float], None]
    ) -> SlotHandle:
        """Copy nothing: backward has the recipe make the bytes again. `ran` is told the bytes and seconds each time."""
        record = RecomputedStorage(self, key, recipe, tensor, ran)
        slot = SlotHandle(record)
        reference = WeakSlotHandle(slot, self._dead.append)
        reference.record = record
        self.unswapped.add(record.nbytes)
        self.dropped.add(record.nbytes)
        self._dropped.append(record)
        self._live[key] = reference
        return slot

    def look_for_dropped(self) -> None:
        """Bring `dropped` up to date."""
        for record in list(self._dropped):
            if record.is_gone():
                _discard(self._dropped, record)

    def limit_in_flight(self) -> None:
        """Wait until the sources that are still held for their copy are few enough."""
        while len(self._copies_out) > 1 and self.in_flight_bytes > self.in_flight_bytes_max:
            self._await_oldest()

    def collect(self) -> None:
        """Free what graphs held that are gone, and every source and target that no copy touches any more.

        Waits for nothing.
        """
        if self._dead:
            self._reap()
        while self._dropped and (dropped := _oldest(self._dropped)) is not None and dropped.is_gone():
            _discard(self._dropped, dropped)  # in the order of the step, which is mostly that in which they go
        if not self._copies_out and not self._retired:
            return
        while self._copies_out and (copy_out := _oldest(self._copies_out)) is not None and copy_out.ticket.out_done():
            self._release_source(copy_out)
        while self._retired and (entry := _oldest(self._retired)) is not None and entry[0].in_done():
            _discard(self._retired, entry)

    def _await_oldest(self) -> None:
        copy_out = _oldest(self._copies_out)
        if copy_out is not None:
            self.finish_copy_out(copy_out)

    def finish_copy_out(self, copy_out: CopyOut) -> None:
        """Wait until its copy has ended, and let go of the source."""
        copy_out.ticket.wait_out(copy_out.stream)
        self._release_source(copy_out)

    def _release_source(self, copy_out: CopyOut) -> None:
        if not _discard(self._copies_out, copy_out):
            return  # another thread was faster
        # An interrupt in swap_out may leave a copy-out uncounted: an empty queue says zero whatever was added up.
        self.in_flight_bytes = self.in_flight_bytes - copy_out.nbytes if self._copies_out else 0
        state = copy_out.ticket.state
        failed = state == "failed"
        if failed:
            self.failed += 1
            self.failure = copy_out.ticket.failure
            if self.failed == 1:
                log.warning("a tensor stays on the device, and others may: %s", self.failure)
        record, copy_out.record = copy_out.record, None
        if record is not None and (failed or state == "cancelled"):
            return  # the source stays, as if it had not been swapped
        if record is not None:
            record.copied_out()
        copy_out.source = None

    def retire(self, ticket: _core.Ticket, storage: torch.UntypedStorage) -> None:
        """Hold a target that nobody wants any more until the copy into it has ended."""
        if self.is_accelerator or self._alignment == 1:
            self._retired.append((ticket, storage))

    def _reap(self) -> None:
        with self._reaping:
            while (reference := _oldest(self._dead)) is not None:
                record = getattr(reference, "record", None)  # none yet where an interrupt came at once
                if record is not None:
                    if self._live.get(record.key) is reference:
                        del self._live[record.key]
                    record.free()
                _discard(self._dead, reference)  # last: an interrupt before this has it all repeated

    def drain(self) -> None:
        """Wait until every copy that this engine has begun has ended, and let go of what they held."""
        self._reap()
        while self._copies_out:
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
