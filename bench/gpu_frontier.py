"""Part of the GPU suite: memory against step time of a GPT's training step, beside the alternatives.

    python bench/gpu_frontier.py --json FILE --width WIDTH [--rehearse]

A byte-level GPT in bfloat16, its batch by what device and host can hold. Every contestant trains the same model on the
same data from the same seed; losses and gradients are compared with the plain run's to the last bit. Peaks are the
allocator's over the timed steps. Passes over all contestants follow each other until the time is up.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import contestants
import torch
from contest import spread
from contestants import (
    BY_HAND,
    CHECKPOINT,
    PLAIN,
    SAVE_ON_CPU,
    SELECTIVE,
    SLOWDOWNS,
    TRANSFORMERS,
    Contestant,
    Inapplicable,
)
from models import FAMILIES, Size
from result_file import ResultFile
from training import STEPS_PER_HASH, STEPS_TO_SETTLE, STEPS_TO_STEADY_MAX, Setting, Step, Trainer, same_bits

from offload.options import default_host_limit

GIB = 1 << 30
LENGTH = 4096
LAYERS = {2048: 16, 4096: 8}
SAVED_BYTES_MAX = 24 * GIB
WIDTHS_SAVED = 18  # a block saves about so many values a token and unit of width
STEPS_TIMED = 5
PASSES = 3
# What matters most first: time may not suffice for all.
ORDER = (PLAIN, SLOWDOWNS[2], CHECKPOINT, SLOWDOWNS[4], SAVE_ON_CPU, SELECTIVE, BY_HAND[1], SLOWDOWNS[3], SLOWDOWNS[0],
         TRANSFORMERS, BY_HAND[2], *contestants.ACCELERATOR_ONLY, BY_HAND[0])  # fmt: skip


def order(slow: bool) -> list[Contestant]:
    """Every contestant that makes sense on a GPU, what matters most first."""
    rest = [each for each in contestants.EVERY if each not in ORDER and each is not contestants.TUTORIAL]
    return [*ORDER, *(each for each in rest if slow or not each.slow)]


def choose_size(width: int, device_bytes: int, host_bytes: int) -> Size:
    """Return the largest batch of which a plain step takes half of the device, and its copies fit the host."""
    layers = LAYERS[width]
    per_sequence = WIDTHS_SAVED * width * 2 * LENGTH * layers
    room = min(SAVED_BYTES_MAX, int(0.4 * device_bytes), int(0.7 * host_bytes))
    batch = max(room // per_sequence, 1)
    return {"layers": layers, "width": width, "heads": width // 128, "batch": batch, "length": LENGTH}


def release(device: str) -> None:
    """Give cached memory back, the pinned too where this torch can, so that none has it easier."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()


class Table:
    """The rows so far, one a contestant, kept in the result file as passes add to them."""

    def __init__(self, results: ResultFile, family: str) -> None:
        self._results = results
        self._family = family
        self._rows: dict[str, dict[str, Any]] = {}
        self._plain: list[Step] = []

    def add(self, contestant: Contestant, steps: Sequence[Step], timed: int, figures: dict[str, Any]) -> bool:
        """Take a pass in; False where losses or gradients differ from the plain run's though they must not."""
        if contestant is PLAIN and not self._plain:
            self._plain = list(steps)
        row = self._row(contestant)
        seconds = row["step_seconds"] = [*row.get("step_seconds", []), *(step.seconds for step in steps[-timed:])]
        row |= {**figures, "options": dict(contestant.options)}
        row["step_seconds_median"] = statistics.median(seconds)
        row["step_seconds_spread"] = list(spread(seconds))
        pairs = list(zip(steps, self._plain, strict=False))
        row["equal_losses"] = all(own.loss == plain.loss for own, plain in pairs)
        hashed = [(own.gradients, plain.gradients) for own, plain in pairs if own.gradients and plain.gradients]
        row["equal_gradients"] = bool(hashed) and all(own == plain for own, plain in hashed)
        row["equal_expected"] = contestant.equal
        for other in self._rows.values():
            self._relate(other)
        self._results.set("rows", list(self._rows.values()))
        return bool(row["equal_losses"] and row["equal_gradients"]) or not contestant.equal

    def fail(self, contestant: Contestant, word: str, error: Exception) -> None:
        """Note that a contestant could not run."""
        self._row(contestant)[word] = f"{type(error).__name__}: {error}" if word == "error" else str(error)
        self._results.set("rows", list(self._rows.values()))

    def _row(self, contestant: Contestant) -> dict[str, Any]:
        about = {"family": self._family, "name": contestant.name, "ours": contestant.is_ours}
        return self._rows.setdefault(contestant.name, about)

    def _relate(self, row: dict[str, Any]) -> None:
        base = self._rows.get(PLAIN.name)
        if base is None or "step_seconds_median" not in row:
            return
        row["plain_peak_bytes"] = base["peak_bytes"]
        row["step_over_plain"] = row["step_seconds_median"] / base["step_seconds_median"]
        row["memory_over_plain"] = row["peak_bytes"] / base["peak_bytes"] if base["peak_bytes"] else None


def run(setting: Setting, contestant: Contestant, timed: int, reference: int) -> tuple[list[Step], dict[str, Any]]:
    """Train a fresh model until its plan is steady, then for the timed steps.

    `reference`: number of steps of the plain run before its timed steps; all others are compared with them.
    """
    trainer = Trainer(setting, contestant)
    short = STEPS_TO_SETTLE + timed
    try:
        steps = trainer.settle_plan(STEPS_TO_STEADY_MAX)
        if contestant is PLAIN:
            steps = [trainer.step(hashes=at < short or at % STEPS_PER_HASH == 0) for at in range(reference)]
        steps += trainer.settle(STEPS_TO_SETTLE)
        steps += [trainer.step(hashes=number == timed - 1) for number in range(timed)]
        return steps, trainer.figures()
    finally:
        trainer.close()


def measure(results: ResultFile, setting: Setting, *, passes: int, timed: int, deadline: float) -> bool:
    """Run every contestant in turn, pass after pass, until the time is up; False where one was wrong."""
    table = Table(results, f"{setting.family}, width {setting.size['width']}")
    right, longest = True, 0.0
    given_up: set[str] = set()
    for number in range(passes):
        for contestant in order(slow=number == 1):  # once all others have been measured, and once
            begin = time.monotonic()
            if contestant.name in given_up:
                continue
            if begin + longest * (4 if contestant.slow else 1) > deadline:
                results.append("left_out", {"pass": number, "name": contestant.name})
                continue
            try:
                steps, figures = run(setting, contestant, timed, STEPS_TO_STEADY_MAX if number == 0 else 0)
                right &= table.add(contestant, steps, timed, figures)
            except Inapplicable as reason:
                table.fail(contestant, "inapplicable", reason)
                given_up.add(contestant.name)
            except (MemoryError, torch.OutOfMemoryError, RuntimeError, ImportError) as error:
                table.fail(contestant, "error", error)
                given_up.add(contestant.name)
                right &= not (contestant.is_ours or contestant is PLAIN)  # a peer may run out of memory
            release(setting.device)
            if contestant is not PLAIN or number:  # plain's first pass has more steps than any other
                longest = max(longest, time.monotonic() - begin)
            print(f"{contestant.name}: {time.monotonic() - begin:.1f} s", flush=True)
    return right


def main() -> int:
    """Measure; 1 where a contestant that should train did not, or trained to other bits."""
    parser = argparse.ArgumentParser(prog="gpu_frontier.py")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--width", type=int, choices=sorted(LAYERS), default=2048)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    results = ResultFile(args.json)
    deadline = time.monotonic() + float(os.environ.get("OFFLOAD_PART_SECONDS", "600"))
    if args.rehearse:
        setting = Setting("gpt", FAMILIES["gpt"].tiny, min_tensor_bytes=1024)
    else:
        device_bytes = torch.cuda.get_device_properties(0).total_memory
        setting = Setting("gpt", choose_size(args.width, device_bytes, default_host_limit()), "cuda", "bfloat16")
    results.set("setting", setting.to_dict())
    with same_bits(setting.device):
        passes, timed = (1, 1) if args.rehearse else (PASSES, STEPS_TIMED)
        return 0 if measure(results, setting, passes=passes, timed=timed, deadline=deadline) else 1


if __name__ == "__main__":
    sys.exit(main())
