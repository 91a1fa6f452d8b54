"""Reads figures of the system from files such as ``/proc/self/status``."""

from __future__ import annotations

from pathlib import Path

__all__ = ["kilobyte_fields", "read", "resident_set"]


def read(path: str | Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def kilobyte_fields(path: str | Path) -> dict[str, int]:
    """Return the lines such as ``VmRSS: 12 kB`` of a file, in bytes by name."""
    fields = {}
    for line in read(path).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields


def resident_set() -> tuple[int, int]:
    """Return the resident set of this process in bytes: its size now and its peak.

    The peak is that of the program: ``ru_maxrss`` would include the process that has started it.
    """
    status = kilobyte_fields("/proc/self/status")
    now = status.get("VmRSS", 0)
    return now, max(now, status.get("VmHWM", 0))
