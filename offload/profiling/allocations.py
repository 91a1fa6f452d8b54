"""Bytes that torch allocates in each node of a recorded step, without those of saved tensors, and in a recipe's run.

Used only during recorded and trial steps. Torch's profiler reports every allocation on the device, which may be the
CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from offload.devices.allocator import release_free_memory
from offload.plan.trace import SavedTensor
from offload.torch_compat.allocation_profile import APART, MARK_PREFIX, AllocationEvents, AllocationProfile
from offload.torch_compat.autograd import backward_caller, is_script_tracing
from offload.torch_compat.backward_pass import OUTSIDE, current_backward

log = logging.getLogger("offload")

_NODE = f"{MARK_PREFIX}node "
_SAVED = f"{MARK_PREFIX}saved "
_RELOAD = f"{MARK_PREFIX}reload "
_MARKS = ((_NODE, "node"), (_SAVED, "saved"), (_RELOAD, "reload"), (APART, "apart"))
NO_NODE = 2**31  # larger than every node's number

Event = tuple[str, int, int]


@dataclass(frozen=True)
class Footprint:
    """Bytes allocated in each node beyond those at the start, and the nodes in which saved tensors were allocated."""

    others: list[int]  # for each node: the maximum, without saved tensors
    gradients: list[int]  # for each node: the part of `others` that is gradients allocated before the node began
    made_gradients: int  # those of all nodes
    produced: Mapping[int, int]  # storage's id → the node that allocated it; storages from before the step are missing


class StepAllocations:
    """Records every allocation on `device` during a step, with torch's profiler.

    Only the thread that starts it can stop it. It is not available while another profiler runs in this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.complete = False
        self._device = device
        self._profile = AllocationProfile(device)
        self._backward = current_backward()
        self._other_threads = False
        self._events: Iterable[Event] = ()

    def begin(self) -> None:
        """Start recording the allocations of this thread, and those of backward passes that it starts.

        On an accelerator backward runs in a thread of autograd's own, where allocations are reported inside a span
        only. A span is begun there now, because backward allocates memory before it unpacks the first tensor.
        """
        call = None if self._device.type == "cpu" else backward_caller(self._device)  # allocates before the recording
        if not self._profile.start():
            log.info(
                "another profiler is running or scheduled, or this step runs inside a backward pass: the bytes of "
                "temporaries stay unknown to the plan"
            )
        elif call is not None:
            call(partial(self.node, 0))

    def node(self, number: int) -> None:
        """Record that a node begins."""
        if self._profile.is_on:
            self._other_threads |= not self._profile.records_this_thread
            self._profile.begin_span(f"{_NODE}{number}")

    def pause(self) -> None:
        """Record that a backward pass is over.

        What is allocated from here to the next node, if one follows, belongs to the last node of this pass.
        """
        if self._profile.is_on and self._profile.records_this_thread:
            self._profile.begin_span(f"{_NODE}{NO_NODE}")

    def saved(self, tensor_id: int) -> None:
        """Record that a storage was saved, which is still allocated."""
        if self._profile.is_on:
            self._profile.mark(f"{_SAVED}{tensor_id}")

    def reload(self, *, begins: bool) -> None:
        """Record that the engine starts or ends loading a saved tensor, to which allocations in between belong."""
        if self._profile.is_on:
            self._profile.mark(f"{_RELOAD}{int(begins)}")

    def stop(self) -> bool:
        """Stop recording. Return False if this thread cannot do it now.

        Only the thread that started it can, as long as it runs; and not inside a backward pass (an optimizer may step
        there): when the running node ends, torch would turn the profiler on again. Nor while torch.jit.trace records
        every operator: it would refuse the one that ends a span.
        """
        if not self._profile.is_on:
            self._profile.release()
            return True
        if current_backward() not in (self._backward, OUTSIDE) or is_script_tracing():
            return False
        if self._profile.is_of_another_thread and self._profile.thread_is_alive:
            return False
        if self._device.type == "cpu":
            release_free_memory()  # that of the step: `stop` makes torch allocate 700 bytes for each event
        found = self._profile.stop()
        if found is None:
            log.info(
                "another profiler was started, or a thread has ended: the bytes of temporaries stay unknown to the plan"
            )
            return True
        self._events = _NumberedEvents(found)
        self.complete = not self._other_threads
        return True

    def footprint(
        self,
        saved: Sequence[SavedTensor],
        places: Mapping[int, int],
        gradient_places: Set[int],
        node_count: int,
    ) -> Footprint:
        """Return the bytes by node that do not belong to `saved`: see the function `footprint`."""
        return footprint(self._events, saved, places, gradient_places, node_count)


def footprint(
    events: Iterable[Event],
    saved: Sequence[SavedTensor],
    places: Mapping[int, int],
    gradient_places: Set[int],
    node_count: int,
) -> Footprint:
    """Return the bytes of each node that do not belong to the tensors `saved`.

    `places` has the addresses of saved storages by id, also of others than `saved`. Memory that the engine allocates
    for reloaded tensors is not counted: the trace counts it with these tensors. Nor is memory that outlives a part that
    `apart` marks: it is counted with the optimizer's state. Gradients are the allocations at `gradient_places` that
    still exist at the end. What is allocated between the end of a backward pass and a later node belongs to the last
    node of this backward pass, without what optimizers allocate: the forward may compute a gradient, and the nodes with
    which another backward pass begins may unpack nothing, as in a double backward.

    Parameters
    ----------
    events
        In order of time: ("node", number, 0), ("saved", tensor's id, 0), ("reload" or "apart", 1 or 0, 0), and
        ("alloc" or "free", address, bytes). They are iterated twice.
    """
    wanted = {tensor.id: tensor for tensor in saved}
    produced: dict[int, int] = {}
    apart: dict[int, int] | None = None  # within a part that `apart` marks: address → number of the allocating event
    outliving: set[int] = set()  # of the allocations of such parts: the numbers of those that outlive them
    owned: dict[int, int] = {}  # number of the allocating event → its bytes that belong to saved tensors
    live: dict[int, tuple[int, int, int]] = {}  # address → (number of the event, node, bytes)
    node = 0
    for number, (kind, which, nbytes) in enumerate(events):
        if kind == "node":
            node = which if which != NO_NODE else node
        elif kind == "saved" and which in places:
            found = live.get(places[which])
            if found is not None and which not in produced:
                owned[found[0]] = owned.get(found[0], 0) + (wanted[which].bytes if which in wanted else 0)
                produced[which] = found[1]
        elif kind == "apart":
            outliving.update((apart or {}).values())
            apart = {} if which else None
        elif kind == "alloc":
            live[which] = (number, node, nbytes)
            if apart is not None:
                apart[which] = number
        elif kind == "free":
            live.pop(which, None)
            if apart is not None:
                apart.pop(which, None)
    gradients = [0] * (node_count + 1)
    for place in gradient_places & live.keys():
        _, node, nbytes = live[place]
        gradients[min(node + 1, node_count)] += nbytes
    *before, made = accumulate(gradients)
    others = _others(events, owned, outliving, node_count)
    return Footprint(others, before, made, produced)


def _others(events: Iterable[Event], owned: Mapping[int, int], uncounted: Set[int], node_count: int) -> list[int]:
    highest = [0] * node_count
    charged: dict[int, int] = {}  # address → bytes of the allocation that are counted until it is freed
    node, now, reloading, is_apart = 0, 0, False, False
    latest, paused = 0, 0  # the last node before a pause, and the most bytes since the pause began
    for number, (kind, which, nbytes) in enumerate(events):
        if kind == "node":
            if which == NO_NODE:
                latest, paused = (latest, paused) if node == NO_NODE else (node, now)
            elif node == NO_NODE:
                highest[latest] = max(highest[latest], paused)
            node = which
        elif kind == "apart":
            is_apart = bool(which)
        elif kind == "reload":
            reloading = bool(which)
        elif kind == "alloc":
            charged[which] = 0 if reloading or number in uncounted else max(nbytes - owned.get(number, 0), 0)
            now += charged[which]
        elif kind == "free":
            now -= charged.pop(which, 0)
        paused = paused if is_apart else max(paused, now)
        if node < node_count:
            highest[node] = max(highest[node], now)
    return highest


class AllocatedPeak:
    """A context that finds the peak of the bytes that torch allocates in this thread inside it and has not freed again.

    Attributes
    ----------
    nbytes
        The peak, in bytes, after the context has ended. None if another profiler was running in this process, or
        another step was being recorded. Too small if torch's allocator does not report to its profiler.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes: int | None = None
        self._profile = AllocationProfile(device)

    def __enter__(self) -> AllocatedPeak:
        try:
            if self._profile.start():
                self._profile.begin_span(f"{MARK_PREFIX}run")
        except BaseException:  # an interrupt: `__exit__` will not be called
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the recording. May be called again, because an interrupt may stop a call."""
        events = self._profile.stop() if self._profile.is_on else None
        if events is not None:
            self.nbytes = _highest(events)


def _highest(events: Iterable[tuple[str, int | str, int]]) -> int:
    own: dict[int | str, int] = {}  # address → bytes
    now = highest = 0
    for kind, which, nbytes in events:
        if kind == "alloc":
            now += nbytes - own.get(which, 0)  # another thread may have freed an earlier block at this address
            own[which] = nbytes
            highest = max(highest, now)
        elif kind == "free":
            now -= own.pop(which, 0)
    return highest


class _NumberedEvents:
    """The events of a recording, with the kinds and numbers of their marks. They are converted at each iteration."""

    def __init__(self, events: AllocationEvents) -> None:
        self._events = events

    def __iter__(self) -> Iterator[Event]:
        for kind, which, nbytes in self._events:
            event = (kind, which, nbytes) if isinstance(which, int) else _numbered(which)
            if event is not None:
                yield event


def _numbered(text: str) -> Event | None:
    """Return the event of a mark; None for a mark of the program's own."""
    for prefix, kind in _MARKS:
        number = text.removeprefix(prefix)
        if number != text and number.isdecimal():
            return kind, int(number), 0
    return None
