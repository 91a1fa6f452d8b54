"""Checks, one by one, which parts of the machine the engine can use and whether the engine works on it.

`offload doctor` prints the findings.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload import __version__, _core
from offload.devices import allocator
from offload.devices.accelerator import Accelerator, driven_devices
from offload.devices.control_group import tightest_control_group
from offload.devices.device import accelerators
from offload.options import default_host_limit, default_spill_dir, free_disk_bytes, is_in_memory
from offload.profiling.calibration import Calibration, calibrate
from offload.session import enable
from offload.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["Finding", "examine"]

PIN_BYTES = 256 << 20
SELF_TEST_STEPS = 10
LIBCUDA = "libcuda.so.1"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Parameters
    ----------
    section, name : str
        Group and name of the check.
    text : str
        The result as text.
    value : object
        The result for programs: bytes, seconds, bytes per second, names.
    status : str
        ``"ok"``; ``"warning"``: it works, but worse than it could; ``"failed"``: the engine does not work here.
    remedy : str
        What to do about a warning or a failure.
    """

    section: str
    name: str
    text: str
    value: Any = None
    status: str = "ok"
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as values that JSON can represent."""
        about = {"section": self.section, "name": self.name, "status": self.status, "text": self.text}
        return {**about, "value": self.value, "remedy": self.remedy}


def examine() -> Iterator[Finding]:
    """Check versions, devices, the driver, links, memory and disk, and train ten steps with and without the engine.

    This takes a few seconds, because links are measured again. If a check raises an error, its finding has the status
    "failed".

    Yields
    ------
    Finding
        The findings in the order of the data path, each as soon as it is known.

    Examples
    --------
    >>> from offload.cli.checks import _versions
    >>> [finding.name for finding in _versions()][:2]
    ['offload', 'torch']
    """
    probes: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", _versions),
        ("driver", _driver),
        ("devices", _devices),
        ("host memory", _host_memory),
        ("disk", _disk),
        ("disk", _disk_link),
    ]
    for accelerator in accelerators():
        name = str(accelerator.torch_device)
        probes.append((name, lambda accelerator=accelerator: _pinned_link(accelerator)))  # type: ignore[misc]
    for device in _devices_to_test():
        probes.append(("self-test", lambda device=device: _self_test(device)))  # type: ignore[misc]
    for section, probe in probes:
        try:
            yield from probe()
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            kind = type(error).__name__
            yield Finding(section, kind, str(error), kind, "failed", "see the message; the engine needs this")


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "offload", __version__, __version__)
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding("versions", "torch", f"{torch.__version__} ({built_for})", torch.__version__)
    yield Finding("versions", "python", platform.python_version(), platform.python_version())
    yield Finding("versions", "system", platform.platform(terse=True), platform.platform())


def _driver() -> Iterator[Finding]:
    symbols = _core.cuda_symbols(LIBCUDA)
    if not symbols:
        error = _load_error(LIBCUDA)
        if error is None:
            yield Finding("driver", LIBCUDA, "not installed; the host driver serves the CPU", None)
        else:
            yield Finding("driver", LIBCUDA, f"does not load: {error}", None, "failed", "reinstall the NVIDIA driver")
        return
    absent = {kind: [name for name, required, found in symbols if not found and required == kind] for kind in (1, 0)}
    found = sum(found for _, _, found in symbols)
    counted = f"{found} of {len(symbols)} entry points"
    value = {"found": found, "missing_required": absent[1], "missing_optional": absent[0]}
    if absent[1]:
        missing = ", ".join(absent[1])
        remedy = "install a driver for CUDA 12 or newer"
        yield Finding("driver", LIBCUDA, f"{counted}; missing: {missing}", value, "failed", remedy)
    elif absent[0]:
        missing = ", ".join(absent[0])
        remedy = "timings, the capture check or names in error texts are missing; install a newer driver"
        yield Finding("driver", LIBCUDA, f"{counted}; missing, optional: {missing}", value, "warning", remedy)
    else:
        yield Finding("driver", LIBCUDA, counted, value)
    version = _driver_version()
    if version:
        yield Finding("driver", "version", version, version)


def _load_error(library: str) -> str | None:
    """Return why a shared library does not load; None if it is not installed."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return None if "No such file" in str(error) else str(error)
    return None


def _driver_version() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def _devices() -> Iterator[Finding]:
    found = accelerators()
    seen = {"offload": driven_devices(), "torch": len(found)}
    if seen["offload"] != seen["torch"]:
        text = f"the driver has {seen['offload']}, torch sees {seen['torch']}"
        remedy = "install a torch built for this driver, or compare CUDA_VISIBLE_DEVICES"
        yield Finding("devices", "CUDA devices", text, seen, "warning", remedy)
    elif not seen["torch"]:
        yield Finding("devices", "CUDA devices", "none: RAM is the device, the disk is the tier below it", seen)
    for each in found:
        free, total = each.memory_info()
        text = f"{each.name()}, {format_bytes(free)} of {format_bytes(total)} free"
        value = {"name": each.name(), "free_bytes": free, "total_bytes": total}
        yield Finding("devices", str(each.torch_device), text, value)
    processors = len(os.sched_getaffinity(0))
    yield Finding("devices", "processors", f"{processors} for this process", processors)
    nodes = sorted(path.name[4:] for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    yield Finding("devices", "NUMA nodes", f"{len(nodes) or 1}", nodes)


def _host_memory() -> Iterator[Finding]:
    section = "host memory"
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding(section, "RAM", format_bytes(ram), ram)
    limit = default_host_limit()
    about = f"{format_bytes(limit)} (half of what is available, and no more than the control group leaves)"
    remedy = "give host_limit, or end other programs" if limit < 1 << 30 else ""
    yield Finding(section, "host_limit by default", about, limit, "warning" if remedy else "ok", remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = [("no limit" if each == resource.RLIM_INFINITY else format_bytes(each)) for each in (soft, hard)]
    text = f"{words[0]} (hard limit: {words[1]}); the CUDA driver pins past it"
    yield Finding(section, "RLIMIT_MEMLOCK", text, None if soft == resource.RLIM_INFINITY else soft)
    yield _control_group()
    name = allocator.current()
    if allocator.recycles(name) or accelerators():  # with a GPU, torch's own allocator decides
        yield Finding(section, "malloc", name, name)
        return
    text = f"{name}: not all of the memory that swapping frees is used again, or steps take longer"
    library = allocator.find_recycling_allocator()
    install = "" if library else f"{allocator.INSTALL}, then "
    yield Finding(section, "malloc", text, name, "warning", f"{install}offload run -- python train.py")


def _control_group() -> Finding:
    found = tightest_control_group()
    if found is None:
        return Finding("host memory", "control group", "no memory limit", None)
    limit, left = found
    value = {"limit_bytes": limit, "left_bytes": left}
    return Finding("host memory", "control group", f"{format_bytes(left)} left of {format_bytes(limit)}", value)


def _disk() -> Iterator[Finding]:
    folder = default_spill_dir()
    if is_in_memory(folder):
        text = f"{folder} is in RAM (tmpfs): swapping there frees no memory"
        remedy = "set OFFLOAD_SPILL_DIR, or give spill_dir, to a folder on a disk"
        yield Finding("disk", "spill_dir by default", text, folder, "warning", remedy)
    else:
        yield Finding("disk", "spill_dir by default", folder, folder)
    free = free_disk_bytes(folder)
    few = free < 8 << 30
    remedy = "give spill_dir on a larger disk" if few else ""
    yield Finding("disk", "free", format_bytes(free), free, "warning" if few else "ok", remedy)
    alignment = _core.SpillFile(folder).alignment_bytes
    if alignment > 1:
        yield Finding("disk", "direct I/O", f"yes, aligned to {alignment} bytes", alignment)
    else:
        text = "no: reads and writes pass through the page cache, which takes the RAM that swapping frees"
        remedy = "give spill_dir on ext4, xfs or btrfs"
        yield Finding("disk", "direct I/O", text, alignment, "warning", remedy)


def _disk_link() -> Iterator[Finding]:
    folder = default_spill_dir()
    store = _core.SwapStore.direct(_core.HostDriver(), folder)
    yield from _link("disk", calibrate(store, torch.device("cpu"), folder, fresh=True))


def _pinned_link(accelerator: Accelerator) -> Iterator[Finding]:
    device = accelerator.torch_device
    section = str(device)
    torch.zeros(1, device=device)  # makes torch create the primary context
    pin_bytes = min(PIN_BYTES, default_host_limit())
    store = _core.SwapStore.slab(accelerator.driver(), _core.HostDriver(), pin_bytes, slab_bytes=pin_bytes)
    found = calibrate(store, device, "", fresh=True)
    stats = store.stats()
    seconds = float(stats["pool_registration_seconds"])
    rate = float(stats["pool_held_bytes"]) / seconds if seconds else 0.0
    yield Finding(section, "pinning", f"{format_bytes(rate)}/s", rate)
    yield from _link(section, found)


def _link(section: str, found: Calibration) -> Iterator[Finding]:
    alone = f"{format_bandwidth(found.out_bandwidth)} out, {format_bandwidth(found.in_bandwidth)} in"
    both = f"{format_bandwidth(found.out_bandwidth_both)} out, {format_bandwidth(found.in_bandwidth_both)} in"
    yield Finding(section, "copies, one direction", alone, [found.out_bandwidth, found.in_bandwidth])
    yield Finding(section, "copies, both at once", both, [found.out_bandwidth_both, found.in_bandwidth_both])
    low = f"{format_bandwidth(found.out_bandwidth_low)} out, {format_bandwidth(found.in_bandwidth_low)} in"
    yield Finding(section, "copies, slowest quarter", low, [found.out_bandwidth_low, found.in_bandwidth_low])
    yield Finding(section, "latency", f"{format_seconds(found.latency_seconds)} a copy", found.latency_seconds)


# -- self-test --------------------------------------------------------------------------------------------------------


def _devices_to_test() -> list[torch.device]:
    return [torch.device("cpu"), *(accelerator.torch_device for accelerator in accelerators())]


def _self_test(device: torch.device) -> Iterator[Finding]:
    name = f"{SELF_TEST_STEPS} steps on {device}"
    begun = time.perf_counter()
    plain, _ = _train(device, swap=False)
    swapped, moved = _train(device, swap=True)
    seconds = time.perf_counter() - begun
    value = {"tensors_compared": len(plain), "tensors_swapped": moved, "seconds": seconds}
    differing = sum(not torch.equal(a, b) for a, b in zip(plain, swapped, strict=True))
    if differing or not moved:
        problem = f"{differing} of {len(plain)} tensors differ" if moved else "nothing was swapped"
        remedy = "do not train with offload here; report this output as an issue"
        yield Finding("self-test", name, problem, value, "failed", remedy)
        return
    text = f"losses and gradients equal to the last bit, {moved} tensors swapped"
    yield Finding("self-test", name, text, value)


def _train(device: torch.device, *, swap: bool) -> tuple[list[Tensor], int]:
    """Return the losses and gradients of every step, and the number of swapped tensors."""
    generator = torch.Generator().manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = enable(model, n_tensors=-1, lb=2, min_tensor_bytes=1) if swap else None
    found = []
    for _ in range(SELF_TEST_STEPS):
        x = torch.randn(128, 256, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach().cpu(), *(p.grad.cpu().clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    moved = 0
    if handle is not None:
        moved = handle.report().swapped.tensors
        handle.disable()
    return found, moved
