"""Checks the arguments of `offload.enable`. Every error message says what to write instead."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch.optim import Optimizer

from offload.devices.control_group import control_groups
from offload.devices.device import device_of
from offload.devices.processes import local_processes
from offload.torch_compat.optimizers import has_own_hooks
from offload.units import check_slowdown, format_bytes, own_number, parse_bytes, whole_number

LOOKAHEAD_NODES_DEFAULT = 4
MAX_SLOWDOWN_DEFAULT = 0.05
HOST_LIMIT_MIN = 64 << 10  # room for two bounce buffers (file → device) and at least one block
FREE_DISK_BYTES_MIN = 64 << 20


Recompute = Literal["auto", "cheap"]
Preset = Literal["smallest", "balanced", "fast"]
Parameters = Literal["auto", "all", "frozen"]
FAST_MEMORY_LIMIT = 0.9  # fraction of the device; the rest is for other libraries and allocator fragmentation


@dataclass(frozen=True)
class Options:
    """The checked arguments of `offload.enable`; sizes in bytes."""

    memory_limit: int | None
    max_slowdown: float | None
    n_tensors: int | None  # None: automatic mode
    lookahead_nodes: int | None  # None: computed for each tensor
    min_tensor_bytes: int
    exclude: tuple[str, ...]
    host_limit: int
    spill_dir: str  # empty: no disk tier
    host_limit_is_given: bool = False
    recompute: Recompute | None = None  # None: never
    least_memory: bool = False  # at any slowdown


def check_options(
    model: torch.nn.Module,
    device: torch.device,
    *,
    memory_limit: object,
    max_slowdown: object,
    n_tensors: int | None,
    lb: int | str | None,
    min_tensor_bytes: int | str,
    exclude: Iterable[str],
    host_limit: int | str | None,
    spill_dir: str | os.PathLike[str] | None,
    recompute: object = None,
    preset: object = None,
) -> Options:
    """Check the arguments of `offload.enable` against each other and against the machine.

    Raises
    ------
    ValueError
        An argument is wrong or conflicts with another one; the message says what to write instead.
    OSError
        `spill_dir` cannot hold the spill file.
    """
    if lb is not None and n_tensors is None:
        raise ValueError("lb needs n_tensors: add n_tensors=-1 (all tensors), or remove lb")
    for name, value in (("memory_limit", memory_limit), ("max_slowdown", max_slowdown)):
        if value is not None and n_tensors is not None:
            raise ValueError(f"use {name} (automatic) or n_tensors (manual), not both")
    if preset is not None:
        goals = {"memory_limit": memory_limit, "max_slowdown": max_slowdown, "n_tensors": n_tensors}
        _check_preset(preset, goals)
    # Replace a preset by its goal. "balanced" is the default.
    if preset == "fast":
        memory_limit = FAST_MEMORY_LIMIT
    elif preset != "smallest" and memory_limit is None and max_slowdown is None and n_tensors is None:
        max_slowdown = MAX_SLOWDOWN_DEFAULT
    smallest_bytes = parse_bytes(min_tensor_bytes, "min_tensor_bytes")
    return Options(
        memory_limit=None if memory_limit is None else _check_memory_limit(device, memory_limit, smallest_bytes),
        max_slowdown=None if max_slowdown is None else check_slowdown(max_slowdown),
        n_tensors=_check_n_tensors(n_tensors),
        lookahead_nodes=_check_lookahead(lb),
        min_tensor_bytes=smallest_bytes,
        exclude=_check_exclude(model, exclude),
        host_limit=_check_host_limit(device, host_limit),
        host_limit_is_given=host_limit is not None,
        spill_dir=_check_spill_dir(device, spill_dir),
        recompute=_check_recompute(recompute, n_tensors),
        least_memory=preset == "smallest",
    )


def _check_preset(preset: object, goals: Mapping[str, object]) -> None:
    if preset not in get_args(Preset):
        raise ValueError(
            f'the preset is "smallest", "balanced" or "fast", not {preset!r}; for a limit write memory_limit="12GiB"'
        )
    for name, value in goals.items():
        if value is not None:
            raise ValueError(f"use the preset {preset!r} or {name}, not both: each of them sets the goal of the plan")


def _check_memory_limit(device: torch.device, limit: object, smallest_bytes: int) -> int:
    limit = own_number(limit)
    if isinstance(limit, float):
        if not 0 < limit <= 1:
            raise ValueError(
                f"memory_limit: a float is a fraction of the device, above 0 and at most 1, not {limit!r}; "
                'write bytes as an integer or as in "12GiB"'
            )
        return int(limit * device_bytes(device))
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise ValueError(f'memory_limit takes bytes, "12GiB" or a fraction such as 0.4, not {limit!r}')
    limit_bytes = parse_bytes(limit, "memory_limit")
    if limit_bytes < smallest_bytes and str(limit).isdecimal():  # probably meant in another unit
        raise ValueError(
            f"memory_limit: {limit!r} is {format_bytes(limit_bytes)}, less than the smallest tensor that is swapped "
            f'(min_tensor_bytes, {format_bytes(smallest_bytes)}); write the unit, such as "{limit}GiB"'
        )
    return limit_bytes


def device_bytes(device: torch.device) -> int:
    """Return the size of a device's memory: of the GPU, or the RAM that this process may use."""
    return device_of(device).total_bytes()


def _check_n_tensors(n_tensors: object) -> int | None:
    if n_tensors is None:
        return None
    count = whole_number(n_tensors, -1)
    if count is None:
        raise ValueError(f"n_tensors must be -1 (all), 0 (none) or a count, not {n_tensors!r}")
    return count


def _check_lookahead(lb: object) -> int | None:
    if isinstance(lb, str) and lb == "auto":
        return None
    if lb is None:
        return LOOKAHEAD_NODES_DEFAULT
    nodes = whole_number(lb, 1)
    if nodes is None:
        raise ValueError(f'lb must be at least 1 backward node, or "auto", not {lb!r}')
    return nodes


def _check_recompute(recompute: object, n_tensors: int | None) -> Recompute | None:
    if recompute is False:
        return None
    if recompute is not None and recompute != "auto" and recompute != "cheap":
        raise ValueError(f'recompute takes "auto", "cheap" or False, not {recompute!r}')
    if n_tensors is None:
        return "cheap" if recompute == "cheap" else "auto"
    if recompute is not None:
        raise ValueError(
            f"recompute={recompute!r} needs the automatic mode, but n_tensors selects the manual mode: remove one of "
            "them, or write recompute=False"
        )
    return None


def check_optimizer_state(optimizer_state: object) -> None:
    """Raise a ValueError if the argument is not "auto", True or False."""
    if not isinstance(optimizer_state, bool) and optimizer_state != "auto":
        raise ValueError(f'optimizer_state takes "auto", True or False, not {optimizer_state!r}')


def check_optimizers(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    optimizer_state: object,
    step_in_backward: object = False,
    gradients: object = False,
) -> tuple[Optimizer, ...]:
    """Return the given optimizers if `optimizer_state` or `step_in_backward` is not False; otherwise none.

    Raises
    ------
    ValueError
        One of them is not an optimizer of the model or is given twice, `optimizer_state` is not "auto", True or False,
        `step_in_backward` or `gradients` is not a bool, one of these three is True without an optimizer, or
        `gradients` conflicts with another argument; the message says what to write.
    """
    if not isinstance(gradients, bool):
        raise ValueError(f"gradients takes True or False, not {gradients!r}")
    if gradients and step_in_backward:
        raise ValueError(
            "step_in_backward=True frees gradients in backward, so that none are left to move: remove gradients=True"
        )
    if gradients and optimizer_state is not True:
        raise ValueError("gradients=True works only with optimizer_state=True: add optimizer_state=True")
    if not isinstance(step_in_backward, bool):
        raise ValueError(f"step_in_backward takes True or False, not {step_in_backward!r}")
    check_optimizer_state(optimizer_state)
    if optimizer is None:
        optimizer = ()
    given = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not given:
        if optimizer_state is True:
            raise ValueError("optimizer_state=True needs the optimizer: add optimizer=optimizer")
        if step_in_backward:
            raise ValueError("step_in_backward=True needs the optimizer: add optimizer=optimizer")
        return ()
    own = {id(parameter) for parameter in model.parameters()}
    if len({id(each) for each in given}) < len(given):
        raise ValueError("optimizer lists the same optimizer twice: list each once")
    for each in given:
        if not isinstance(each, Optimizer) or not has_own_hooks(each):
            inner = " Write optimizer=optimizer.optimizer." if hasattr(each, "optimizer") else ""
            shown = type(each).__name__ if isinstance(each, Optimizer) else repr(each)
            raise ValueError(f"optimizer takes a torch.optim.Optimizer, or a list of them, not {shown}.{inner}")
        if not any(id(parameter) in own for group in each.param_groups for parameter in group["params"]):
            raise ValueError(
                f"optimizer: {type(each).__name__} has no parameter of this model; create it from "
                "model.parameters(), or give another one"
            )
    return given if optimizer_state or step_in_backward else ()


def check_parameters(parameters: object) -> None:
    """Raise a ValueError if the argument is not "auto", "all", "frozen" or False."""
    if parameters is not False and parameters not in get_args(Parameters):
        raise ValueError(
            'parameters says which parameters leave memory while no module uses them: "all", "frozen" (those without '
            'gradients), "auto" ("frozen" if the model alone exceeds memory_limit) or False (none), '
            f"not {parameters!r}"
        )


def _check_exclude(model: torch.nn.Module, exclude: Iterable[str]) -> tuple[str, ...]:
    if isinstance(exclude, str):
        raise ValueError(f'exclude takes a list of module names, not a string: write exclude=("{exclude}",)')
    if not isinstance(exclude, Iterable):
        raise ValueError(f'exclude takes module names, such as exclude=("head",), not {exclude!r}')
    names = {name for name, _ in model.named_modules()}
    chosen = tuple(exclude)
    for name in chosen:
        if name not in names or name == "":
            known = sorted(names - {""})
            shown = ", ".join(known[:8] + ["…"] * (len(known) > 8)) or "no submodules"
            raise ValueError(f"exclude: the model has no module {name!r}; it has {shown}")
    return chosen


def _check_host_limit(device: torch.device, host_limit: int | str | None) -> int:
    limit = default_host_limit() if host_limit is None else parse_bytes(host_limit, "host_limit")
    if device_of(device).is_accelerator and limit < HOST_LIMIT_MIN:
        whose = "this machine and its control group leave" if host_limit is None else "you gave"
        raise ValueError(
            f"host_limit: {whose} {limit} bytes of host memory to swap into, and at least {HOST_LIMIT_MIN} are needed; "
            'free some, raise the limit of the control group, or write a size that fits, such as host_limit="1GiB"'
        )
    return limit


def default_host_limit(root: Path = Path("/")) -> int:
    """Return this process's share of the host memory that may be pinned, in bytes.

    All processes of this job on this machine share the smaller of two amounts: half of the available RAM, and all of
    the unused part of the control group's limit.

    Parameters
    ----------
    root
        Folder that contains ``proc`` and ``sys``.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return min([available // 2, *(room for _, room in control_groups(root))]) // local_processes()


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _check_spill_dir(device: torch.device, spill_dir: str | os.PathLike[str] | None) -> str:
    if spill_dir is None:
        return default_spill_dir() if device.type == "cpu" else ""
    name = os.fspath(spill_dir) if isinstance(spill_dir, os.PathLike) else spill_dir
    if not isinstance(name, str):
        raise ValueError(f"spill_dir takes the path of a folder, not {spill_dir!r}")
    if not name:
        raise ValueError("spill_dir is empty; name a folder, or leave it out")
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(2, "spill_dir does not exist; create it, or name another folder", str(path))
    if not path.is_dir():
        raise NotADirectoryError(20, "spill_dir is not a folder; name one", str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(13, "spill_dir is not writable; name a folder that is", str(path))
    processes = local_processes()
    if free_disk_bytes(path) < processes * FREE_DISK_BYTES_MIN:
        each = f" for each of {processes} processes" if processes > 1 else ""
        needed = f"{FREE_DISK_BYTES_MIN >> 20} MiB free{each}"
        raise OSError(28, f"spill_dir has less than {needed}; name a folder on another disk", str(path))
    return str(path)


def default_spill_dir() -> str:
    """Return a folder for temporary files, preferably on a disk: a tmpfs is in RAM."""
    candidates = [os.environ.get("OFFLOAD_SPILL_DIR"), tempfile.gettempdir(), "/var/tmp"]
    usable = [path for path in candidates if path and Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)]
    on_disk = [path for path in usable if not is_in_memory(path)]
    if not usable:
        raise FileNotFoundError(2, "no writable folder for the spill file; give spill_dir", tempfile.gettempdir())
    return (on_disk or usable)[0]


def is_in_memory(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is on a tmpfs: a spill file there frees no memory."""
    mounts = []
    for line in _read("/proc/self/mounts").splitlines():
        _, mount_point, kind, *_ = line.split()
        mounts.append((mount_point, kind))
    real = os.path.realpath(path)
    inside = [m for m in mounts if real == m[0] or real.startswith(m[0].rstrip("/") + "/")]
    return bool(inside) and max(inside, key=lambda mount: len(mount[0]))[1] in ("tmpfs", "ramfs")


def free_disk_bytes(path: str | os.PathLike[str]) -> int:
    """Return the bytes that an unprivileged process can still allocate on the disk of `path`."""
    about = os.statvfs(path)
    return about.f_bavail * about.f_frsize
