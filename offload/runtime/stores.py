"""The swap stores of this process: sessions on the same device with the same options share one, and its spill file.

A session gets its engine, and with it the store, from here.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

import torch

from offload import _core
from offload.devices.device import device_of
from offload.devices.memory import record_out_of_memory
from offload.options import Options
from offload.runtime.engine import LANE_NICENESS, Engine
from offload.runtime.weak import WeakReferences
from offload.units import parse_bandwidth

__all__ = ["checks_every_byte", "engines", "make_engine", "make_store", "throttle"]

_stores: dict[tuple[int, str, str, int, float, bool], weakref.ref[_core.SwapStore]] = {}
_lock = threading.Lock()
_engines: WeakReferences[Engine] = WeakReferences()


def make_engine(device: torch.device, options: Options) -> Engine:
    """Return a new engine over the store that sessions with the same options share.

    Raises
    ------
    OSError
        The spill file cannot be created.
    RuntimeError
        A call of the CUDA driver failed.
    """
    record_out_of_memory(device)
    limit = options.host_limit if options.host_limit_is_given else 0
    # The key contains the pid, because a forked child cannot use the store of its parent.
    folder = os.path.realpath(options.spill_dir) if options.spill_dir else ""
    key = (os.getpid(), str(device), folder, limit, throttle(), checks_every_byte())
    with _lock:
        known = _stores.get(key)
        store = known() if known is not None else None
        if store is None:
            store = make_store(device, options)
            for dead in [each for each, reference in _stores.items() if reference() is None]:
                del _stores[dead]
            _stores[key] = weakref.ref(store)
        engine = Engine(store, device)
        engine.spill_dir = folder
        _engines.add(engine)
    return engine


def make_store(device: torch.device, options: Options) -> _core.SwapStore:
    """Return a store that no other engine uses. Raises the same errors as `make_engine`."""
    lanes = _core.HostDriver(niceness=LANE_NICENESS, bandwidth=throttle())
    checks = checks_every_byte()
    if device.type == "cpu":
        return _core.SwapStore.direct(lanes, options.spill_dir, checks_every_byte=checks)
    driver = device_of(device).driver()
    return _core.SwapStore.slab(driver, lanes, options.host_limit, options.spill_dir, checks_every_byte=checks)


def throttle() -> float:
    """Return the limit on the bytes per second that the host driver copies in each direction; 0 without a limit.

    Raises
    ------
    ValueError
        `OFFLOAD_THROTTLE` is not a bandwidth.
    """
    asked = os.environ.get("OFFLOAD_THROTTLE", "")
    return parse_bandwidth(asked, "OFFLOAD_THROTTLE") if asked else 0.0


def checks_every_byte() -> bool:
    """Return whether checksums of spilled tensors cover every byte.

    Raises
    ------
    ValueError
        `OFFLOAD_CHECKSUM` is neither "blocks" nor "all".
    """
    asked = os.environ.get("OFFLOAD_CHECKSUM") or "blocks"
    if asked not in ("blocks", "all"):
        raise ValueError(f'OFFLOAD_CHECKSUM is "blocks" or "all", not {asked!r}')
    return asked == "all"


def engines() -> list[Engine]:
    """Return the engines that are alive: those of enabled models, and those of graphs that outlive their session."""
    return list(_engines)


@atexit.register
def _quiesce_at_exit() -> None:
    """Wait for all copies before the interpreter frees the tensors that they read."""
    for engine in engines():
        engine.store.quiesce()
