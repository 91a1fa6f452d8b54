"""Counts the processes of one training run on this machine; default limits are divided by their number."""

from __future__ import annotations

import os

from offload import _core


def local_processes() -> int:
    """Return the number of this run's processes on this machine, as the launcher has set it; 1 without a launcher.

    torchrun and Open MPI set the number. If a launcher sets only `LOCAL_RANK` and `WORLD_SIZE`, at most `WORLD_SIZE`
    processes run here, and on a machine with GPUs at most one per GPU. GPUs are counted without creating a context.

    Examples
    --------
    >>> import os
    >>> os.environ["LOCAL_WORLD_SIZE"] = "4"  # as torchrun sets it
    >>> local_processes()
    4
    >>> del os.environ["LOCAL_WORLD_SIZE"]
    """
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        count = _count(name)
        if count:
            return count
    if "LOCAL_RANK" not in os.environ:
        return 1
    world = _count("WORLD_SIZE") or 1
    devices = _core.cuda_device_count()
    return min(world, devices) if devices else world


def _count(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0
