"""How many instructions the control path takes for a saved tensor, and the planner for a plan: no clock, no noise.

    python bench/instructions.py [--update]
    python bench/instructions.py --functions SUBJECT [--rows N]

Counts under valgrind's callgrind, in the calling thread alone, and compares with `instructions.json`; --update
writes that file anew. --functions prints the functions behind one subject's figure. The figures hold for one minor
version of Python, one of torch and one processor, which stand beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from instructions_worker import COUNT, PLANS
from machine import processor_name

HERE = Path(__file__).resolve().parent
COMMITTED = HERE / "instructions.json"
SUBJECTS = ("kept small", "kept", "kept, measured", "swapped", "swapped, measured", "planner")
UNITS = {"planner": PLANS}  # of which a run at size "once" has so many; the others have COUNT tensors
TOLERANCE = 0.10
SECONDS_MAX = 600.0


class Unavailable(Exception):
    """Nothing can be counted or compared here; the message says why."""


def versions() -> dict[str, str]:
    """What the figures depend on."""
    import torch

    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.split("+")[0],
        "machine": platform.machine(),
        "processor": processor_name(),  # libraries choose other loops on another one
    }


def committed() -> dict[str, float]:
    """The committed figures.

    Raises
    ------
    Unavailable
        They were taken with other versions.
    """
    kept: dict[str, Any] = json.loads(COMMITTED.read_text(encoding="utf-8"))
    if kept["versions"] != versions():
        raise Unavailable(f"the committed figures are for {kept['versions']}, and this is {versions()}")
    return dict(kept["instructions"])


def build_switch(folder: Path) -> Path:
    """Compile what turns the counting on and off.

    Raises
    ------
    Unavailable
        There is no C compiler, or no valgrind/callgrind.h.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise Unavailable("no C compiler")
    switch = folder / "switch.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(switch), str(HERE / "instructions_switch.c")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Unavailable(f"the switch does not compile: {run.stderr.strip().splitlines()[0]}")
    return switch


def count(subjects: Sequence[str]) -> list[float]:
    """Count the subjects in order, "planted" planting a loop for those behind it.

    Returns
    -------
    list of float
        Instructions for one saved tensor, pack and unpack together, more than without hooks; for the planner, for one
        plan.

    Raises
    ------
    Unavailable
        valgrind is not installed.
    RuntimeError
        The run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        labels, dumps = run_worker(subjects, Path(folder))
        runs = repeated(labels, dumps)
        return differences([label for label, _ in runs], [min(map(total_of, repeats)) for _, repeats in runs])


def run_worker(subjects: Sequence[str], folder: Path) -> tuple[list[tuple[str, str]], list[Path]]:
    """Run the subjects under callgrind: what each run was, and its dump. Raises what `count` raises."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise Unavailable("valgrind is not installed (Debian: apt install valgrind)")
    out = folder / "out"
    command = [valgrind, "-q", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
    command += [f"--callgrind-out-file={out}", sys.executable, str(HERE / "instructions_worker.py")]
    # A tensor's operators take other code on other processors; hashes would vary from run to run.
    fixed = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment = {**os.environ, **fixed}
    environment.pop("LD_PRELOAD", None)
    run = subprocess.run(
        [*command, str(build_switch(folder)), *subjects],
        capture_output=True,
        text=True,
        env=environment,
        timeout=SECONDS_MAX,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"counting ended with exit status {run.returncode}:\n{run.stderr[-2000:]}")
    labels = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    return labels, [Path(f"{out}.{number}-01") for number in range(1, len(labels) + 1)]


def repeated(labels: Sequence[tuple[str, str]], dumps: Sequence[Path]) -> list[tuple[tuple[str, str], list[Path]]]:
    """Each run with the dumps of its repeats, which follow one another."""
    groups = groupby(zip(labels, dumps, strict=True), key=itemgetter(0))
    return [(label, [dump for _, dump in repeats]) for label, repeats in groups]


def functions(subject: str, *, inclusive: bool) -> dict[str, float]:
    """Instructions per saved tensor (or per plan) by function, as `count` counts them; most first.

    Parameters
    ----------
    subject
        One of `SUBJECTS`.
    inclusive
        Whether a function's figure includes what it calls.
    """
    figures: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        labels, dumps = run_worker([subject], Path(folder))
        for (_, label), (dump, *_) in repeated(labels, dumps):
            times, _, contestant = label.partition(" ")
            sign = (1 if times == "twice" else -1) * (-1 if contestant == "none" else 1)
            for name, instructions in annotated(dump, inclusive=inclusive):
                figures[name] += sign * instructions / UNITS.get(subject, COUNT)
    return dict(sorted(figures.items(), key=lambda item: -item[1]))


def annotated(dump: Path, *, inclusive: bool) -> Iterator[tuple[str, int]]:
    """Functions of one dump and their instructions, as callgrind_annotate prints them."""
    command = ["callgrind_annotate", "--auto=no", "--threshold=100", f"--inclusive={'yes' if inclusive else 'no'}"]
    run = subprocess.run([*command, str(dump)], capture_output=True, text=True, check=True)
    for line in run.stdout.splitlines():
        found = re.match(r"\s*([\d,]+) \([\s\d.]+%\)  (\S.*)$", line)
        if found is not None and "PROGRAM TOTALS" not in line:
            yield re.sub(r"^\S*?:(?=\S)| \[.*\]$", "", found[2]), int(found[1].replace(",", ""))


def print_functions(subject: str, rows: int) -> None:
    """Print the functions that execute most, by themselves and with what they call."""
    for title, inclusive in (("by itself", False), ("with what it calls", True)):
        print(f"{subject}: instructions per {'plan' if subject in UNITS else 'saved tensor'}, {title}")
        for name, instructions in islice(functions(subject, inclusive=inclusive).items(), rows):
            print(f"{instructions:>12,.0f}  {name[:150]}")


def total_of(dump: Path) -> int:
    """Instructions that one dump of callgrind's counts."""
    found = re.search(r"^totals: (\d+)$", dump.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if found is None:
        raise RuntimeError(f"callgrind left no total in {dump.name}")
    return int(found[1])


def differences(labels: Sequence[tuple[str, str]], totals: Sequence[int]) -> list[float]:
    """Take what is fixed away: twice less once; and, for hooks, the engine's less those of no hooks."""
    figures: list[float] = []
    taken: dict[str, int] = {}
    for (subject, label), total in zip(labels, totals, strict=True):
        taken[label] = total
        whole = {"once", "twice"} if subject == "planner" else {f"{n} {who}" for n in ("once", "twice") for who in _WHO}
        if set(taken) != whole:
            continue
        if subject == "planner":
            more = taken["twice"] - taken["once"]
        else:
            ours, none = (taken[f"twice {who}"] - taken[f"once {who}"] for who in _WHO)
            more = ours - none
        figures.append(more / UNITS.get(subject, COUNT))
        taken = {}
    return figures


_WHO = ("offload", "none")


def outside(measured: float, kept: float) -> bool:
    """Whether a figure is further from the committed one than is tolerated, in either direction."""
    return abs(measured / kept - 1) > TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Count and compare; 1 where a figure is outside, 2 where nothing can be compared."""
    parser = argparse.ArgumentParser(prog="instructions.py", description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="commit to what is counted now")
    parser.add_argument("--functions", choices=SUBJECTS, metavar="SUBJECT", help="print callgrind's top functions")
    parser.add_argument("--rows", type=int, default=40, metavar="N", help="of them, so many (40)")
    args = parser.parse_args(argv)
    try:
        if args.functions is not None:
            print_functions(args.functions, args.rows)
            return 0
        kept = {} if args.update else committed()
        figures = dict(zip(SUBJECTS, count(SUBJECTS), strict=True))
    except Unavailable as reason:
        print(f"instructions.py: {reason}", file=sys.stderr)
        return 2
    if args.update:
        rounded = {name: round(figure) for name, figure in figures.items()}
        COMMITTED.write_text(json.dumps({"versions": versions(), "instructions": rounded}, indent=1) + "\n")
        kept = figures
    for name, figure in figures.items():
        words = f"  OUTSIDE ± {TOLERANCE:.0%}" if outside(figure, kept[name]) else ""
        print(f"{name:<18} {figure:>12,.0f}  committed {kept[name]:>12,.0f}  {figure / kept[name] - 1:+.1%}{words}")
    return 1 if any(outside(figure, kept[name]) for name, figure in figures.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
