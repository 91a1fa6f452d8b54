"""Tensors ↔ bytes: which storage a saved tensor is of, where its bytes are, and which copies are under way.

On the data path: hooks hand a saved tensor in, the engine finds its storage, has the swap store copy the bytes out,
holds the source until the copy has ended, and later puts the same bytes back under the same size, stride and offset.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from offload import _core
from offload.devices.device import device_of
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
