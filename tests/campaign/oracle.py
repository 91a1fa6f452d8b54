"""A second opinion on a walk's log: PyTorch's own CUDA sanitizer, which runs without CUDA.

It knows kernels, what they read and write, and which events order them; it knows nothing of the swap store. Memory is
told to it in pages. What the framework frees and allocates again is the same memory to it: a caching allocator gives a
block out while kernels of its last owner are still queued, and that is where the races are.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.cuda import _sanitizer

PAGE_BYTES = 4096
Entry = tuple[str, int, int, tuple[int, int], tuple[int, int], str]


class NoStacks(traceback.StackSummary):
    """The sanitizer's reports carry Python stacks; a log has none, and taking them costs most of the time."""

    @classmethod
    def extract(cls, *_: Any, **__: Any) -> NoStacks:
        return cls()


def pages(extent: tuple[int, int]) -> set[int]:
    """The pages that a range of memory lies in."""
    address, nbytes = extent
    return set(range(address // PAGE_BYTES, (address + nbytes + PAGE_BYTES - 1) // PAGE_BYTES)) if nbytes else set()


def reports(log: Iterable[Entry]) -> list[str]:
    """What the sanitizer has to say about a log, one line for each report."""
    stackless = SimpleNamespace(StackSummary=NoStacks, walk_stack=lambda frame: ())
    with mock.patch.object(_sanitizer, "traceback", stackless):
        return list(_replay(log))


def _replay(log: Iterable[Entry]) -> Iterable[str]:
    handler = _sanitizer.EventHandler()
    registered: dict[int, int] = {}
    for kind, stream, event, read, written, what in log:
        if kind == "stream_create":
            handler._handle_stream_creation(stream)
        elif kind == "record":
            handler._handle_event_record(event, stream)
        elif kind == "wait":
            handler._handle_event_wait(event, stream)
        elif kind == "event_sync":
            handler._handle_event_synchronization(event)
        elif kind == "stream_sync":
            handler._handle_stream_synchronization(stream)
        elif kind == "allocate":
            registered[written[0]] = written[1]
        elif kind == "free":
            for page in pages((written[0], registered.pop(written[0]))):
                if page in handler.tensors_accessed.accesses:
                    handler._handle_memory_deallocation(page)
        else:
            writes = pages(written)
            reads = pages(read) - writes
            aliases = {page: [what] for page in reads | writes}
            for error in handler._handle_kernel_launch(stream, reads, writes, set(), what, aliases):
                now, before = error.current_access, error.previous_access
                yield f"{now.operator} {now.type} a page, unordered with {before.operator} {before.type} it"
