"""Tensors ↔ bytes: which storage a saved tensor is of, where its bytes are, and which copies are under way.

Hooks hand a saved tensor in, the engine finds its storage, has the swap store copy the bytes out,
holds the source until the copy has ended, and later puts the same bytes back under the same size, stride and offset.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from offload import _core
from offload.devices.device import device_of
from offload.recomputation.recipe import Recipe
from offload.runtime.recomputed_storage import DroppedHandle, RecomputedStorage, StorageKey, WeakDroppedHandle
from offload.torch_compat.tensors import StorageWatch, storage_identity

log = logging.getLogger("offload")

LANE_NICENESS = 0

# What a store adds up over its life; its other figures are those of the moment.
_SUMS = frozenset(
    f"{direction}_{figure}" for direction in ("out", "in") for figure in ("bytes", "copies", "transfers", "seconds")
) | {"stall_seconds", "spilled_bytes", "spill_written_bytes", "spill_read_bytes", "cancelled", "failed"}


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one, with one storage of its own or shared with others of its kind."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    )


def _discard(queue: deque[Any], entry: object) -> None:
    """Remove an entry, unless it is gone: a signal handler in the same thread may have been faster."""
    with contextlib.suppress(ValueError):
        queue.remove(entry)


def _new_storage(device: torch.device, nbytes: int, _: int) -> torch.UntypedStorage:
    # Not torch.empty: that fills its memory where algorithms shall be deterministic.
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


class Engine(_core.EngineCore):
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
        self._device = device_of(device)
        self.is_accelerator = self._device.is_accelerator
        self.resident = _core.Gauge()  # of swapped storages: what is on the device
        self.unswapped = _core.Gauge()  # the same storages, had they stayed
        self.dropped = _core.Gauge()  # of tensors to be recomputed: what forward still holds, as far as it is known
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
        self._stats_before = store.stats()
        self._dropped: deque[RecomputedStorage] = deque()  # whose tensor is still there
        self._dropped_handles: dict[StorageKey, WeakDroppedHandle] = {}
        self._dead: deque[WeakDroppedHandle] = deque()  # whose graph is gone, and whose record is still to be freed
        self._collecting = threading.RLock()  # a signal handler in the same thread may collect as well

    def current_stream(self) -> int:
        """Handle of the compute stream that the calling thread uses now; 0 on the CPU."""
        return self._device.current_stream() if self.is_accelerator else 0

    def drop(
        self, tensor: torch.Tensor, key: StorageKey, recipe: Recipe, ran: Callable[[int, float], None]
    ) -> DroppedHandle:
        """Copy nothing: backward has the recipe make the bytes again. `ran` is told the bytes and seconds each time."""
        record = RecomputedStorage(self, key, recipe, tensor, ran)
        handle = DroppedHandle(record)
        reference = WeakDroppedHandle(handle, self._dead.append)
        reference.record = record
        self._dropped.append(record)
        self._dropped_handles[key] = reference
        return handle

    def dropped_before(self, key: StorageKey) -> DroppedHandle | None:
        """What is to be recomputed, where a storage has been dropped already."""
        reference = self._dropped_handles.get(key)
        return reference() if reference is not None else None

    def collect(self) -> None:
        """Free what no copy touches any more, and what dead graphs held. Waits for nothing."""
        super().collect()
        if self._dead or self._dropped:
            self.collect_dropped()

    def drain(self) -> None:
        """Wait until every copy has ended, and free what they and dead graphs held."""
        self.collect_dropped()
        super().drain()

    def collect_dropped(self) -> None:
        """Free what dead graphs held of dropped tensors, and bring `dropped` up to date."""
        with self._collecting:
            while self._dead:  # a recipe that is freed may have held the last handle of another dropped storage
                reference = self._dead[0]
                record = getattr(reference, "record", None)  # none yet where an interrupt came at once
                if record is not None:
                    if self._dropped_handles.get(record.key) is reference:
                        del self._dropped_handles[record.key]
                    record.free()
                _discard(self._dead, reference)  # last: after an interrupt before it, all of this is repeated
            for record in list(self._dropped):
                if record.is_gone():
                    _discard(self._dropped, record)

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

    def store_stats(self) -> dict[str, float]:
        """The store's figures; those that add up count from this engine's beginning, as other sessions may share it."""
        now: dict[str, float] = self.store.stats()
        return {name: value - self._stats_before[name] if name in _SUMS else value for name, value in now.items()}
