"""What `offload top` shows of a running training. The training process writes it, and only while somebody looks.

`offload top PID` makes a private folder with a file ``PID.watch``, and renews the file's time as long as it runs. When
a step begins, at most twice a second, the training process looks for that file. If it is there and recent, the figures
are written beside it, as ``PID-N.json`` for the N-th session of the process; the file is replaced as a whole, so that
no reader sees half of it. A forked child has a process id, and so a file, of its own.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
import time
from pathlib import Path
from typing import Any

from offload.control.enabled_model import EnabledModel
from offload.control.planned_step import PlannedStep
from offload.devices.device import device_of
from offload.diagnostics.session_report import make_verdict

__all__ = ["LivePublisher", "folders", "is_private", "watch_file"]

log = logging.getLogger("offload")

LOOK_SECONDS = 0.5
RECENT_SECONDS = 10.0  # a watch file that is older was left behind

_numbers = itertools.count(1)


def folders() -> list[Path]:
    """Return the folders in which figures may be exchanged: of the user's session, and one below ``/tmp``."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = [Path(runtime) / "offload"] if runtime else []
    return [*own, Path(f"/tmp/offload-{os.getuid()}")]


def is_private(folder: Path) -> bool:
    """Whether a folder is this user's own, and nobody else may read or write in it."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def watch_file(folder: Path, pid: int) -> Path:
    """Return the file that says that somebody looks at a process."""
    return folder / f"{pid}.watch"


class LivePublisher:
    """Writes the figures of one session while somebody looks. To be called whenever a step has begun."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._look_at = 0.0

    def __call__(self, enabled: EnabledModel) -> None:
        """A step has begun."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        pid = os.getpid()
        for folder in folders():
            if _is_watched(folder, pid) and is_private(folder):
                self._write(folder / f"{pid}-{self._number}.json", _figures(enabled))
                return

    def _write(self, path: Path, figures: dict[str, Any]) -> None:
        unfinished = path.with_suffix(".part")
        try:
            unfinished.write_text(json.dumps(figures), encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:  # who looked has gone with the folder, or its disk is full: no matter of training
            log.debug("figures for offload top: %s", error)


def _is_watched(folder: Path, pid: int) -> bool:
    try:
        renewed = watch_file(folder, pid).stat().st_mtime
    except OSError:
        return False
    return time.time() - renewed < RECENT_SECONDS


def _figures(enabled: EnabledModel) -> dict[str, Any]:
    here, model = enabled.on_device, enabled.model
    device, stats = device_of(here.device), here.engine.store.stats()
    verdict, main = make_verdict(enabled), here.controller.main
    link = main.link if isinstance(main, PlannedStep) else None
    return {
        "pid": os.getpid(),
        "at": time.time(),
        "model": type(model).__name__,
        "device": str(here.device),
        "steps": here.counts.steps,
        "memory_bytes": device.allocated_bytes(),
        "memory_bytes_peak": device.peak_bytes(),
        "limit_bytes": here.options.memory_limit,
        "out_bytes": stats["out_bytes"],
        "in_bytes": stats["in_bytes"],
        "out_bandwidth": None if link is None else link.out_bandwidth,
        "in_bandwidth": None if link is None else link.in_bandwidth,
        "stall_seconds": stats["stall_seconds"],
        "state": verdict.state(),
        "verdict": verdict.to_dict(),
    }
