"""The test double of libcuda as Python sees it: one library a process, its faults and what it has seen."""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path

from fake_cuda.build import build_fake_cuda

# What an engine calls once it runs; others belong to the driver's start, or (batches) depend on the lanes' timing.
ENTRY_POINTS = (
    "cuCtxPushCurrent_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
)


class Double:
    """The double behind the path that `_core.cuda_driver` is given."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_first_violation.restype = ctypes.c_char_p
        self._library.fake_caller_is_legacy(1)

    def fail_at(self, name: str, nth: int, code: int = 2) -> None:
        """The `nth` call of `name` from now on fails with `code`."""
        self._library.fake_fail_at(name.encode(), nth, code)

    def hold_streams(self, held: bool) -> None:
        """While held, what is queued stays queued."""
        self._library.fake_hold_streams(int(held))

    def forget_faults(self) -> None:
        """No call fails any more."""
        self._library.fake_forget_faults()

    def calls(self, name: str) -> int:
        """How often `name` was called."""
        return int(self._library.fake_calls(name.encode()))

    @property
    def first_violation(self) -> str:
        """What the caller did wrong first; empty where it did not."""
        return self._library.fake_first_violation().decode()

    @property
    def registrations(self) -> int:
        """Ranges pinned now."""
        return int(self._library.fake_registrations())

    @property
    def live_handles(self) -> int:
        """Streams and events alive."""
        return int(self._library.fake_live_handles())


@cache
def the_double() -> Double:
    """The one of this process; its threads outlive every test, and so does its file."""
    directory = tempfile.mkdtemp(prefix="offload-fake-cuda-")
    return Double(build_fake_cuda(Path(directory, "libfake.so")))
