"""Compares a plan's predictions with measurements on the CPU: step time, tracked peak, slowdown.

    python bench/predictions.py --json bench/results/predictions-cpu-DATE.json

Each row runs in a separate process, in which a plain and a planned copy of one network train the same batches in turn,
A B A B. Times are those of forward and backward. The tracked peak counts every live tensor; it is measured outside the
engine, with torch's profiler and the engine's blocks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from models import DEMO, FAMILIES, batch_of, build, loss_of
from result_file import write_json

import offload
from offload.devices import allocator
from offload.units import format_bytes, format_seconds

sys.path.append(str(machine.ROOT / "tests"))
from live_bytes import Peak, tell_blocks_of_all

SETTLE_STEPS = 8  # profiling, and what planning anew may take
SEARCH_STEPS_MAX = 60  # with the default knobs, of the search for a plan that keeps `max_slowdown`
MEASURED_STEPS = {"gpt": 5, "resnet": 25}  # several seconds of each, so that one hiccup of the disk is no median
MODELS = {"gpt": DEMO, "resnet": FAMILIES["resnet"].quick}
# Of the unswapped peak. Half of this ResNet's peak is one layer's own: no plan can be below 51 % of it.
FRACTIONS = {"gpt": (0.6, 0.4, 0.3), "resnet": (0.8, 0.6)}


class Contestant:
    """One copy of the network, its optimizer and what was measured of it."""

    def __init__(self, family: str, size: dict[str, int]) -> None:
        self.family, self.size = family, size
        self.model = build(family, size, seed=0, device="cpu", dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.seconds: list[float] = []
        self.input_bytes = 0

    def step(self, number: int, peak: Peak | None = None) -> list[torch.Tensor]:
        """Train one step; the loss and the gradients."""
        x, y = batch_of(self.family, self.size, seed=0, step=number, device="cpu", dtype=torch.float32)
        self.input_bytes = x.nbytes
        begin = time.perf_counter()
        if peak is None:
            loss = loss_of(self.model(x), y)
            loss.backward()
        else:
            with peak.watch():
                loss = loss_of(self.model(x), y)
                loss.backward()
        self.seconds.append(time.perf_counter() - begin)
        results = [loss.detach().clone(), *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return results

    def held_bytes(self) -> int:
        """Parameters, buffers and the optimizer's state."""
        states = [value for row in self.optimizer.state.values() for value in row.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *self.model.buffers(), *states])

    def tracked_peak(self, number: int) -> int:
        """The most bytes of tensors alive during a step."""
        peak = Peak()
        self.step(number, peak)
        return peak.nbytes + self.held_bytes() + self.input_bytes


def measure(family: str, fraction: float | None) -> dict[str, Any]:
    """One row; `fraction`: the memory limit as a share of the unswapped peak, None for the default knobs."""
    size = MODELS[family]
    plain, planned = Contestant(family, size), Contestant(family, size)
    tell_blocks_of_all()
    plain.step(0)
    unswapped_peak = plain.tracked_peak(1)
    plain = Contestant(family, size)
    limit = None if fraction is None else int(fraction * unswapped_peak)
    handle = offload.enable(planned.model, **({} if limit is None else {"memory_limit": limit}))
    equal = True
    measured = MEASURED_STEPS[family]
    settle, number = SETTLE_STEPS, 0
    while number < settle + measured:
        expected = plain.step(number)
        equal = all(map(torch.equal, planned.step(number), expected)) and equal
        number += 1
        if number == settle < SEARCH_STEPS_MAX and not handle.report().settled_steps:
            settle += 1
    report = handle.report()
    peak = planned.tracked_peak(number)
    plan = handle.plan
    assert plan is not None
    plain_seconds, seconds = median(plain.seconds[-measured:]), median(planned.seconds[-measured:])
    return {
        "family": family,
        "wish": "default" if fraction is None else f"memory_limit {fraction:.0%}",
        "bits_equal": equal,
        "limit_bytes": limit,
        "unswapped_peak_bytes": unswapped_peak,
        "predicted_peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": peak,
        "plain_seconds": plain_seconds,
        "predicted_seconds": plan.expected_seconds,
        "measured_seconds": seconds,
        "slowdown": seconds / plain_seconds - 1,
        "stall_seconds": [record.paused_seconds for record in report.steps_measured],
        "swaps": len(plan.swaps),
        "tensors": len(plan.trace.tensors),
        "gap": plan.gap,
        "out_bandwidth": plan.link.out_bandwidth,
        "in_bandwidth": plan.link.in_bandwidth,
        "allocator": allocator.current(),
    }


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    return (
        f"{row['family']:<7} {row['wish']:<17} bits {'equal' if row['bits_equal'] else 'DIFFER'}  peak "
        f"{format_bytes(row['measured_peak_bytes'])} (predicted {format_bytes(row['predicted_peak_bytes'])}, unswapped "
        f"{format_bytes(row['unswapped_peak_bytes'])})  step {format_seconds(row['measured_seconds'])} (predicted "
        f"{format_seconds(row['predicted_seconds'])}, plain {format_seconds(row['plain_seconds'])}: "
        f"{row['slowdown']:+.1%})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 where gradients differ or a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--family", choices=MODELS, action="append", help="only this one (repeatable)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        print(json.dumps(measure(**json.loads(args.worker))))
        return 0
    rows = []
    for family in args.family or MODELS:
        for fraction in (None, *FRACTIONS[family]):
            task = json.dumps({"family": family, "fraction": fraction})
            command = [sys.executable, __file__, "--worker", task]
            environment = allocator.preload_environment()
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(line(rows[-1]), flush=True)
            if args.json is not None:
                write_json(args.json, {"format": "offload-predictions/1", "machine": machine.describe(), "rows": rows})
    kept = all(row["limit_bytes"] is None or row["measured_peak_bytes"] <= row["limit_bytes"] for row in rows)
    return 0 if kept and all(row["bits_equal"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
