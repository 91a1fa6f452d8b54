"""Runs seeds of the walk against the mutants' build, one process with that build and without the package.

    python -m campaign.seeds CORE DIRECTORY FIRST COUNT [EDGE]      (with tests/ on PYTHONPATH)

prints one line of JSON: what was run and what failed. With EDGE, the guard of that name is left out and the first
failure ends the run. Every seed walks every tier under the stepped schedule, where it replays exactly, and the log of
each device walk is shown to the oracle; one seed in ten also runs under random delays and under plain threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIERS = ("slab", "slab+disk", "direct")
SEEDS = 60  # of a short run: they miss every guard (test_mutants.py), the last at the 53rd, most within the first few
STEPS = 60
PAUSE_US_MAX = 300
THREADED_EVERY = 10


@dataclass
class Tally:
    """What a run of seeds came to."""

    seeds: int = 0
    walks: int = 0
    returned: int = 0
    faults: int = 0
    operations_judged: int = 0
    seconds: float = 0
    failures: list[str] = field(default_factory=list)
    oracle_reports: list[str] = field(default_factory=list)
    digests: dict[str, int] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Join another worker's."""
        for name, value in asdict(other).items():
            mine = getattr(self, name)
            if isinstance(mine, dict):
                mine.update(value)
            else:
                setattr(self, name, max(mine, value) if name == "seconds" else mine + value)


def spill_directory() -> str | None:
    """Memory rather than disk: the walks are about order, and there are thousands."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def schedules(seed: int, is_only: bool) -> tuple[str, ...]:
    """Which schedules a seed walks; all of them where it is the only one."""
    return ("stepped", "delays", "threads") if is_only or seed % THREADED_EVERY == 0 else ("stepped",)


def run(core: Any, directory: str, seeds: range, edge: str = "") -> Tally:
    """Walk `seeds` in this process."""
    from campaign import oracle  # imports torch

    core.set_mutant(edge)
    tally = Tally()
    begin = time.monotonic()
    for seed in seeds:
        tally.seeds += 1
        for schedule in schedules(seed, is_only=len(seeds) == 1):
            core.set_pause(0 if schedule == "stepped" else PAUSE_US_MAX)
            for tier in TIERS:
                judged = schedule == "stepped" and tier != "direct"
                answer = core.walk(tier, schedule, seed, STEPS, directory, judged)
                tally.walks += 1
                tally.returned += answer["returned"]
                tally.faults += answer["faults"]
                where = f"seed {seed}, {tier}, {schedule}"
                if schedule == "stepped":
                    tally.digests[where] = answer["digest"]
                if answer["failure"]:
                    tally.failures.append(f"{where}: {answer['failure']}")
                if judged:
                    tally.operations_judged += len(answer["log"])
                    tally.oracle_reports += [f"{where}: {line}" for line in oracle.reports(answer["log"])[:1]]
        if edge and tally.failures:
            break
    tally.seconds = time.monotonic() - begin
    if len(seeds) > 100:
        tally.digests = {}
    return tally


def slices(first: int, count: int, workers: int) -> Iterator[range]:
    """`count` seeds from `first` on, cut among workers."""
    for worker in range(workers):
        begin = first + count * worker // workers
        end = first + count * (worker + 1) // workers
        if end > begin:
            yield range(begin, end)


def run_apart(core: Path, first: int, count: int, edge: str = "", timeout: float | None = None) -> Tally:
    """Walk seeds in processes of their own, as many as there are cores. A process that dies is a failure too."""
    few = count <= THREADED_EVERY  # a second process would take longer to begin than all of them take
    workers = 1 if edge or few else len(os.sched_getaffinity(0))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
    total = Tally()
    with tempfile.TemporaryDirectory(dir=spill_directory()) as directory:
        children = []
        for part in slices(first, count, workers):
            command = [
                sys.executable,
                "-m",
                "campaign.seeds",
                str(core),
                directory,
                str(part.start),
                str(len(part)),
                edge,
            ]
            pipe = subprocess.PIPE
            children.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
        for child in children:
            try:
                out, err = child.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
                total.failures.append(f"hangs: no end after {timeout} s")
                continue
            if child.returncode == 0:
                total.add(Tally(**json.loads(out)))
            else:
                total.failures.append(f"dies with status {child.returncode}: {err.strip()[-300:]}")
    return total


if __name__ == "__main__":
    from campaign.build import load_core

    path, spill, begin_at, how_many, *left_out = sys.argv[1:]
    seeds_to_run = range(int(begin_at), int(begin_at) + int(how_many))
    print(json.dumps(asdict(run(load_core(path), spill, seeds_to_run, *left_out))))
