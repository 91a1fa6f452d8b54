"""The memory of one training step of the demonstration, plain and with offload: the picture on the front page.

    python bench/demo_memory.py --json bench/results/demo-memory-cpu.json [--steps N]

It trains the demo's model twice, each time in its own process, one after the other. It keeps the memory over the last
step and the peaks, and no step times: on a busy machine, those of two runs cannot be compared. Step times of the same
model, in steps that alternate, are measured by `predictions.py`. `docs/charts.py` draws the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from result_file import write_json

FORMAT = "offload-demo-memory/1"
NAMES = ("plain", "offloaded")
KEPT = ("name", "peak_bytes", "parameters", "saved_bytes", "threads", "allocator", "last_step_is_heap")
POINTS_MAX = 250  # of a curve


def train(name: str, options: Sequence[str], folder: str) -> dict[str, Any]:
    """Train as `offload demo` does, and return what was measured.

    Raises
    ------
    RuntimeError
        The process ended without a result.
    """
    offload = [sys.executable, "-m", "offload"]
    command = [*offload, "run", "--", *offload, "demo", "--worker", name, "--device", "cpu", *options]
    environment = {**os.environ, "OFFLOAD_SEARCH_ANEW": "1"}  # as in a first training
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=folder, env=environment)
    events = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] | None = next((event for event in events if event["event"] == "result"), None)
    if run.returncode != 0 or result is None:
        raise RuntimeError(f"the {name} run ended with exit status {run.returncode}; see above")
    return result


def curve(result: dict[str, Any]) -> list[tuple[float, int]]:
    """Memory over the last step: the share of the step that has passed, and bytes."""
    samples = result["last_step_curve"]
    every = max(1, -(-len(samples) // POINTS_MAX))
    peak = max(samples, key=lambda sample: sample[1])
    first, last = samples[0][0], samples[-1][0]
    kept = sorted([*map(tuple, samples[::every]), tuple(peak)])
    return [(round((at - first) / (last - first), 4), used) for at, used in kept]


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the file holds of two runs."""
    equal = all(results[0][key] == results[1][key] for key in ("losses", "gradients"))
    runs = [{**{key: result[key] for key in KEPT}, "last_step": curve(result)} for result in results]
    return {"equal": equal, "runs": runs}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the file; 1 where losses or gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to write the result")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="steps each (24)")
    args, more = parser.parse_known_args(argv)
    about = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        results = [train(name, ["--steps", str(args.steps), *more], folder) for name in NAMES]
    found = summary(results)
    write_json(args.json, {"format": FORMAT, "machine": about, **found})
    print(f"{args.json}: losses and gradients {'equal to the last bit' if found['equal'] else 'DIFFER'}")
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
