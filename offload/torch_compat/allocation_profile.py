"""Every allocation of a step on one device, by torch's profiler: private calls that record memory without operators.

Used during a recorded step only.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler
from torch.autograd.profiler import profile, record_function

__all__ = ["MARK_PREFIX", "AllocationProfile"]

MARK_PREFIX = "offload: "
_LOG_ERRORS = 2


class AllocationProfile:
    """Records allocations on `device`, and marks. One at a time in a process: torch crashes on two.

    Only the thread that starts it is recorded, and the threads in which autograd runs the backward passes that this
    thread starts.
    """

    _recording: ClassVar[dict[str, AllocationProfile]] = {}

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._device = device
        self._thread = threading.current_thread()  # not its number, which another gets when it has ended
        self._quiet: _QuietLog | None = None
        self._spans: dict[int, record_function] = {}  # by thread: the one that is open

    def start(self) -> bool:
        """Begin to record in this thread. False where anybody in this process is profiling."""
        is_free = not torch._C._autograd._profiler_enabled() and not _is_profiling_in_python()
        if not is_free or self._recording.setdefault("now", self) is not self:
            return False
        try:
            self._quiet = _QuietLog()
            wanted = profile(use_cpu=True, profile_memory=True)
            config = wanted.config()  # type: ignore[no-untyped-call]
            torch._C._autograd._prepare_profiler(config, wanted.kineto_activities)
            # Marks, and no operators: a recurrent network runs 100,000 a step, each of which would take 1.5 KB.
            scopes = {RecordScope.USER_SCOPE}
            torch._C._autograd._enable_profiler(config, wanted.kineto_activities, scopes)  # type: ignore[call-arg]
            self.is_on = True
        except BaseException:
            if torch._C._autograd._profiler_enabled():  # an interrupt came when it had just begun
                torch._C._autograd._disable_profiler()
            self.release()
            raise
        return True

    @property
    def records_this_thread(self) -> bool:
        """Whether what the calling thread allocates is recorded."""
        return torch._C._autograd._profiler_enabled()

    @property
    def is_of_another_thread(self) -> bool:
        """Whether another thread than this one has started it, and only that one can stop it."""
        return threading.current_thread() is not self._thread

    @property
    def thread_is_alive(self) -> bool:
        """Whether the thread that has started it still runs."""
        return self._thread.is_alive()

    def mark(self, text: str) -> None:
        """Note a point in time; `text` begins with `MARK_PREFIX`."""
        with record_function(text):
            pass

    def begin_span(self, text: str) -> None:
        """Note a point in time, and end this thread's span before it.

        Of what a thread allocates on an accelerator, torch reports only what is inside of a span.
        """
        thread = threading.get_ident()
        before = self._spans.pop(thread, None)
        if before is not None:
            before.__exit__(None, None, None)
        self._spans[thread] = record_function(text)
        self._spans[thread].__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> list[tuple[str, int | str, int]] | None:
        """End it. None where another profiler has taken its place, or its thread has ended with it.

        Returns
        -------
        list of (str, int or str, int)
            In order of time: ("alloc" or "free", address, bytes) and ("mark", text, 0).
        """
        if self.is_of_another_thread:
            self.release()  # torch's profile has gone with its thread
            return None
        if _is_profiling_in_python() or not torch._C._autograd._profiler_enabled():
            self.release()  # to stop this one would stop the other
            return None
        try:
            for span in self._spans.values():  # those of autograd's threads too
                span.__exit__(None, None, None)
            found = torch._C._autograd._disable_profiler()
        finally:
            self.release()
        return list(_events(found.experimental_event_tree(), self._device))

    def release(self) -> None:
        """Let others record, and torch's profiler log."""
        self.is_on = False
        self._spans.clear()
        if self._recording.get("now") is self:
            if self._quiet is not None:
                self._quiet.end()
            del self._recording["now"]


def _is_profiling_in_python() -> bool:
    """Whether somebody has a profiler on, in any thread, by torch's Python interface."""
    return bool(profiler._is_profiler_enabled)


def _events(tree: Sequence[Any], device: torch.device) -> Iterator[tuple[str, int | str, int]]:
    found: list[tuple[int, str, int | str, int]] = []
    pending = list(reversed(tree))
    while pending:
        event = pending.pop()
        pending.extend(reversed(event.children))
        kind, about = event.typed
        if kind.name == "Allocation":
            if about.device.type == device.type and (device.index is None or about.device.index == device.index):
                action = "alloc" if about.alloc_size > 0 else "free"
                found.append((event.start_time_ns, action, about.ptr, abs(about.alloc_size)))
        elif event.name.startswith(MARK_PREFIX):
            found.append((event.start_time_ns, "mark", event.name, 0))
    found.sort(key=lambda row: row[0])  # stable: at the same nanosecond in the order of the tree
    for _, kind_name, which, nbytes in found:
        yield kind_name, which, nbytes


class _QuietLog:
    """Keeps the profiler's own log lines, which are not the user's business, off standard error.

    It announces itself, and while it records memory it warns of every block that is older than itself.
    """

    def __init__(self) -> None:
        # Read when the profiler is used first, which is now or has been.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._level = _native_log_level()
        self._before = self._level.value if self._level is not None else 0
        if self._level is not None:
            self._level.value = max(self._before, _LOG_ERRORS)

    def end(self) -> None:
        """Let it log again."""
        if self._level is not None:
            self._level.value = self._before


def _native_log_level() -> ctypes.c_int | None:
    """Torch's native log level, where this build lets it be set."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
