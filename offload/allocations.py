"""What torch allocates while a step is recorded: the bytes that no saved tensor accounts for, node by node.

Beside the data path, during a recorded step only. On the CPU torch's own profiler tells every allocation; on a CUDA
device the caching allocator's statistics are read whenever a node begins.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler
from torch.autograd.profiler import profile, record_function

log = logging.getLogger("offload")

_MARK = "offload: node "
_SAVED = "offload: saved "
_LOG_ERRORS = 2


@dataclass(frozen=True)
class Footprint:
    """Bytes by node, over those that were there at the start."""

    others: list[int]  # most at any moment, of what no saved tensor accounts for
    gradients: list[int]  # of those: gradients that were there already when the node began


@dataclass
class SavedBytes:
    """One storage that the recorded step saved, as far as memory is concerned."""

    id: int
    place: int  # where its storage begins
    nbytes: int
    packed: int  # node that ended with its (last) pack
    last_forward: int  # node after which nobody but the engine held it
    first_use: int
    last_use: int
    produced: int = -1  # found by `footprint`: the node that allocated it, or `packed` where that was not seen


class HostAllocations:
    """Every allocation on the CPU, by torch's profiler.

    It belongs to the thread that starts it, and cannot be had while somebody else is profiling in this process.
    """

    _one: ClassVar[dict[str, HostAllocations]] = {}  # who profiles: torch crashes where two threads do at a time

    def __init__(self) -> None:
        self.complete = False
        self._thread = threading.current_thread()  # not its number, which another gets when it has ended
        self._has_strayed = False
        self._is_profiling = False
        self._quiet: _Quiet | None = None
        self._events: list[tuple[str, int, int]] = []

    def begin(self) -> None:
        """Watch what this thread allocates from here on."""
        is_free = not torch._C._autograd._profiler_enabled() and not _is_profiling_in_python()
        if not is_free or self._one.setdefault("now", self) is not self:
            log.info("another profiler is running: the bytes of temporaries stay unknown to the plan")
            return
        try:
            self._quiet = _Quiet()
            wanted = profile(use_cpu=True, profile_memory=True)
            config = wanted.config()  # type: ignore[no-untyped-call]
            torch._C._autograd._prepare_profiler(config, wanted.kineto_activities)
            # Marks, and no operators: a recurrent network runs 100,000 a step, each of which would take 1.5 KB.
            scopes = {RecordScope.USER_SCOPE}
            torch._C._autograd._enable_profiler(config, wanted.kineto_activities, scopes)  # type: ignore[call-arg]
            self._is_profiling = True
        except BaseException:
            if torch._C._autograd._profiler_enabled():  # an interrupt came when it had just begun
                torch._C._autograd._disable_profiler()
            self._let_go()
            raise

    def node(self, number: int) -> None:
        """A node begins."""
        if threading.current_thread() is not self._thread:
            self._has_strayed = True  # what is allocated there is not told here
        if self._is_profiling:
            with record_function(f"{_MARK}{number}"):
                pass

    def saved(self, tensor_id: int) -> None:
        """A storage was saved; it is alive."""
        if self._is_profiling:
            with record_function(f"{_SAVED}{tensor_id}"):
                pass

    def stop(self) -> bool:
        """End it. False where that has to wait for the thread that began it."""
        if not self._is_profiling:
            self._let_go()
            return True
        if threading.current_thread() is not self._thread:
            if self._thread.is_alive():
                return False
            self._let_go()  # torch's profile has gone with its thread: there is nothing to end or to read
            return True
        if _is_profiling_in_python() or not torch._C._autograd._profiler_enabled():
            log.info("another profiler was started: the bytes of temporaries stay unknown to the plan")
            self._let_go()  # it has taken this one's place, and to end this one would end it
            return True
        try:
            found = torch._C._autograd._disable_profiler()
        finally:
            self._let_go()
        self._events = list(_events(found.experimental_event_tree()))
        self.complete = not self._has_strayed
        return True

    def _let_go(self) -> None:
        self._is_profiling = False
        if self._one.get("now") is self:
            if self._quiet is not None:
                self._quiet.end()
            del self._one["now"]

    def footprint(self, saved: Sequence[SavedBytes], gradient_places: Set[int], node_count: int) -> Footprint:
        """What none of `saved` accounts for; finds their `produced`.

        What the engine brings back is no allocation of torch's, so that nothing of it is counted here. Gradients are
        what is alive at the end at one of `gradient_places`.
        """
        wanted = {tensor.id: tensor for tensor in saved}
        owned: dict[int, int] = {}  # number of the allocating event → bytes of it that saved tensors account for
        live: dict[int, tuple[int, int]] = {}  # address → (number of the event, node)
        node = 0
        for number, (kind, which, _) in enumerate(self._events):
            if kind == "node":
                node = which
            elif kind == "saved" and which in wanted:
                tensor = wanted[which]
                found = live.get(tensor.place)
                if found is not None and tensor.produced < 0:
                    owned[found[0]] = owned.get(found[0], 0) + tensor.nbytes
                    tensor.produced = found[1]
            elif kind == "alloc":
                live[which] = (number, node)
            elif kind == "free":
                live.pop(which, None)
        for tensor in saved:
            if tensor.produced < 0:
                tensor.produced = min(tensor.packed, tensor.last_forward)
        gradients = [0] * (node_count + 1)
        for place in gradient_places & live.keys():
            number, node = live[place]
            gradients[min(node + 1, node_count)] += self._events[number][2]
        return Footprint(self._others(owned, node_count), list(accumulate(gradients[:node_count])))

    def _others(self, owned: dict[int, int], node_count: int) -> list[int]:
        highest = [0] * node_count
        charged: dict[int, int] = {}  # address → bytes counted while it lives
        node, now = 0, 0
        for number, (kind, which, nbytes) in enumerate(self._events):
            if kind == "node":
                node = which
            elif kind == "alloc":
                charged[which] = max(nbytes - owned.get(number, 0), 0)
                now += charged[which]
            elif kind == "free":
                now -= charged.pop(which, 0)
            if node < node_count:
                highest[node] = max(highest[node], now)
        return highest


class DeviceAllocations:
    """The caching allocator's peak during each node, on one CUDA device. Resets its peak statistics."""

    def __init__(self, device: torch.device) -> None:
        self.complete = True
        self._device = device
        self._base_bytes = 0
        self._peaks: list[int] = []

    def begin(self) -> None:
        """Watch what is allocated from here on."""
        self._base_bytes = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def node(self, number: int) -> None:
        """A node begins."""
        while len(self._peaks) < number:
            self._peaks.append(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)

    def saved(self, tensor_id: int) -> None:
        """A storage was saved: its packing says when it is alive."""

    def stop(self) -> bool:
        """The last node ends."""
        self._peaks.append(torch.cuda.max_memory_allocated(self._device))
        return True

    def footprint(self, saved: Sequence[SavedBytes], gradient_places: Set[int], node_count: int) -> Footprint:
        """What none of `saved` accounts for. Which of it are gradients is not known.

        A storage counts as its own from its pack on; before that it is a temporary.
        """
        change = [0] * (node_count + 1)
        for tensor in saved:
            tensor.produced = min(tensor.packed, tensor.last_forward)
            for first, last in ((tensor.produced, tensor.last_forward), (tensor.first_use, tensor.last_use)):
                change[first] += tensor.nbytes
                change[last + 1] -= tensor.nbytes
        rows, own = [], 0
        for node in range(node_count):
            own += change[node]
            peak = self._peaks[min(node, len(self._peaks) - 1)]
            rows.append(max(peak - self._base_bytes - own, 0))
        return Footprint(rows, [0] * node_count)


def watch_allocations(device: torch.device) -> HostAllocations | DeviceAllocations:
    """What can watch the allocations on `device`; it is still to begin."""
    return HostAllocations() if device.type == "cpu" else DeviceAllocations(device)


def _is_profiling_in_python() -> bool:
    """Whether anybody but this module has a profiler on, in any thread, by torch's Python interface."""
    return bool(profiler._is_profiler_enabled)


def _events(tree: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """The marks, allocations and frees of a profile, in order of time: (kind, number or address, bytes)."""
    found: list[tuple[int, str, int, int]] = []
    pending = list(reversed(tree))
    while pending:
        event = pending.pop()
        pending.extend(reversed(event.children))
        kind, about = event.typed
        if kind.name == "Allocation":
            if about.device.type == "cpu":
                action = "alloc" if about.alloc_size > 0 else "free"
                found.append((event.start_time_ns, action, about.ptr, abs(about.alloc_size)))
        elif event.name.startswith(_MARK):
            found.append((event.start_time_ns, "node", int(event.name.removeprefix(_MARK)), 0))
        elif event.name.startswith(_SAVED):
            found.append((event.start_time_ns, "saved", int(event.name.removeprefix(_SAVED)), 0))
    found.sort(key=lambda row: row[0])  # stable: at the same nanosecond in the order of the tree
    for _, kind_name, which, nbytes in found:
        yield kind_name, which, nbytes


class _Quiet:
    """Keeps the profiler's own log lines, which are not the user's business, off standard error.

    It announces itself, and while it watches memory it warns of every block that is older than itself.
    """

    def __init__(self) -> None:
        # Read when the profiler is used first, which is now or has been.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._level = _native_log_level()
        self._before = self._level.value if self._level is not None else 0
        if self._level is not None:
            self._level.value = max(self._before, _LOG_ERRORS)

    def end(self) -> None:
        """Let it speak again."""
        if self._level is not None:
            self._level.value = self._before


def _native_log_level() -> ctypes.c_int | None:
    """Torch's native log level, where this build lets it be set."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
