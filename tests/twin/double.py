"""The test double of libcuda as Python sees it: a library of its own, its faults and what it has seen."""

from __future__ import annotations

import ctypes
import gc
import tempfile
from functools import cache
from pathlib import Path

from twin.build import build_machine

from offload import _core

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
    """The double, built in `directory` and loaded into this process; its threads live as long as that.

    `caller_is_legacy`: waiting on the legacy stream blocks the caller, as where the device is RAM.
    """

    def __init__(self, directory: Path, *, caller_is_legacy: bool) -> None:
        self._path = str(build_machine(directory / "libsim.so"))
        self._library = ctypes.CDLL(self._path)
        self._library.sim_first_violation.restype = ctypes.c_char_p
        self.caller_is_legacy(caller_is_legacy)

    def driver(self) -> _core.Driver:
        """A new CUDA driver over it."""
        return _core.cuda_driver(0, self._path)

    def fail_at(self, name: str, nth: int, code: int = 2) -> None:
        """The `nth` call of `name` from now on fails with `code`."""
        self._library.sim_fail_at(name.encode(), nth, code)

    def caller_is_legacy(self, is_so: bool) -> None:
        """Whether the caller's own work is the legacy stream's: what it records there is then reached at once."""
        self._library.sim_caller_is_legacy(int(is_so))

    def hold_streams(self, held: bool) -> None:
        """While held, what is queued stays queued."""
        if held:
            gc.collect()  # a store of an earlier test would wait for its streams when it dies, which stand still then
        self._library.sim_hold_streams(int(held))

    def forget_faults(self) -> None:
        """No call fails any more."""
        self._library.sim_forget_faults()

    def count(self, name: str) -> int:
        """How often `name` was called."""
        return int(self._library.sim_calls(name.encode()))

    def forget_violations(self) -> None:
        """Nobody has done anything wrong so far."""
        self._library.sim_forget_violations()

    @property
    def first_violation(self) -> str:
        """What the caller did wrong first; empty where it did not."""
        return self._library.sim_first_violation().decode()

    def await_live_handles(self, most: int) -> None:
        """Return once no more than `most` are: what a store's lanes still hold is given back a little later."""
        self._library.sim_await_live_handles(most)

    @property
    def registrations(self) -> int:
        """Ranges pinned now."""
        return int(self._library.sim_registrations())

    @property
    def live_handles(self) -> int:
        """Streams and events alive."""
        return int(self._library.sim_live_handles())


@cache
def the_double() -> Double:
    """The one whose device is RAM to its callers; its threads outlive every test, and so does its file."""
    directory = tempfile.mkdtemp(prefix="offload-machine-")
    return Double(Path(directory), caller_is_legacy=True)
