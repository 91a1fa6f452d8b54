"""Describes the machine and the time of a measurement. Stored with every result."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """Machine, versions, date and commit, as JSON can hold them."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "platform": platform.platform(terse=True),
        "processor": processor_name(),
        "processors": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        **gpu(),
    }


def gpu() -> dict[str, Any]:
    """The first CUDA device and its driver; `device` is None where torch finds none."""
    if not torch.cuda.is_available():
        return {"device": None}
    about = torch.cuda.get_device_properties(0)
    return {
        "device": about.name,
        "device_bytes": about.total_memory,
        "device_capability": f"{about.major}.{about.minor}",
        "driver": driver_version(),
        "torch_cuda": torch.version.cuda,
    }


def driver_version() -> str | None:
    """The NVIDIA driver's version, None where nothing tells it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
        return next(word for word in words if word[0].isdigit() and word.count(".") >= 1)
    except (OSError, StopIteration):
        pass
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def commit() -> str:
    """The commit that was measured, "+" behind it where files differ from it."""
    head = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if head is None:
        return os.environ.get("OFFLOAD_COMMIT", "unknown")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return head + ("+" if changed else "")


def processor_name() -> str:
    """The processor's name as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line for line in lines if line.startswith("model name")).split(": ", 1)[1]
    except (OSError, StopIteration, IndexError):
        return platform.machine()


def _output(*command: str) -> str | None:
    """What a command prints; None where it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return run.stdout.strip()
