"""How much the memory of the same script varies: it runs ten times alone, and three times beside another program.

    python bench/same_script.py --json bench/results/same-script-cpu-DATE.json [--family NAME] [--malloc NAME]
                                [--runs N] [--beside N] [--anew]

Each run is a new process that trains a network with the default `max_slowdown`, step by step in turn with plain
training in a second process. The first run begins without a cache; the others begin with what those before them have
measured, as with any script that runs again. With `--anew`, each run begins without a cache. The other program computes
on one processor. Exit status 1 where losses or gradients differ.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import machine
import models
import slowdown
from result_file import ResultFile
from training import Setting

from offload.devices import allocator
from offload.units import format_bytes

FORMAT = "offload-same-script/2"
RUNS, BESIDE = 10, 3
FIGURES = ("plain_seconds", "seconds", "ratio", "kept", "plain_peak_bytes", "peak_bytes", "plain_steady_peak_bytes",
           "steady_peak_bytes", "last_change", "decisions", "bits_equal", "allocator")  # fmt: skip
BUSY = "while True: pass"


@contextmanager
def neighbour() -> Iterator[None]:
    """Another program that keeps one processor busy."""
    program = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        program.kill()
        program.wait()


@contextmanager
def own_cache() -> Iterator[None]:
    """A cache for the processes that start in the block: the link's speed, and searches for plans."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"XDG_CACHE_HOME": folder, "OFFLOAD_SEARCH_ANEW": "0"}
        with mock.patch.dict(os.environ, own):
            yield


def run_once(setting: Setting, steps: int | None, malloc: str, *, beside: bool) -> dict[str, Any]:
    """One run."""
    with neighbour() if beside else nullcontext():
        row = slowdown.measure(setting, slowdown.contestant_of(5), steps, malloc)
    return {"beside": beside, **{key: row[key] for key in FIGURES}}


def line(run: dict[str, Any]) -> str:
    """One run in words."""
    return (
        f"{'beside another program' if run['beside'] else 'alone':<22} memory {format_bytes(run['peak_bytes'])} of "
        f"{format_bytes(run['plain_peak_bytes'])}, step {run['ratio']:.3f} × "
        f"({'kept' if run['kept'] else 'NOT KEPT'}), bits {'equal' if run['bits_equal'] else 'DIFFER'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where losses or gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to keep the runs")
    parser.add_argument("--family", choices=[*models.FAMILIES, *models.OTHERS], default="gpt")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="full")
    parser.add_argument("--malloc", choices=allocator.MALLOCS, default="", help="by default the first installed one")
    parser.add_argument("--runs", type=int, default=RUNS, help="alone")
    parser.add_argument("--beside", type=int, default=BESIDE, help="beside a program that computes on one processor")
    parser.add_argument("--anew", action="store_true", help="each run begins without what earlier ones have measured")
    parser.add_argument("--steps", type=int, help="to settle, and again to measure")
    args = parser.parse_args(argv)
    least = 1024 if args.size == "tiny" else None
    setting = Setting(args.family, getattr(models.family_of(args.family), args.size), min_tensor_bytes=least)
    results = ResultFile(args.json)
    about = {"format": FORMAT, "machine": machine.describe(), "family": args.family, "anew": args.anew, "runs": []}
    for name, value in about.items():
        results.set(name, value)
    with own_cache() if not args.anew else nullcontext():
        return measure(args, setting, results)


def measure(args: argparse.Namespace, setting: Setting, results: ResultFile) -> int:
    """Measure and print all runs."""
    equal = True
    for number in range(args.runs + args.beside):
        with own_cache() if args.anew else nullcontext():
            run = run_once(setting, args.steps, args.malloc, beside=number >= args.runs)
        equal = equal and run["bits_equal"]
        results.append("runs", run)
        print(line(run), flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
