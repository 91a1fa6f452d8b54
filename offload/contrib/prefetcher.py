"""Copies the next batch to the device while the step on the current batch computes.

`Prefetcher` does not use the engine, which swaps only saved tensors.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from offload.devices.device import default, is_known
from offload.diagnostics.report import LATE_SECONDS, Feed
from offload.handle import Session
from offload.session import watch

log = logging.getLogger("offload")

Batch = TypeVar("Batch")


class Prefetcher(Generic[Batch]):
    """Yields a loader's batches on the device; each is copied while the previous step computes.

    On an accelerator, before a batch is returned, the next one is read from the loader, staged in pinned memory, and
    its copy is queued on a separate stream. On the CPU batches are returned unchanged, and only the time of the loader
    is measured. No thread is started; use `num_workers` of the DataLoader if loading itself is slow.

    Parameters
    ----------
    loader
        Any iterable of batches: tensors, or tuples, lists and dictionaries of them. Other values are returned
        unchanged; objects with a method ``to``, such as a BatchEncoding, are moved with it, without overlap.
    device
        Target device. Default: the handle's device, else the current CUDA device, else the CPU.
    handle
        The handle that `offload.enable` returned. Its report then says how long steps waited for data.

    Notes
    -----
    *Ordering*: a batch may be used on the stream that is current when it is returned. On CUDA the loader is one batch
    ahead. So a loader that uses torch's generator draws its random numbers one batch earlier than without a Prefetcher.

    An exception in the loader is raised when its batch is requested.

    Examples
    --------
    >>> import torch, offload
    >>> batches = offload.contrib.Prefetcher(torch.ones(5, 3).split(2), device="cpu")
    >>> [len(batch) for batch in batches]
    [2, 2, 1]
    >>> batches.feed.batches
    3
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        device: torch.device | str | None = None,
        *,
        handle: Session | None = None,
    ) -> None:
        if not isinstance(loader, Iterable):
            raise ValueError(f"Prefetcher takes an iterable of batches, such as a DataLoader, not {loader!r}")
        if isinstance(loader, Prefetcher):
            raise ValueError("the loader is a Prefetcher already; give it the DataLoader itself")
        if device is None:
            device = handle.device if handle is not None else default()
        self.loader = loader
        self.device = torch.device(device)
        if not is_known(self.device):
            raise ValueError(
                f"Prefetcher supports cpu and cuda devices, not {self.device}; move batches there yourself"
            )
        self.feed = Feed()
        if handle is not None:
            watch(handle, self.feed)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        before = self.feed.batches
        for batch in self._through() if self.device.type == "cpu" else self._ahead():
            self._count(batch)
            yield batch
        if self.feed.batches == before:
            self.feed.passes_without_batches += 1
            log.warning("%s", next(self.feed.notes()))

    def _through(self) -> Iterator[Batch]:
        source = iter(self.loader)
        while True:
            started = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._count_wait(time.perf_counter() - started)
            yield batch

    def _ahead(self) -> Iterator[Batch]:
        conveyor = Conveyor(self.device, self.feed)
        source = iter(self.loader)
        try:
            receive: Callable[[], Batch] | None = self._ask(source, conveyor)
            while receive is not None:
                batch = receive()
                receive = self._ask(source, conveyor)
                yield batch
                del batch
        finally:
            receive = None  # of an error whose traceback refers to this frame: the cycle would keep the loop's tensors
            conveyor.close()

    def _ask(self, source: Iterator[Batch], conveyor: Conveyor) -> Callable[[], Batch] | None:
        """Return a function that returns the next batch or raises the loader's exception; None at the end."""
        started = time.perf_counter()
        try:
            batch = next(source)
        except StopIteration:
            return None
        except Exception as error:

            def fail(pending: list[Exception]) -> NoReturn:
                raise pending.pop()  # held by nothing else then: its traceback refers to the frames of the loop

            return partial(fail, [error])
        finally:
            self._count_wait(time.perf_counter() - started)
        return partial(conveyor.receive, conveyor.send(batch))

    def _count_wait(self, seconds: float) -> None:
        self.feed.host_wait_seconds += seconds
        self.feed.late_batches += seconds >= LATE_SECONDS

    def _count(self, batch: Batch) -> None:
        self.feed.batches += 1
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if tensors and all(tensor.shape[0] == 0 for tensor in tensors):
            self.feed.empty_batches += 1
            if self.feed.empty_batches == 1:
                log.warning("%s", next(self.feed.notes()))


class Parcel:
    """A batch whose copy is in flight: its tensors on the device, and the event that completes when the copy ends."""

    def __init__(self, batch: Any, stream: torch.Stream, arrived: torch.Event) -> None:
        self.batch = batch
        self.stream = stream  # the compute stream on which the tensors were allocated
        self.arrived = arrived


class Conveyor:
    """Copies batches to one accelerator on a separate stream.

    Targets are allocated on the compute stream, which waits for a copy before it uses *or frees* the target. A copy
    waits for the work that was queued on the compute stream when its target was allocated, because that work may still
    read the memory.
    """

    def __init__(self, device: torch.device, feed: Feed) -> None:
        self._torch = torch.get_device_module(device)
        index = self._torch.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._feed = feed
        self._stream = self._torch.Stream(self._device)
        self._on_the_way: Parcel | None = None
        self._measured: deque[tuple[torch.Event, torch.Event]] = deque()

    def send(self, batch: Any) -> Parcel:
        """Queue the copy of a batch."""
        compute = self._torch.current_stream(self._device)
        # Uses torch's cache of pinned memory, not the engine's slabs. The cache keeps a block until the copy that reads
        # it has ended. Its rounding to powers of two wastes little memory here, because batches have one size.
        staged = tree_map(self._stage, batch)
        targets = tree_map(self._target, staged)
        self._stream.wait_stream(compute)
        with self._torch.stream(self._stream):
            arrived = self._torch.Event(enable_timing=True)
            try:
                tree_map(self._copy, targets, staged)
            finally:  # also if a copy could not be queued: the copies before it are in flight
                arrived.record(self._stream)
                self._on_the_way = Parcel(targets, compute, arrived)
        return self._on_the_way

    def receive(self, parcel: Parcel) -> Any:
        """Return the batch, ready for the current stream."""
        compute = self._torch.current_stream(self._device)
        asked = self._torch.Event(enable_timing=True)
        asked.record(compute)
        compute.wait_event(parcel.arrived)
        if compute != parcel.stream:
            parcel.stream.wait_event(parcel.arrived)
            for leaf in tree_leaves(parcel.batch):
                if isinstance(leaf, Tensor) and leaf.device == self._device:
                    leaf.record_stream(compute)
        self._measured.append((asked, parcel.arrived))
        self._measure()
        self._on_the_way = None
        return parcel.batch

    def close(self) -> None:
        """Make the compute stream wait for a batch that was not received, so that no copy writes to freed memory."""
        if self._on_the_way is not None:
            self._on_the_way.stream.wait_event(self._on_the_way.arrived)
            self._on_the_way = None
        for asked, arrived in self._measured:
            asked.synchronize()
            arrived.synchronize()
        self._measure()

    def _measure(self) -> None:
        while self._measured and all(event.query() for event in self._measured[0]):
            asked, arrived = self._measured.popleft()
            seconds = asked.elapsed_time(arrived) / 1e3
            if seconds > 0:
                self._feed.device_wait_seconds += seconds
                self._feed.late_batches += seconds >= LATE_SECONDS

    def _stage(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            is_plain = leaf.device.type == "cpu" and leaf.layout is torch.strided
            return leaf.pin_memory() if is_plain and leaf.numel() and not leaf.is_pinned() else leaf
        return leaf.to(self._device) if hasattr(leaf, "to") else leaf

    def _target(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device == self._device:
            return leaf
        if leaf.layout is not torch.strided:
            return leaf.to(self._device)
        self._feed.copied_bytes += leaf.nbytes
        return torch.empty_like(leaf, device=self._device)

    def _copy(self, target: Any, source: Any) -> Any:
        if isinstance(target, Tensor) and target is not source and source.layout is torch.strided:
            target.copy_(source, non_blocking=True)
        return target
