"""The engine of one device: the storages of saved tensors, where their bytes are, and the copies in flight.

Hooks pass a saved tensor to the engine. It finds the tensor's storage and lets the swap store copy the bytes out. It
keeps the source until the copy has ended, and later restores the tensor with the same bytes, size, stride and offset.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from offload import _core
from offload.devices.device import device_of
from offload.recomputation.recipe import Recipe
from offload.runtime.recomputed_storage import RecomputedStorage, StorageKey
from offload.torch_compat.tensors import StorageWatch, has_own_bytes, storage_identity

log = logging.getLogger("offload")

# If a copy-out raises one of these, the store has not taken the bytes, and the tensor stays in memory. PoolExhausted is
# a MemoryError. Other OSErrors are not among them: a signal handler may raise TimeoutError, which the program expects.
REFUSALS = (MemoryError, _core.SpillError, _core.PinningFailed)

LANE_NICENESS = 0  # of the threads that copy, relative to the process

# Statistics of a store that are totals since its creation; the others are current values.
_SUMS = frozenset(
    f"{direction}_{figure}" for direction in ("out", "in") for figure in ("bytes", "copies", "transfers", "seconds")
) | {"stall_seconds", "spilled_bytes", "spill_written_bytes", "spill_read_bytes", "cancelled", "failed"}


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain strided one, so that it has a storage (perhaps shared with other tensors)."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_plain and has_own_bytes(tensor)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """Return the bytes of the storages of plain tensors, by the storage's identity."""
    plain = [tensor for tensor in tensors if tensor is not None and has_storage(tensor)]
    return {storage_identity(storage): storage.nbytes() for storage in (each.untyped_storage() for each in plain)}


def bytes_taken(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes that plain tensors take of each storage, at most all of it, by the storage's identity."""
    known: dict[int, int] = {}
    for tensor in tensors:
        if has_storage(tensor):
            storage = tensor.untyped_storage()
            identity = storage_identity(storage)
            known[identity] = min(known.get(identity, 0) + tensor.nbytes, storage.nbytes())
    return known


def _discard(queue: deque[Any], entry: object) -> None:
    """Remove an entry if it is still there: a signal handler in the same thread may have removed it."""
    with contextlib.suppress(ValueError):
        queue.remove(entry)


def _new_storage(device: torch.device, nbytes: int, _: int) -> torch.UntypedStorage:
    # Not torch.empty: it fills the memory if torch.use_deterministic_algorithms is on.
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


class _DroppedReference(weakref.ref[RecomputedStorage]):
    """A weak reference to a dropped storage that keeps its key after the storage is freed."""

    __slots__ = ("key",)
    key: StorageKey


class Engine(_core.EngineCore):
    """Swaps the storages of one device's tensors with a swap store.

    Parameters
    ----------
    store
        The store that copies the bytes.
    device
        ``cpu`` or one accelerator.
    in_flight_bytes_max
        Limit on the bytes of sources whose copy-out has not ended. Beyond it, `limit_in_flight` waits for the oldest
        copy-outs, but never for the newest one. On an accelerator the compute stream waits, on the CPU the thread.

    Attributes
    ----------
    spill_dir
        Folder of the store's spill file; empty if there is none.
    """

    def __init__(self, store: _core.SwapStore, device: torch.device, in_flight_bytes_max: int | None = None) -> None:
        self._device = device_of(device)
        self.is_accelerator = self._device.is_accelerator
        self.resident = _core.Gauge()  # bytes of swapped storages that are on the device
        self.unswapped = _core.Gauge()  # bytes that the same storages would have on the device without swapping
        self.dropped = _core.Gauge()  # bytes of dropped tensors that forward still holds, as of the last `collect`
        there = self._device if self.is_accelerator else None
        super().__init__(
            store,
            device,
            self.resident,
            self.unswapped,
            in_flight_bytes_max or self._device.in_flight_bytes_max,
            current_stream=there.current_stream if there is not None else None,
            record_use=there.record_use if there is not None else None,
            new_storage=partial(_new_storage, device) if there is not None else None,
            warn=log.warning,
        )
        self.store = store
        self.device = device
        self.spill_dir = ""
        self._stats_before = store.stats()
        self._dropped: dict[StorageKey, _DroppedReference] = {}
        self._dead: deque[_DroppedReference] = deque()  # of freed graphs; still to be removed from `_dropped`
        self._held: deque[_DroppedReference] = deque()  # dropped tensors that forward still holds
        self._collecting = threading.RLock()  # a signal handler in the same thread may collect as well

    def current_stream(self) -> int:
        """Return the handle of the compute stream that the calling thread uses now; 0 on the CPU."""
        return self._device.current_stream() if self.is_accelerator else 0

    def drop(
        self, tensor: torch.Tensor, key: StorageKey, recipe: Recipe, ran: Callable[[int, float], None]
    ) -> RecomputedStorage:
        """Drop a storage. Backward recomputes it with `recipe`, then calls `ran` with bytes and CPU seconds."""
        dropped = RecomputedStorage(self, key, recipe, tensor, ran)
        reference = _DroppedReference(dropped, self._dead.append)
        reference.key = key
        self._held.append(reference)
        self._dropped[key] = reference
        return dropped

    def settle_dropped(self, changing: Iterable[torch.Tensor]) -> None:
        """Recompute dropped tensors now if their recipe reads a tensor about to be changed and their graph is alive.

        Raises
        ------
        OSError
            A tensor that a recipe reads could not be read back.
        """
        pending = [dropped for reference in list(self._dropped.values()) if (dropped := reference()) is not None]
        if pending:
            storages = frozenset(self.identity(tensor) for tensor in changing if has_storage(tensor))
            for dropped in pending:
                dropped.settle(storages)

    def dropped_before(self, key: StorageKey) -> RecomputedStorage | None:
        """Return a storage that was dropped before; None if it was not, or its graph is freed."""
        reference = self._dropped.get(key)
        return reference() if reference is not None else None

    def collect(self) -> None:
        """Free the sources of ended copies, and forget the dropped tensors of freed graphs, without waiting."""
        super().collect()
        if self._dead or self._held:
            self.collect_dropped()

    def drain(self) -> None:
        """Wait until no copy uses memory that this engine holds, and free it, except sources that backward has used."""
        self.collect_dropped()
        super().drain()

    def collect_dropped(self) -> None:
        """Forget the dropped tensors of freed graphs, and update `dropped`."""
        with self._collecting:
            while self._dead:
                reference = self._dead[0]
                key = getattr(reference, "key", None)  # None if an interrupt came before `drop` had set it
                if key is not None and self._dropped.get(key) is reference:
                    del self._dropped[key]
                _discard(self._dead, reference)  # last: if an interrupt comes earlier, this pass is repeated
            for reference in list(self._held):
                dropped = reference()
                if dropped is None or dropped.is_gone():
                    _discard(self._held, reference)

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        self._device.synchronize()

    @cached_property
    def _driver(self) -> _core.Driver:
        return self._device.driver()

    @cached_property
    def _events(self) -> _core.EventPool:
        return _core.EventPool(self._driver)

    def require_not_capturing(self) -> None:
        """Raise DriverError if work on the current stream is captured into a graph."""
        if self.is_accelerator:
            self._driver.require_not_capturing(self._device.current_stream())

    def start_clock(self) -> _core.NodeClock:
        """Return a clock that measures the step that begins now."""
        if not self.is_accelerator:
            return _core.HostClock()
        return _core.DeviceClock(self._events, self._device.current_stream())

    def mark(self) -> Any:
        """Return a point in time: of the clock on the CPU, of the current stream on an accelerator."""
        return self._device.mark() if self.is_accelerator else time.perf_counter()

    def seconds_since(self, first: Any, marks: Sequence[Any]) -> list[float] | None:
        """Return the seconds from one mark to others; None if the device has not reached all of them yet."""
        return self._device.seconds_since(first, marks)

    @staticmethod
    def watch_storage(tensor: torch.Tensor) -> StorageWatch:
        """Return a watch that shows when the tensor's storage has been freed."""
        return StorageWatch(tensor.untyped_storage())

    @staticmethod
    def address_of(tensor: torch.Tensor) -> int:
        """Return the address of the tensor's storage."""
        return tensor.untyped_storage().data_ptr()

    @staticmethod
    def identity(tensor: torch.Tensor) -> int:
        """Return a number that identifies the tensor's storage among all that are alive; views share it."""
        return storage_identity(tensor.untyped_storage())

    def store_stats(self) -> dict[str, float]:
        """Return the store's figures. Sums count from the creation of this engine: sessions may share the store."""
        now: dict[str, float] = self.store.stats()
        return {name: value - self._stats_before[name] if name in _SUMS else value for name, value in now.items()}
