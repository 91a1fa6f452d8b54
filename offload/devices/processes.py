"""How many processes of one training run share this machine, so that each takes its share of what the machine has.

Beside the data path: limits that the caller leaves open are divided by it.
"""

from __future__ import annotations

import os

from offload import _core


def local_processes() -> int:
    """Processes of this run on this machine, as its launcher tells; 1 without a launcher.

    torchrun and Open MPI say the number. A launcher that says only `LOCAL_RANK` and `WORLD_SIZE` has at most that many
    here, and on a machine with GPUs at most one for each. The devices are counted without a context on any of them.

    Examples
    --------
    >>> import os
    >>> os.environ["LOCAL_WORLD_SIZE"] = "4"  # as torchrun sets it
    >>> local_processes()
    4
    >>> del os.environ["LOCAL_WORLD_SIZE"]
    """
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        told = _count(name)
        if told:
            return told
    if "LOCAL_RANK" not in os.environ:
        return 1
    world = _count("WORLD_SIZE") or 1
    devices = _core.cuda_device_count()
    return min(world, devices) if devices else world


def _count(name: str) -> int:
    told = os.environ.get(name, "")
    return int(told) if told.isdecimal() else 0
