"""Records every allocation of a step on one device with torch's profiler, without recording operators.

It is used only in profiled and trial steps.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler
from torch.autograd.profiler import profile, record_function

from offload._core import CallWhenFreed
from offload.torch_compat.backward_pass import OUTSIDE, current_backward

__all__ = ["APART", "MARK_PREFIX", "AllocationEvents", "AllocationProfile", "apart", "mark_apart", "prepare"]

MARK_PREFIX = "offload: "
APART = f"{MARK_PREFIX}apart "
_LOG_ERRORS = 2
_of_thread = threading.local()
_is_prepared = False  # whether the main thread has used torch's profiler


class AllocationEvents:
    """The events of a recording, in order of time, in 17 bytes each: as tuples they would take 240.

    Iteration yields (kind, which, bytes): ("alloc" or "free", address, bytes) and ("mark", text, 0).
    """

    _KINDS = ("alloc", "free", "mark")

    def __init__(self, tree: Sequence[Any], device: torch.device) -> None:
        times, kinds, places, sizes = array("q"), bytearray(), array("Q"), array("Q")
        self._texts: list[str] = []
        pending = [iter(tree)]
        while pending:
            event = next(pending[-1], None)
            if event is None:
                pending.pop()
                continue
            pending.append(iter(event.children))
            kind, about = event.typed
            if kind.name == "Allocation":
                if about.device.type != device.type or device.index not in (None, about.device.index):
                    continue
                row = int(about.alloc_size <= 0), about.ptr, abs(about.alloc_size)
            elif event.name.startswith(MARK_PREFIX):
                row = 2, len(self._texts), 0
                self._texts.append(event.name)
            else:
                continue
            times.append(event.start_time_ns)
            for column, value in zip((kinds, places, sizes), row, strict=True):
                column.append(value)
        # Stable: events of the same nanosecond keep the order of the tree.
        order = np.frombuffer(times, np.int64).argsort(kind="stable")
        self._kinds = np.frombuffer(kinds, np.uint8)[order]
        self._places, self._sizes = (np.frombuffer(column, np.uint64)[order] for column in (places, sizes))

    def __iter__(self) -> Iterator[tuple[str, int | str, int]]:
        for kind, place, size in zip(self._kinds.data, self._places.data, self._sizes.data, strict=True):
            yield self._KINDS[kind], self._texts[place] if kind == 2 else place, size


class AllocationProfile:
    """Records allocations on `device`, and marks. A process can have only one at a time: torch crashes with two.

    It records the thread that starts it, and the threads in which autograd runs that thread's backward passes.
    """

    _recording: ClassVar[dict[str, AllocationProfile]] = {}

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._device = device
        self._thread = threading.current_thread()  # the object, because a later thread may get the same id
        self._quiet: _QuietLog | None = None
        self._spans: dict[int, record_function] = {}  # the open span of each thread

    def start(self) -> bool:
        """Start recording in this thread. Return False if a profiler is active in this process, or scheduled.

        Also inside a backward pass: when the running node ends, torch would turn the profiler off without this object's
        knowledge, and crash later.
        """
        is_free = not torch._C._autograd._profiler_enabled() and not _is_profiling_in_python()
        is_free = is_free and current_backward() == OUTSIDE and not _is_scheduled()
        if not is_free or self._recording.setdefault("now", self) is not self:
            return False
        try:
            self._quiet = _QuietLog()
            wanted = profile(use_cpu=True, profile_memory=True)
            config = wanted.config()  # type: ignore[no-untyped-call]
            torch._C._autograd._prepare_profiler(config, wanted.kineto_activities)
            # Records marks, but no operators: a recurrent network runs 100,000 per step, and each would need 1.5 KB.
            scopes = {RecordScope.USER_SCOPE}
            torch._C._autograd._enable_profiler(config, wanted.kineto_activities, scopes)  # type: ignore[call-arg]
            self.is_on = True
            if threading.current_thread() is not threading.main_thread():
                # If the thread ends first, this is freed in it, and stops torch's profiler. Otherwise torch would crash
                # at the process's end.
                _of_thread.end = CallWhenFreed(torch._C._autograd._disable_profiler)
        except BaseException:
            if torch._C._autograd._profiler_enabled():  # an interrupt came just after it was enabled
                torch._C._autograd._disable_profiler()
            self.release()
            raise
        return True

    @classmethod
    def is_recording(cls) -> bool:
        """Whether a step of any thread is being recorded."""
        return "now" in cls._recording

    @property
    def records_this_thread(self) -> bool:
        """Whether the allocations of the calling thread are recorded."""
        return torch._C._autograd._profiler_enabled()

    @property
    def is_of_another_thread(self) -> bool:
        """Whether another thread has started the recording; only that thread can stop it."""
        return threading.current_thread() is not self._thread

    @property
    def thread_is_alive(self) -> bool:
        """Whether the thread that has started the recording is still running."""
        return self._thread.is_alive()

    def mark(self, text: str) -> None:
        """Record a mark; `text` begins with `MARK_PREFIX`."""
        with record_function(text):
            pass

    def begin_span(self, text: str) -> None:
        """Record a mark by a new span, and end this thread's previous span.

        On an accelerator, torch reports only allocations inside a span.
        """
        thread = threading.get_ident()
        before = self._spans.pop(thread, None)
        if before is not None:
            before.__exit__(None, None, None)
        span = record_function(text)
        span.__enter__()  # type: ignore[no-untyped-call]
        self._spans[thread] = span  # not if an interrupt has ended `__enter__`: then no span has to be ended

    def stop(self) -> AllocationEvents | None:
        """Stop recording. Return None if another profiler has replaced this one, or if its thread has ended."""
        if self.is_of_another_thread:
            self.release()  # torch's profiler ended with its thread
            return None
        if _is_profiling_in_python() or not torch._C._autograd._profiler_enabled():
            self.release()  # stopping this profiler would stop the other one
            return None
        try:
            for span in self._spans.values():  # including those of autograd's threads
                span.__exit__(None, None, None)
            found = torch._C._autograd._disable_profiler()
        except BaseException:
            if torch._C._autograd._profiler_enabled():  # an interrupt came before it was disabled
                torch._C._autograd._disable_profiler()
            raise
        finally:
            self.release()
        return AllocationEvents(found.experimental_event_tree(), self._device)

    def release(self) -> None:
        """Allow other profiles in this process, and the profiler's log."""
        self.is_on = False
        is_recorder = self._recording.get("now") is self  # of several profiles of a thread, only one has recorded
        end = vars(_of_thread).pop("end", None) if is_recorder and not self.is_of_another_thread else None
        if end is not None:
            end.cancel()
        self._spans.clear()
        if is_recorder:
            if self._quiet is not None:
                self._quiet.end()
            del self._recording["now"]


def prepare() -> None:
    """Initialize torch's profiler if this is the main thread.

    If another thread is the first to use it, torch writes an error to standard error.
    """
    global _is_prepared
    if not _is_prepared and threading.current_thread() is threading.main_thread():
        first = AllocationProfile(torch.device("cpu"))
        if first.start():  # a whole recording: a profiler that is prepared and not used makes torch crash later
            first.stop()
            _is_prepared = True


@contextmanager
def apart() -> Iterator[None]:
    """Mark what is allocated inside and outlives it as no memory of the step, such as an optimizer's state."""
    mark_apart(begins=True)
    try:
        yield
    finally:
        mark_apart(begins=False)


def mark_apart(*, begins: bool) -> None:
    """Mark where a part begins or ends that `apart` describes, if a step is being recorded."""
    if AllocationProfile.is_recording():
        with record_function(f"{APART}{int(begins)}"):
            pass


def _is_scheduled() -> bool:
    """Return whether the program has a `torch.profiler.profile`, which warms up or records in some steps.

    Torch crashes if it records while that one warms up, and does not tell when that is. It counts the object's steps
    from its creation to the end of its `with` block.
    """
    steps: Mapping[str, int] = getattr(getattr(profiler, "KinetoStepTracker", None), "_step_dict", {})
    return "ProfilerStep" in steps


def _is_profiling_in_python() -> bool:
    """Return whether a profiler of torch's Python interface is active in any thread."""
    return bool(profiler._is_profiler_enabled)


class _QuietLog:
    """Suppresses the profiler's log lines on standard error.

    It logs its start and, while it records memory, a warning for every block that was allocated earlier.
    """

    def __init__(self) -> None:
        # The profiler reads this variable at its first use in the process.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._level = _native_log_level()
        self._before = self._level.value if self._level is not None else 0
        if self._level is not None:
            self._level.value = max(self._before, _LOG_ERRORS)

    def end(self) -> None:
        """Restore the log level."""
        if self._level is not None:
            self._level.value = self._before


def _native_log_level() -> ctypes.c_int | None:
    """Return torch's native log level; None if this build does not export it."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
