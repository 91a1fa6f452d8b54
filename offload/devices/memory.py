"""Reads how the memory of a device is used: by torch, the driver and other processes; on the CPU, by all processes.

Explanations of out-of-memory errors, `recover` and the values for progress bars use it.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.devices.accelerator import Accelerator, watch_out_of_memory
from offload.devices.control_group import tightest_control_group
from offload.devices.device import device_of
from offload.devices.proc import kilobyte_fields, read
from offload.devices.processes import local_processes
from offload.units import format_bytes

__all__ = [
    "DeviceMemory",
    "Process",
    "last_out_of_memory",
    "memory_of",
    "peak_bytes",
    "record_out_of_memory",
]

_PROCESSES_MAX = 3
_RAM, _ADDRESS_SPACE, _CONTROL_GROUP = "RAM", "address space, ulimit -v", "control group"
# For each limit on the CPU: a name for what counts against it besides the resident memory of this process.
_OTHER_USE = {
    _RAM: "other processes",
    _ADDRESS_SPACE: "mapped and not resident",
    _CONTROL_GROUP: "the rest of the control group",
}

_at_out_of_memory: dict[torch.device, DeviceMemory] = {}
_watching = False


@dataclass(frozen=True)
class Process:
    """Another process that holds memory of the device.

    Attributes
    ----------
    can_be_ended
        Whether the process belongs to this user and is not part of this run: it did not start this process, was not
        started by it, and is not another rank.
    """

    pid: int
    name: str
    nbytes: int
    can_be_ended: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device.

    Parameters
    ----------
    device : str
        Such as ``"cuda:0"`` or ``"cpu"``.
    is_accelerator : bool
        Whether torch's caching allocator manages the memory; otherwise the system does.
    asked_bytes : int or None
        The bytes that could not be allocated; None if unknown.
    used_bytes : int
        Allocated to tensors (accelerator); resident (CPU).
    reserved_bytes : int
        Reserved by torch's allocator, including tensors (accelerator); mapped (CPU).
    free_bytes, total_bytes : int
        Free and total bytes of the device. On the CPU, several limits apply to this process: RAM, its control group and
        its address space. Then these are the bytes of the limit with the fewest free bytes.
    limit : str
        Name of the limit to which `free_bytes` and `total_bytes` refer.
    peak_bytes : int
        Maximum of `used_bytes` so far.
    processes : tuple of Process
        The largest other processes.
    """

    device: str
    is_accelerator: bool
    asked_bytes: int | None
    used_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int
    limit: str
    peak_bytes: int
    processes: tuple[Process, ...] = ()

    @property
    def foreign_bytes(self) -> int:
        """Bytes that are not free and not reserved by torch: contexts, libraries, other processes; 0 on the CPU."""
        return max(self.total_bytes - self.free_bytes - self.reserved_bytes, 0) if self.is_accelerator else 0

    @property
    def short_bytes(self) -> int | None:
        """Bytes that are missing for the request, as if all free memory were contiguous; None if it is unknown."""
        if self.asked_bytes is None:
            return None
        cached = self.reserved_bytes - self.used_bytes if self.is_accelerator else 0
        return max(self.asked_bytes - self.free_bytes - cached, 0)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table: name and amount."""
        asked = "unknown" if self.asked_bytes is None else format_bytes(self.asked_bytes)
        rows = [("requested", asked)]
        if self.is_accelerator:
            cached = self.reserved_bytes - self.used_bytes
            rows += [
                ("allocated by torch", f"{format_bytes(self.used_bytes)} (peak {format_bytes(self.peak_bytes)})"),
                ("reserved by torch, unused", format_bytes(cached)),
                ("not torch's", f"{format_bytes(self.foreign_bytes)} (CUDA context, libraries, other processes)"),
            ]
        else:
            rows += [
                ("resident", f"{format_bytes(self.used_bytes)} (peak {format_bytes(self.peak_bytes)})"),
                ("mapped", format_bytes(self.reserved_bytes)),
            ]
        rows.append(("free", f"{format_bytes(self.free_bytes)} of {format_bytes(self.total_bytes)} ({self.limit})"))
        rows += [(f"process {each.pid}", f"{format_bytes(each.nbytes)} ({each.name})") for each in self.processes]
        return rows

    def parts(self, swapped_bytes: int, movable_bytes: int) -> list[tuple[str, int]]:
        """Return name and bytes of each part of the memory, for a picture. They add up to total plus missing bytes."""
        movable = min(movable_bytes, self.used_bytes)
        swapped = min(swapped_bytes, self.used_bytes - movable)
        parts = [
            ("parameters, gradients, temporaries and the rest", self.used_bytes - movable - swapped),
            ("swapped tensors on the device", swapped),
            ("saved tensors that could be swapped", movable),
        ]
        if self.is_accelerator:
            parts += [
                ("reserved, unused", self.reserved_bytes - self.used_bytes),
                ("not torch's", self.foreign_bytes),
            ]
        else:
            parts.append((_OTHER_USE[self.limit], max(self.total_bytes - self.free_bytes - self.used_bytes, 0)))
        return [*parts, ("free", self.free_bytes), ("missing", self.short_bytes or 0)]


def memory_of(device: torch.device, asked_bytes: int | None = None) -> DeviceMemory:
    """Return how the memory of `device` is used now.

    Examples
    --------
    >>> memory_of(torch.device("cpu")).used_bytes > 0
    True
    """
    known = device_of(device)
    return _accelerator_memory(known, asked_bytes) if isinstance(known, Accelerator) else _cpu_memory(asked_bytes)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of memory use so far: of torch's tensors on a GPU, of this process on the CPU."""
    return device_of(device).peak_bytes()


# -- an accelerator ---------------------------------------------------------------------------------------------------


def record_out_of_memory(device: torch.device) -> None:
    """From now on, record how a GPU's memory is used whenever torch runs out of it, before the error is raised.

    Torch has no way to stop this. It takes no time until memory runs out. Nothing is done for other devices than CUDA,
    for which torch has no such call: CUDA would be initialized, and then a forked process could not use it.
    """
    global _watching
    if device.type == "cuda" and not _watching:
        _watching = watch_out_of_memory(_record)


def _record(device: torch.device, asked_bytes: int) -> None:
    _at_out_of_memory[device] = _accelerator_memory(Accelerator(device), asked_bytes)


def last_out_of_memory(device: torch.device, asked_bytes: int | None) -> DeviceMemory | None:
    """Return the record of the last out-of-memory error on this device, and delete it.

    Returns None if the recorded error was not caused by a request for about `asked_bytes` bytes: it is then an earlier
    error, which the program has caught.
    """
    memory = _at_out_of_memory.pop(torch.device(device.type, device.index or 0), None)
    if memory is None or memory.asked_bytes is None or asked_bytes is None:
        return None
    return memory if abs(memory.asked_bytes - asked_bytes) <= 0.01 * asked_bytes else None


def _accelerator_memory(device: Accelerator, asked_bytes: int | None) -> DeviceMemory:
    stats = device.memory_stats()
    free, total = device.memory_info()
    return DeviceMemory(
        device=str(device.torch_device),
        is_accelerator=True,
        asked_bytes=asked_bytes,
        used_bytes=int(stats.get("allocated_bytes.all.current", 0)),
        reserved_bytes=int(stats.get("reserved_bytes.all.current", 0)),
        free_bytes=free,
        total_bytes=total,
        limit="device memory",
        peak_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
        processes=tuple(_gpu_processes(device)),
    )


def _gpu_processes(device: Accelerator) -> Iterator[Process]:
    """Yield the largest other processes on the device; none without the driver's management library (pynvml)."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid()}")
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (pynvml.NVMLError, AttributeError):
        return
    others = [each for each in running if each.pid != os.getpid() and each.usedGpuMemory]
    for each in sorted(others, key=lambda process: -process.usedGpuMemory)[:_PROCESSES_MAX]:
        # In a container, NVML's pid may belong to an unrelated process: check that the process has the driver open.
        uses_gpu = "/dev/nvidia" in read(f"/proc/{each.pid}/maps")
        yield Process(each.pid, _process_name(each.pid), each.usedGpuMemory, uses_gpu and _can_be_ended(each.pid))


# -- the CPU ----------------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    """Return how many more bytes tensors can take on a device; on the CPU, `free_host_bytes`.

    On an accelerator, what torch's allocator has cached counts too, as if it could be used without fragmentation.
    """
    found = device_of(device)
    if not isinstance(found, Accelerator):
        return free_host_bytes()
    reserved = int(found.memory_stats().get("reserved_bytes.all.current", 0))
    return found.free_bytes() + max(0, reserved - found.allocated_bytes())


def free_host_bytes() -> int:
    """Return how many more bytes of memory this process can use; 0 if unknown.

    It is the least of the available RAM, the rest of the control group's limit and the rest of the address space.
    """
    return _tightest_limit(kilobyte_fields("/proc/self/status").get("VmSize", 0))[2]


def _cpu_memory(asked_bytes: int | None) -> DeviceMemory:
    status = kilobyte_fields("/proc/self/status")
    resident, mapped = status.get("VmRSS", 0), status.get("VmSize", 0)
    limit, total, free = _tightest_limit(mapped)
    return DeviceMemory(
        device="cpu",
        is_accelerator=False,
        asked_bytes=asked_bytes,
        used_bytes=resident,
        reserved_bytes=mapped,
        free_bytes=free,
        total_bytes=total,
        limit=limit,
        peak_bytes=status.get("VmHWM", resident),
        processes=tuple(_largest_processes()) if limit == _RAM else (),
    )


def _tightest_limit(mapped_bytes: int) -> tuple[str, int, int]:
    """Return the limit of this process with the least free memory: its name, its bytes, and how many are free."""
    machine = kilobyte_fields("/proc/meminfo")
    limits = [(_RAM, machine.get("MemTotal", 0), machine.get("MemAvailable", 0))]
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY:
        limits.append((_ADDRESS_SPACE, soft, max(soft - mapped_bytes, 0)))
    group = tightest_control_group()
    if group is not None:
        limits.append((_CONTROL_GROUP, *group))
    return min(limits, key=lambda each: each[2])


def _largest_processes() -> list[Process]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        resident = kilobyte_fields(folder / "status").get("VmRSS", 0)
        if pid != os.getpid() and resident >= 1 << 28:
            found.append((resident, pid))
    largest = sorted(found, reverse=True)[:_PROCESSES_MAX]
    return [Process(pid, _process_name(pid), resident, _can_be_ended(pid)) for resident, pid in largest]


def _can_be_ended(pid: int) -> bool:
    """Return whether a process belongs to this user, is not part of this run and did not start it."""
    users = re.search(r"^Uid:\s+(\d+)\s+(\d+)", read(f"/proc/{pid}/status"), re.M)
    if users is None or {int(users[1]), int(users[2])} != {os.getuid()}:
        return False
    own, theirs = _with_ancestors(os.getpid()), _with_ancestors(pid)
    is_rank = local_processes() > 1 and theirs[1:2] == own[1:2]  # started by the same launcher
    return pid not in own and os.getpid() not in theirs and not is_rank


def _with_ancestors(pid: int) -> list[int]:
    """Return the id of a process, then those of its ancestors, from its parent upwards."""
    found: list[int] = []
    while pid > 0 and pid not in found:
        found.append(pid)
        parent = re.search(r"^PPid:\s+(\d+)", read(f"/proc/{pid}/status"), re.M)
        pid = int(parent[1]) if parent is not None else 0
    return found


def _process_name(pid: int) -> str:
    return read(f"/proc/{pid}/comm").strip() or "name not readable"
