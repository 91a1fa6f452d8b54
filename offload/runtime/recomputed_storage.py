"""One dropped storage: its bytes are freed in forward, and a recipe recomputes them when backward needs them.

Graph nodes and views use a `RecomputedStorage` in the same way as a `SwappedStorage`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from offload._core import Gauge, GaugeShare, version_owner
from offload.recomputation.recipe import ChangedSource, Recipe
from offload.recomputation.values import copy_of
from offload.torch_compat.tensors import StorageWatch, raise_changed, weak_reference

__all__ = ["Memory", "RecomputedStorage", "StorageKey"]

# Identity of the tensor that owns the version counter, its version, first byte, bytes, identity of the storage.
StorageKey = tuple[int, int, int, int, int]


class Memory(Protocol):
    """The part of the engine's interface that a recomputed storage uses: the device and its gauges."""

    device: torch.device
    resident: Gauge
    unswapped: Gauge
    dropped: Gauge

    def current_stream(self) -> int:
        """Return the handle of the compute stream that the calling thread uses now."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""


class RecomputedStorage:
    """The bytes of one storage at one version, which a recipe recomputes.

    Only graph nodes and recipes hold it. When the last of them is freed, so are its memory and the tensors that only
    its recipe holds: at once, without Python code, because Python drops an exception that a signal handler raises in a
    finalizer.
    """

    __slots__ = (
        "__weakref__",
        "_dropped",
        "_engine",
        "_is_settled",
        "_lock",
        "_owner",
        "_ran",
        "_recipe",
        "_resident",
        "_source",
        "_storage",
        "_stream",
        "_unswapped",
        "_views_left",
        "key",
        "nbytes",
        "views",
    )

    def __init__(
        self, engine: Memory, key: StorageKey, recipe: Recipe, tensor: torch.Tensor, ran: Callable[[int, float], None]
    ) -> None:
        self.key = key
        self.nbytes = key[3]
        self.views = 0
        self._views_left = 0
        self._engine = engine
        self._recipe = recipe
        self._ran = ran
        self._lock = threading.RLock()
        self._owner = weak_reference(version_owner(tensor))  # keeps the owner's address from being used again
        self._source: StorageWatch | None = StorageWatch(tensor.untyped_storage())
        self._storage: torch.UntypedStorage | None = None
        self._is_settled = False
        self._stream = 0
        # The shares of this storage in the engine's gauges; each ends when it is freed.
        self._unswapped = engine.unswapped.share(self.nbytes)
        self._dropped = engine.dropped.share(self.nbytes)
        self._resident: GaugeShare | None = None  # set while `_storage` is
        for slot, _ in recipe.slots.values():
            slot.add_view()

    is_swapped_out = False
    ticket = None

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the device without elements."""
        return torch.empty(0, dtype=dtype, device=self._engine.device)

    def add_view(self) -> None:
        """Count one more view of the storage."""
        self.views += 1
        self._views_left += 1

    def remove_view(self) -> None:
        """Count one view less; the bytes are freed if no remaining view has been served since they were computed."""
        with self._lock:
            self.views -= 1
            self._views_left = min(self._views_left, self.views)
            if self._views_left == self.views and self._storage is not None:
                self._drop_storage()

    def prefetch(self) -> bool:
        """Return False: there is no copy to start."""
        return False

    def wait_copied_out(self) -> None:
        """Do nothing: there is no copy to wait for."""

    def is_gone(self) -> bool:
        """Return whether the dropped tensor has been freed. The first True subtracts it from `Engine.dropped`."""
        source = self._source
        if source is not None and source.expired():
            self._dropped.close()
            self._source = None
        return self._source is None

    def swap_in(self) -> tuple[torch.UntypedStorage, int]:
        """Return the bytes on the device and the offset 0. Each call serves one view.

        The bytes are recomputed now, or have been recomputed for an earlier view.

        Raises
        ------
        RuntimeError
            A tensor that the recipe reads was changed in place.
        OSError
            A tensor that the recipe reads could not be read back; a later call tries again.
        """
        with self._lock:
            storage = self._present()
            self._views_left -= 1
            if self._views_left <= 0:
                self._views_left = self.views  # a second backward over a retained graph may ask again
                self._drop_storage()
            return storage, 0

    def settle(self, state: frozenset[int]) -> None:
        """Recompute the bytes now and keep them, if the recipe reads parameters that are about to be changed.

        Torch allows this change if backward does not need the parameters any more: autograd no longer checks them.

        Parameters
        ----------
        state
            Identities of the storages of these parameters.

        Raises
        ------
        OSError
            A tensor that the recipe reads could not be read back.
        """
        with self._lock:
            if self._is_settled or not self._recipe.reads_state(state):
                return
            if any(source.is_changed for source in self._recipe.changeable):
                return  # too late: backward will raise the error
            self._present()
            self._is_settled = True

    def _present(self) -> torch.UntypedStorage:
        """Return the bytes for the current stream; recompute them if they are not there."""
        stream = self._engine.current_stream()
        if self._storage is not None and self._stream != stream and not self._is_settled:
            self._drop_storage()  # the memory was allocated on another stream
        if self._storage is None:
            self._storage, self._stream = self._made(), stream
            self._resident = self._engine.resident.share(self.nbytes)
        elif self._stream != stream:
            self._engine.synchronize()
            copied = copy_of(self._storage)
            self._engine.synchronize()  # the copy on this stream must not read memory that is freed on the other one
            return copied
        return self._storage

    def _missing_below(self) -> list[RecomputedStorage]:
        """Return the storages to be recomputed first, in this order: sources of the recipe, their sources, and so on.

        A recursion would exceed Python's limit in a long chain of dropped tensors.
        """
        found: dict[RecomputedStorage, None] = {}
        pending: list[tuple[RecomputedStorage, bool]] = [(self, False)]
        while pending:
            record, is_after_its_sources = pending.pop()
            if is_after_its_sources:
                found[record] = None
            elif record not in found:
                pending.append((record, True))
                below = [slot for slot, _ in record._recipe.slots.values()]
                missing = [each for each in below if isinstance(each, RecomputedStorage) and each._storage is None]
                pending += [(each, False) for each in reversed(missing)]
        del found[self]
        return list(found)

    def _made(self) -> torch.UntypedStorage:
        for record in self._missing_below():
            with record._lock:
                record._present()
        try:
            storages = self._recipe.load()
        except ChangedSource as changed:
            raise_changed(changed.kind, changed.shape, changed.found, changed.expected)
        begin = time.thread_time()
        storage = self._recipe.run(storages)
        self._ran(self.nbytes, time.thread_time() - begin)
        return storage

    def _drop_storage(self) -> None:
        if not self._is_settled:
            self._storage = self._resident = None
