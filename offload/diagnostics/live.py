"""The figures that `offload top` shows. The training process writes them only while `offload top` runs.

`offload top PID` creates a private folder with a file ``PID.watch``, and renews the file's time as long as it runs.
When a step begins, at most twice a second, the training process checks for that file. If it exists and is recent, the
process writes its figures to the same folder, as ``PID-N.json`` for its N-th session. The file is replaced as a whole,
so that no reader sees a part of it. A forked child has its own process id, and so its own file.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from offload.control.enabled_model import EnabledModel
from offload.control.planned_step import PlannedStep
from offload.devices.device import device_of
from offload.diagnostics.session_report import make_verdict

__all__ = ["LivePublisher", "folders", "is_private", "watch_file"]

log = logging.getLogger("offload")

LOOK_SECONDS = 0.5
RECENT_SECONDS = 10.0  # an older watch file was left by an `offload top` that has ended

_numbers = itertools.count(1)


def folders() -> list[Path]:
    """Return the folders for exchanging figures: one in the user's runtime directory, and one below ``/tmp``."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = [Path(runtime) / "offload"] if runtime else []
    return [*own, Path(f"/tmp/offload-{os.getuid()}")]


def is_private(folder: Path) -> bool:
    """Return whether a folder belongs to this user and no other user may read it or write to it."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def watch_file(folder: Path, pid: int) -> Path:
    """Return the path of the file that shows that `offload top` runs for a process."""
    return folder / f"{pid}.watch"


class LivePublisher:
    """Writes the figures of one session while `offload top` runs. Call it whenever a step has begun."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._look_at = 0.0

    def __call__(self, enabled: EnabledModel) -> None:
        """Write the figures, if they are due, at the begin of a step."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        pid = os.getpid()
        for folder, watch in _watch_files(pid, os.environ.get("XDG_RUNTIME_DIR")):
            if _is_recent(watch) and is_private(folder):
                self._write(folder / f"{pid}-{self._number}.json", _figures(enabled))
                return

    def _write(self, path: Path, figures: dict[str, Any]) -> None:
        unfinished = path.with_suffix(".part")
        try:
            unfinished.write_text(json.dumps(figures), encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:  # the folder was removed, or its disk is full: training continues
            log.debug("figures for offload top: %s", error)


@lru_cache(maxsize=1)
def _watch_files(pid: int, runtime: str | None) -> list[tuple[Path, Path]]:
    """Return the folders for exchanging figures, each with the path of its watch file; `runtime`: where they are."""
    return [(folder, watch_file(folder, pid)) for folder in folders()]


def _is_recent(watch: Path) -> bool:
    try:
        renewed = watch.stat().st_mtime
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
