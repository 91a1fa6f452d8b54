"""Faults in a store's spill file: an I/O class of the tests' own between the file and the kernel.

The extension has no faults in it; this builds a small module that has (`faulty_io.h`), at the first use.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

from campaign.build import cmake_build

from offload import _core


@functools.cache
def faults() -> ModuleType:
    """The module, built from the sources as they stand."""
    path = cmake_build("_faults.so", "-DOFFLOAD_FAULTS=ON", "-DCMAKE_BUILD_TYPE=Debug")
    spec = importlib.util.spec_from_file_location("_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inject_fault(
    store: _core.SwapStore,
    operation: str,
    kind: str,
    nth: int = 1,
    error_number: int = 0,
    *,
    persistent: bool = False,
) -> None:
    """Let the `nth` operation ("allocate", "write", "read") of the file from now on misbehave; 0: none does.

    `kind` is "error" (of `error_number`), "short_transfer" or "wrong_block". A persistent fault stays.
    """
    faults().inject(store, operation, kind, nth, error_number, persistent)


def truncate(store: _core.SwapStore, nbytes: int) -> None:
    """Shorten the file behind the engine's back."""
    faults().truncate(store, nbytes)


def watch(store: _core.SwapStore, machine: str) -> None:
    """Tell the order checker of the machine at that path of all the file's I/O; nothing without a file."""
    faults().watch(store, machine)
