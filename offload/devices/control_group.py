"""Reads the memory limits of this process's control groups. In a container or a job they are lower than the RAM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_groups", "tightest_control_group"]

_UNLIMITED = 1 << 60  # cgroup v1 reports a number of about this size if there is no limit


def tightest_control_group(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return limit and unused bytes of the control group with the fewest unused bytes; None if none has a limit."""
    return min(control_groups(root), key=lambda each: each[1], default=None)


def control_groups(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Yield, for each control group of the process, its limit and the unused bytes below it.

    Parameters
    ----------
    root
        Folder that contains ``proc`` and ``sys``.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            tops = [mount, mount / "unified"]
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            tops = [mount / "memory", mount / controllers]
        else:
            continue
        # In a container the path may be the host's path, of which only the upper folders are visible here.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top in tops:
            for depth in range(len(parts) + 1):
                yield from _room(top.joinpath(*parts[:depth]), *files)


def _room(group: Path, limit_file: str, usage_file: str, cache_name: str) -> Iterator[tuple[int, int]]:
    limit, usage = _text(group / limit_file).strip(), _text(group / usage_file).strip()
    if not (limit.isdigit() and usage.isdigit()) or int(limit) >= _UNLIMITED:
        return  # the limit is "max", or the group has no such file
    # The kernel can drop cached files that have not been used lately.
    cached = sum(
        int(line.split()[1]) for line in _text(group / "memory.stat").splitlines() if line.startswith(f"{cache_name} ")
    )
    yield int(limit), max(int(limit) - max(int(usage) - cached, 0), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
