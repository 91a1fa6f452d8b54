"""Files in which the results of measurements are kept for later processes, each for one environment.

The folder is ``offload`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload import __version__

__all__ = ["cache_path", "discard_older", "environment", "load", "save"]


def environment() -> dict[str, Any]:
    """Return the properties that distinguish this environment from others with the same folder."""
    root = Path("/").stat()
    return {
        "version": __version__,
        "host": platform.node(),
        "boot": _boot_id(),  # device numbers are assigned anew at each boot
        "root": [root.st_dev, root.st_ino],  # a container or a chroot has its own, even with the same name and prefix
        "prefix": sys.prefix,
    }


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def cache_path(kind: str, key: Mapping[str, Any], folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the file for results of this kind with this key. The key must consist of JSON values."""
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (never raises)
        folder = Path(home) / "offload"
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return Path(folder) / f"{kind}-{digest[:16]}.json"


def load(path: Path, key: Mapping[str, Any], seconds_max: float) -> dict[str, Any] | None:
    """Return what `save` has written with this key; None if there is nothing, or it is older than `seconds_max`.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file is malformed, or was written with another key.
    """
    try:
        if time.time() - path.stat().st_mtime > seconds_max:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or found.get("key") != key:
        raise ValueError("it belongs to another environment, device, spill folder or version of offload")
    return found


def save(path: Path, key: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write results in place of those that were written before. Another process never reads a part of them.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as part:
            json.dump({"key": key, **results}, part, indent=1)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def discard_older(folder: Path, kind: str, seconds_max: float) -> None:
    """Delete the files of this kind that were written longer ago than `seconds_max`. Raises `OSError`.

    This includes unfinished files of processes that were killed while they wrote.
    """
    for path in folder.glob(f"{kind}-*"):
        with suppress(FileNotFoundError):  # another process has deleted it
            if time.time() - path.stat().st_mtime > seconds_max:
                path.unlink()
