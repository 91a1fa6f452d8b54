"""Part of the GPU suite: memory against step time of a GPT's training step, beside the alternatives.

    python bench/gpu_frontier.py --json FILE [--rehearse]

A byte-level GPT of width 2048 in bfloat16, its depth and batch by what device and host can hold.
Every contestant trains the same model on the same data from the same seed; losses and gradients are
compared with the plain run's to the last bit. Peaks are the allocator's over the timed steps.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from contest import spread
from result_file import ResultFile
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

import offload
from offload.demo_model import VOCABULARY, ByteGPT, Shape
from offload.options import default_host_limit

GIB = 1 << 30
WIDTH, HEADS, LENGTH, LAYERS = 2048, 16, 2048, 16
SAVED_BYTES_MAX = 8 * GIB
WIDTHS_SAVED = 16  # a block saves about so many values a token and unit of width
SEED = 0
STEPS_TO_SETTLE = 2  # the first is profiled, and the pool pins its memory in it
STEPS_TIMED = 5
PASSES = 2
LOOKAHEADS = (8, 4, 16, 2)
SHARES = (0.5, 0.25, 0.75)


@dataclass
class Setting:
    """What is trained, and where."""

    device: str
    shape: Shape
    dtype: torch.dtype
    min_tensor_bytes: int | str


@dataclass
class Contestant:
    """One way to train the same model."""

    name: str
    checkpointed: bool = False
    saves_on_cpu: bool = False
    enable: dict[str, Any] | None = None  # what offload.enable is given


@dataclass
class Outcome:
    """What one pass of a contestant measured."""

    step_seconds: list[float]
    losses: list[str]  # as float.hex
    gradients: list[Tensor]  # of the last step, on the host
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    report: dict[str, Any] | None


def choose_shape(device_bytes: int, host_bytes: int) -> Shape:
    """Return the largest shape of which a plain step takes half of the device, and its copies fit the host."""
    per_sequence = WIDTHS_SAVED * WIDTH * 2 * LENGTH * LAYERS
    room = min(SAVED_BYTES_MAX, int(0.4 * device_bytes), int(0.7 * host_bytes))
    batch = max(room // per_sequence, 1)
    layers = LAYERS if room >= per_sequence else max(LAYERS * room // per_sequence, 1)
    return Shape(layers=layers, width=WIDTH, heads=HEADS, batch=batch, length=LENGTH)


def build(setting: Setting, checkpointed: bool) -> tuple[ByteGPT, torch.optim.Optimizer]:
    """Make the model and its optimizer on the device, the same ones every time."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(setting.dtype)
    try:
        with torch.device(setting.device):
            model = ByteGPT(setting.shape, checkpointed=checkpointed)
    finally:
        torch.set_default_dtype(torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def batch_of(setting: Setting, step: int) -> tuple[Tensor, Tensor]:
    """Draw a step's input and target bytes."""
    generator = torch.Generator().manual_seed(SEED + step)
    size = (setting.shape.batch, setting.shape.length + 1)
    drawn = torch.randint(VOCABULARY, size, generator=generator).to(setting.device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def train_step(model: nn.Module, around: AbstractContextManager[Any], x: Tensor, y: Tensor) -> Tensor:
    """Forward and backward; the loss."""
    with around:
        loss = functional.cross_entropy(model(x).view(-1, VOCABULARY).float(), y.view(-1))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def run(contestant: Contestant, setting: Setting, steps_timed: int) -> Outcome:
    """Train a fresh model for the settling and the timed steps."""
    device = setting.device
    model, optimizer = build(setting, contestant.checkpointed)
    handle = None
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    if contestant.saves_on_cpu:
        around = lambda: save_on_cpu(pin_memory=device == "cuda")  # noqa: E731
    if contestant.enable is not None:
        options = {"min_tensor_bytes": setting.min_tensor_bytes, **contestant.enable}
        handle = offload.enable(model, **options)
        around = handle.step
    losses: list[Tensor] = []
    taken: list[float] = []
    for step in range(STEPS_TO_SETTLE + steps_timed):
        optimizer.zero_grad(set_to_none=True)
        x, y = batch_of(setting, step)
        synchronize(device)
        if step == STEPS_TO_SETTLE and device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses.append(train_step(model, around(), x, y))
        optimizer.step()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    is_cuda = device == "cuda"
    outcome = Outcome(
        step_seconds=taken[STEPS_TO_SETTLE:],
        losses=[float(loss.item()).hex() for loss in losses],
        peak_allocated_bytes=torch.cuda.max_memory_allocated() if is_cuda else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved() if is_cuda else None,
        gradients=[p.grad.cpu() for p in model.parameters() if p.grad is not None],
        report=handle.report().to_dict() if handle is not None else None,
    )
    if handle is not None:
        handle.disable()
    return outcome


def release(device: str) -> None:
    """Give cached memory back, the pinned too where this torch can, so that none has it easier."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()


def contestants(eligible: int) -> list[Contestant]:
    """Every way to train, what matters most first: time may not suffice for all."""
    lead = LOOKAHEADS[0]
    by_lead = [Contestant(f"offload all, lb {lb}", enable={"n_tensors": -1, "lb": lb}) for lb in LOOKAHEADS]
    by_share = [
        Contestant(
            f"offload {share:.0%}, lb {lead}",
            enable={"n_tensors": max(round(share * eligible), 1), "lb": lead},
        )
        for share in SHARES
    ]
    return [
        Contestant("plain"),
        by_lead[0],
        Contestant("checkpoint per block", checkpointed=True),
        by_share[0],
        Contestant("save_on_cpu", saves_on_cpu=True),
        *by_lead[1:],
        *by_share[1:],
    ]


def count_eligible(setting: Setting) -> int:
    """Storages that a step of the engine would swap, found by one step."""
    model, _ = build(setting, checkpointed=False)
    options: dict[str, Any] = {"min_tensor_bytes": setting.min_tensor_bytes, "n_tensors": -1}
    with offload.enable(model, **options) as handle:
        train_step(model, handle.step(), *batch_of(setting, 0))
        return handle.report().swapped.tensors


class Table:
    """The rows so far, one a contestant, kept in the result file as passes add to them."""

    def __init__(self, results: ResultFile) -> None:
        self._results = results
        self._rows: dict[str, dict[str, Any]] = {}
        self._plain: Outcome | None = None

    def add(self, name: str, outcome: Outcome) -> bool:
        """Take a pass in; False where losses or gradients differ from the plain run's."""
        if self._plain is None:
            self._plain = outcome
        plain = self._plain
        pairs = zip(plain.gradients, outcome.gradients, strict=True)
        row = self._rows.setdefault(name, {"name": name, "step_seconds": [], "equal": True})
        row["step_seconds"] += outcome.step_seconds
        row["step_seconds_median"] = statistics.median(row["step_seconds"])
        row["step_seconds_spread"] = spread(row["step_seconds"])
        row["peak_allocated_bytes"] = outcome.peak_allocated_bytes
        row["peak_reserved_bytes"] = outcome.peak_reserved_bytes
        row["losses"] = outcome.losses
        row["equal_losses"] = outcome.losses == plain.losses
        row["equal_gradients"] = all(torch.equal(ours, theirs) for theirs, ours in pairs)
        row["equal"] = row["equal"] and row["equal_losses"] and row["equal_gradients"]
        row["report"] = outcome.report
        self._relate(row)
        self._results.set("rows", list(self._rows.values()))
        return bool(row["equal"])

    def fail(self, name: str, error: Exception) -> None:
        """Note that a contestant could not run."""
        row = self._rows.setdefault(name, {"name": name, "step_seconds": []})
        row["error"] = f"{type(error).__name__}: {error}"
        self._results.set("rows", list(self._rows.values()))

    def _relate(self, row: dict[str, Any]) -> None:
        base = self._rows["plain"]
        row["step_over_plain"] = row["step_seconds_median"] / base["step_seconds_median"]
        if row["peak_allocated_bytes"] is not None:
            ours, theirs = row["peak_allocated_bytes"], base["peak_allocated_bytes"]
            row["peak_allocated_over_plain"] = ours / theirs


def measure(results: ResultFile, setting: Setting, passes: int, deadline: float) -> bool:
    """Run every contestant in turn, pass after pass, until the time is up; False where one was wrong."""
    eligible = count_eligible(setting)
    results.set("eligible_storages", eligible)
    release(setting.device)
    table = Table(results)
    right = True
    longest = 0.0
    for number in range(passes):
        for contestant in contestants(eligible):
            begin = time.monotonic()
            if begin + longest > deadline:
                results.append("left_out", {"pass": number, "name": contestant.name})
                continue
            try:
                outcome = run(contestant, setting, STEPS_TIMED)
                right &= table.add(contestant.name, outcome)
                del outcome
            except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
                table.fail(contestant.name, error)
                # A peer may run out of memory; the baseline and the engine may not.
                right &= contestant.checkpointed or contestant.saves_on_cpu
            release(setting.device)
            longest = max(longest, time.monotonic() - begin)
            print(f"{contestant.name}: {time.monotonic() - begin:.1f} s", flush=True)
    return right


def main() -> int:
    """Measure; 1 where a contestant that should train did not, or trained to other bits."""
    parser = argparse.ArgumentParser(prog="gpu_frontier.py")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    results = ResultFile(args.json)
    deadline = time.monotonic() + float(os.environ.get("OFFLOAD_PART_SECONDS", "600"))
    if args.rehearse:
        setting = Setting("cpu", Shape(2, 64, 2, 2, 64), torch.float32, 1024)
    else:
        torch.use_deterministic_algorithms(True)
        # Deterministic mode would also fill every fresh tensor, which no training run pays.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        device_bytes = torch.cuda.get_device_properties(0).total_memory
        setting = Setting("cuda", choose_shape(device_bytes, default_host_limit()), torch.bfloat16, "1MiB")
    about = {"shape": asdict(setting.shape), "dtype": str(setting.dtype), "seed": SEED}
    results.set("setting", {**about, "deterministic": not args.rehearse})
    return 0 if measure(results, setting, 1 if args.rehearse else PASSES, deadline) else 1


if __name__ == "__main__":
    sys.exit(main())
