"""Which store a session's bytes go to: one per process and device, hence one spill file, as long as wishes agree.

A session asks here for the store of its engine; sessions may share a store.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

import torch

from offload import _core
from offload.devices.device import device_of
from offload.options import Options
from offload.runtime.engine import LANE_NICENESS, Engine
from offload.runtime.weak import WeakReferences
from offload.units import parse_bandwidth

__all__ = ["engines", "make_engine", "make_store", "throttle"]

_stores: dict[tuple[int, str, str, int, float], weakref.ref[_core.SwapStore]] = {}
_lock = threading.Lock()
_engines: WeakReferences[Engine] = WeakReferences()


def make_engine(device: torch.device, options: Options) -> Engine:
    """An engine of its own over the store that sessions with the same wishes share.

    Raises
    ------
    OSError
        The spill file cannot be made.
    RuntimeError
        The CUDA driver refuses.
    """
    limit = options.host_limit if options.host_limit_is_given else 0
    # The pid: what a forked child inherits is no store to it.
    folder = os.path.realpath(options.spill_dir) if options.spill_dir else ""
    key = (os.getpid(), str(device), folder, limit, throttle())
    with _lock:
        known = _stores.get(key)
        store = known() if known is not None else None
        if store is None:
            store = make_store(device, options)
            for dead in [each for each, reference in _stores.items() if reference() is None]:
                del _stores[dead]
            _stores[key] = weakref.ref(store)
        engine = Engine(store, device)
        _engines.add(engine)
    return engine


def make_store(device: torch.device, options: Options) -> _core.SwapStore:
    """A store that is shared with nobody. Raises what `make_engine` raises."""
    lanes = _core.HostDriver(niceness=LANE_NICENESS, bandwidth=throttle())
    if device.type == "cpu":
        return _core.SwapStore.direct(lanes, options.spill_dir)
    return _core.SwapStore.slab(device_of(device).driver(), lanes, options.host_limit, options.spill_dir)


def throttle() -> float:
    """The most bytes per second that the host driver copies in each direction; 0: as fast as it can.

    Raises
    ------
    ValueError
        `OFFLOAD_THROTTLE` is no bandwidth.
    """
    asked = os.environ.get("OFFLOAD_THROTTLE", "")
    return parse_bandwidth(asked, "OFFLOAD_THROTTLE") if asked else 0.0


def engines() -> list[Engine]:
    """Those that are alive: of enabled models, and of graphs that outlive theirs."""
    return list(_engines)


@atexit.register
def _quiesce_at_exit() -> None:
    """No copy may read a tensor that interpreter shutdown is about to free."""
    for engine in engines():
        engine.store.quiesce()
