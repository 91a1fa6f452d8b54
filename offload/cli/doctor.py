"""`offload doctor`: shows which parts of the machine the engine can use, and whether the engine works on it.

It prints the findings of `offload.cli.checks`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from offload.diagnostics.table import Cell, write_table

if TYPE_CHECKING:
    from offload.cli.checks import Finding

HELP = "show what this machine offers the engine, measure its links and test the engine on it"

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the doctor's options.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The parser of the command, whose result `run` takes.
    """
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    """Examine the machine and print the findings.

    Returns
    -------
    int
        1 if the engine does not work on this machine, otherwise 0, also with warnings.
    """
    from offload.cli.checks import examine

    findings = []
    for finding in _with_progress(examine()):
        findings.append(finding)
    failed = any(finding.status == "failed" for finding in findings)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": [finding.to_dict() for finding in findings]}, indent=1))
    else:
        show(findings, sys.stdout)
    return 1 if failed else 0


def show(findings: Iterable[Finding], out: TextIO) -> None:
    """Write a table of findings, and below it a summary."""
    found = list(findings)
    rows: list[list[Cell]] = []
    before = ""
    for finding in found:
        rows += [[]] if before not in ("", finding.section) else []
        style = _STYLES[finding.status]
        section = finding.section if finding.section != before else ""
        rows.append([(section, "bold"), finding.name, (finding.status, style), finding.text])
        rows += [["", "", "", (f"→ {finding.remedy}", style)]] if finding.remedy else []
        before = finding.section
    worst = "failed" if _count(found, "failed") else "warning" if _count(found, "warning") else "ok"
    write_table(out, [*rows, []])
    write_table(out, [[(_verdict(found), _STYLES[worst])]])


def _with_progress(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings; on a terminal, show meanwhile that the machine is being measured."""
    if not sys.stderr.isatty():
        yield from findings
        return
    sys.stderr.write("measuring …")
    sys.stderr.flush()
    try:
        yield from findings
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _count(findings: list[Finding], status: str) -> int:
    return sum(finding.status == status for finding in findings)


def _verdict(findings: list[Finding]) -> str:
    failed, warnings = _count(findings, "failed"), _count(findings, "warning")
    if failed:
        return f"{failed} failed: the engine does not work here as it is."
    things = "one thing" if warnings == 1 else f"{warnings} things"
    return "The engine works here." + (f" {things[:1].upper()}{things[1:]} could be better." if warnings else "")
