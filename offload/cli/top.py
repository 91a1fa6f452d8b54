"""`offload top PID`: a live view of a running training: memory now and planned, use of the link, stalls.

It creates a watch file. The training process then writes its figures to other files (`offload.diagnostics.live`), which
this command shows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["HELP", "add_arguments", "rows", "run"]

HELP = "show a running training: memory now and planned, use of the link, stalls"
_REFUSED, _NOTHING = 2, 1
_UNKNOWN = "not known yet"
_RATE_SECONDS = 2.0  # rates are computed over at least this time, as soon as it has passed

Span = tuple[dict[str, Any], dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `offload top`.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The parser of the command, whose result `run` takes.
    """
    parser.add_argument("pid", type=int, metavar="PID", help="the training process, of this user and machine")
    parser.add_argument("--once", action="store_true", help="print the figures once and end")
    parser.add_argument("--json", action="store_true", help="print the figures once, as JSON")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates (1)")
    parser.add_argument("--wait", type=float, default=30.0, metavar="SECONDS", help="wait for a first step (30)")


def run(args: argparse.Namespace) -> int:
    """Show a process until it ends or the user interrupts.

    Returns
    -------
    int
        0; 1 if the process has begun no step, 2 for a mistake in the call.
    """
    if not _is_alive(args.pid):
        return _refuse(f"no process {args.pid} of yours; find it with: pgrep -af python")
    if not 0 < args.interval < math.inf:
        return _refuse("--interval: write a positive number of seconds, such as 1")
    if not 0 <= args.wait < math.inf:
        return _refuse("--wait: write a number of seconds of at least 0, such as 30")
    try:
        with _looking(args.pid) as places:
            if not places:
                return _refuse("no private folder could be made; set XDG_RUNTIME_DIR to a folder of yours (mode 0700)")
            first = _first(args.pid, places, args.wait)
            if not first:
                within = f"within {args.wait:g} s" if _is_alive(args.pid) else "and has ended"
                print(f"offload top: process {args.pid} has begun no step under offload {within}", file=sys.stderr)
                return _NOTHING
            if args.json:
                print(json.dumps([*first.values()]))
            elif args.once:
                _print([*first.values()])
            else:
                return _show(args.pid, places, args.interval)
    except KeyboardInterrupt:
        pass  # the user ends the view with Ctrl-C
    return 0


def rows(now: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
    """Return the rows for one session: name and text.

    Parameters
    ----------
    now
        The latest figures.
    before
        Earlier figures: rates are computed from these to the latest ones.
    """
    verdict = now["verdict"]
    limit = f"; limit {format_bytes(now['limit_bytes'])}" if now["limit_bytes"] else ""
    whose = "process" if now["device"] == "cpu" else "memory"  # on the CPU, the process's resident set
    memory = f"{format_bytes(now['memory_bytes'])} now, {format_bytes(now['memory_bytes_peak'])} at most"
    found = [
        ("model", f"{now['model']} on {now['device']}, step {now['steps']:,}"),
        (whose, memory),
        ("step, planned", _pair(verdict["step_bytes_planned"], verdict["step_bytes_unswapped"]) + limit),
        ("activations", _pair(verdict["activation_bytes"], verdict["activation_bytes_unswapped"])),
        ("time", _time(verdict)),
    ]
    seconds = now["at"] - before["at"] if before is not None else 0.0
    if before is not None and seconds > 0:
        steps = (now["steps"] - before["steps"]) / seconds
        stalled = (now["stall_seconds"] - before["stall_seconds"]) / seconds
        found.append(("speed", f"{steps:.2f} steps/s; {100 * max(0.0, stalled):.1f} % of the time stalled"))
        for name in ("out", "in"):
            rate = max(0.0, (now[f"{name}_bytes"] - before[f"{name}_bytes"]) / seconds)
            link = now[f"{name}_bandwidth"]
            share = f", {100 * rate / link:.0f} % of {format_bandwidth(link)}" if link else ""
            found.append((f"copies {name}", f"{format_bandwidth(rate)}{share}"))
    else:
        found.append(("stalled", f"{format_seconds(now['stall_seconds'])} in all"))
    return [*found, ("state", now["state"])]


def _pair(found: int | None, without: int | None) -> str:
    if without is None:
        return _UNKNOWN
    return f"{format_bytes(without if found is None else found)} instead of {format_bytes(without)}"


def _time(verdict: Mapping[str, Any]) -> str:
    parts = [
        f"{words} {format_seconds(verdict[name])}"
        for words, name in (
            ("step", "step_seconds"),
            ("planned", "step_seconds_planned"),
            ("computation", "compute_seconds"),
        )
        if verdict[name] is not None
    ]
    return ", ".join(parts) or _UNKNOWN


@contextmanager
def _looking(pid: int) -> Iterator[list[Path]]:
    """Remove files left by ended processes and create watch files for a process; remove its files at the end."""
    from offload.diagnostics.live import folders, is_private, watch_file

    places = []
    for folder in folders():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:  # the folder cannot be created, or a file has its name
            continue
        if is_private(folder) and os.access(folder, os.W_OK | os.X_OK):
            places.append(folder)
    try:
        for folder in places:
            for path in folder.iterdir():
                owner = path.name.split("-")[0].split(".")[0]
                if owner == str(pid) or (owner.isdecimal() and not _is_alive(int(owner))):
                    path.unlink(missing_ok=True)
            watch_file(folder, pid).touch(mode=0o600)
        yield places
    finally:
        for folder in places:
            for path in [watch_file(folder, pid), *folder.glob(f"{pid}-*")]:
                path.unlink(missing_ok=True)


def _read(pid: int, places: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the latest figures of each session of the process, by file name, and renew the watch files."""
    from offload.diagnostics.live import watch_file

    found = {}
    for folder in places:
        watch_file(folder, pid).touch(mode=0o600)
        for path in sorted(folder.glob(f"{pid}-*.json"), key=lambda path: (len(path.name), path.name)):
            try:
                found[path.name] = json.loads(path.read_text(encoding="utf-8"))
            except FileNotFoundError:  # another `offload top` of the same process has ended and removed the file
                continue
    return found


def _first(pid: int, places: Sequence[Path], wait_seconds: float) -> dict[str, dict[str, Any]]:
    until = time.monotonic() + wait_seconds
    while not (found := _read(pid, places)) and time.monotonic() < until and _is_alive(pid):
        time.sleep(0.1)
    return found


def _longer(span: Span | None, figures: dict[str, Any]) -> Span:
    """Return the earlier figures from which rates are computed, and the latest ones."""
    if span is None:
        return figures, figures
    earlier, latest = span
    if figures["at"] == latest["at"]:  # no further step has begun: the rates do not change
        return span
    return (latest if latest["at"] - earlier["at"] >= _RATE_SECONDS else earlier), figures


def _sleep(pid: int, places: Sequence[Path], seconds: float) -> None:
    """Wait, and renew the watch files meanwhile, so that the figures are recent even after a long wait."""
    from offload.diagnostics.live import RECENT_SECONDS, watch_file

    until = time.monotonic() + seconds
    while _is_alive(pid) and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, RECENT_SECONDS / 4))
        for folder in places:
            watch_file(folder, pid).touch(mode=0o600)


def _show(pid: int, places: Sequence[Path], interval_seconds: float) -> int:
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return _refuse("the live view needs rich; write offload top PID --once, or: pip install rich")
    spans: dict[str, Span] = {}
    with Live(refresh_per_second=4) as live:
        while _is_alive(pid):
            panels = []
            for name, figures in _read(pid, places).items():
                spans[name] = _longer(spans.get(name), figures)
                table = Table.grid(padding=(0, 2))
                for row in rows(figures, spans[name][0]):
                    table.add_row(*map(Text, row))  # as Text, so that rich does not read brackets in names as markup
                age = time.time() - figures["at"]
                title = f"offload top {pid}" + (f" (last step begun {age:.0f} s ago)" if age > 2 else "")
                panels.append(Panel(table, title=title, title_align="left"))
            live.update(Group(*panels))
            _sleep(pid, places, interval_seconds)
    print(f"process {pid} has ended")
    return 0


def _print(sessions: Sequence[Mapping[str, Any]]) -> None:
    from offload.diagnostics.table import write_table

    for figures in sessions:
        write_table(sys.stdout, rows(figures))


def _is_alive(pid: int) -> bool:
    """Return whether a process of this user runs. A zombie process does not."""
    try:
        about = Path(f"/proc/{pid}")
        is_own = about.stat().st_uid == os.getuid()
        return is_own and about.joinpath("stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _refuse(problem: str) -> int:
    print(f"offload top: {problem}", file=sys.stderr)
    return _REFUSED
