"""A small ResNet's training step without hooks, with empty hooks, and with offload keeping every tensor.

    python bench/hooked_step.py [--batch N] [--rounds N] [--spill-dir DIR]

All contestants run in turn, in one process. Empty hooks return what they get: what torch itself takes to call hooks.
"detaching hooks" do the least that is correct: they hold a detached tensor, because a node that holds its own output
through a hook is never freed, and compare its version, because torch does not do it for tensors with hooks.
"plain again" is a second model without hooks: its ratio to the first shows how precise the others are. "offload" has a
memory limit above the peak, which keeps the engine's hooks installed; a plan's first steps are timed, and then one of
16. "timed" is the same with every step timed; "by hand" is the manual mode, in which every tensor is too small to swap.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from contest import Samples, alternate, medians, seconds, spread
from hook_rig import NO_LIMIT_BYTES
from models import FAMILIES, batch_of, build, loss_of
from torch.autograd.graph import saved_tensors_hooks

import offload
from offload.options import default_spill_dir

# About 100 ms on two cores, and 233 saved tensors.
SIZE: dict[str, int] = {**FAMILIES["resnet"].quick, "batch": 14}
WARMUPS = 3
NAMES = ("plain", "plain again", "empty hooks", "detaching hooks", "offload", "timed", "by hand")


@dataclass(frozen=True)
class Steps:
    """Seconds of every contestant's steps, in the order taken, and how many tensors a step saves."""

    samples: Samples
    tensors: int

    @property
    def seconds(self) -> dict[str, float]:
        """Median seconds of a step."""
        return medians(self.samples)

    def over_plain(self, name: str) -> list[float]:
        """A contestant's steps relative to the plain step of the same round."""
        return [mine / plain for mine, plain in zip(self.samples[name], self.samples["plain"], strict=True)]

    @property
    def ratios(self) -> dict[str, float]:
        """Medians of `over_plain`."""
        return {name: median(self.over_plain(name)) for name in self.samples}

    @property
    def quartiles(self) -> dict[str, tuple[float, float]]:
        """Lower and upper quartile of `over_plain`."""
        return {name: spread(self.over_plain(name)) for name in self.samples}


def measure_steps(*, rounds: int, spill_dir: str, quick: bool, batch: int = SIZE["batch"]) -> Steps:
    """Run the contestants in turn."""
    size = FAMILIES["resnet"].tiny if quick else {**SIZE, "batch": batch}
    steps: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        handles = {}
        for name in NAMES:
            model = build("resnet", size, seed=0, device="cpu", dtype=torch.float32)
            if name in ("offload", "timed", "by hand"):
                handles[name] = offload.enable(model, spill_dir=spill_dir, **_arguments(name))
                stack.callback(handles[name].disable)
            inputs, target = batch_of("resnet", size, seed=0, step=0, device="cpu", dtype=torch.float32)
            around = {"empty hooks": empty_hooks, "detaching hooks": detaching_hooks}.get(name, nullcontext)
            steps[name] = partial(seconds, partial(train, model, inputs, target, around))
        timed = handles["timed"]._controller
        timed._limits = replace(timed._limits, steady_measured_every=1)
        samples = alternate(steps, rounds=rounds, warmups=WARMUPS)
        kept = handles["offload"].report().kept.values()
    return Steps(samples, sum(count.tensors for count in kept) // (rounds + WARMUPS))


def _arguments(name: str) -> dict[str, Any]:
    if name == "by hand":
        return {"n_tensors": -1, "lb": 1, "min_tensor_bytes": NO_LIMIT_BYTES}
    return {"memory_limit": NO_LIMIT_BYTES}


def empty_hooks() -> AbstractContextManager[object]:
    """Saved-tensor hooks that return what they get."""
    return saved_tensors_hooks(_same, _same)


def detaching_hooks() -> AbstractContextManager[object]:
    """Saved-tensor hooks that do the least that is correct."""
    return saved_tensors_hooks(_detach, _checked)


def _detach(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor.detach(), tensor._version


def _checked(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError("a saved tensor was changed in place")
    return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def train(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    target: torch.Tensor,
    around: Callable[[], AbstractContextManager[object]],
) -> None:
    """One forward and one backward pass."""
    model.zero_grad()
    with around():
        loss_of(model(inputs), target).backward()  # type: ignore[no-untyped-call]


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per contestant: the step, its ratio to plain, and what that is per saved tensor."""
    parser = argparse.ArgumentParser(prog="hooked_step.py", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=SIZE["batch"], metavar="N", help=f"({SIZE['batch']})")
    parser.add_argument("--rounds", type=int, default=155, metavar="N", help="(155)")
    parser.add_argument("--spill-dir", default=default_spill_dir(), metavar="DIR")
    args = parser.parse_args(argv)
    steps = measure_steps(rounds=args.rounds, spill_dir=args.spill_dir, quick=False, batch=args.batch)
    print(f"batch {args.batch}, {steps.tensors} saved tensors, {args.rounds} rounds, {torch.get_num_threads()} threads")
    print(f"{'':<16} {'median':>9} {'over plain':>11} {'quartiles':>16} {'per tensor':>12}")
    for name in NAMES:
        lower, upper = steps.quartiles[name]
        more_us = 1e6 * (steps.ratios[name] - 1) * steps.seconds["plain"] / steps.tensors
        milliseconds = 1e3 * steps.seconds[name]
        ratio = f"{steps.ratios[name]:.4f} × {lower:>8.4f}–{upper:.4f}"
        print(f"{name:<16} {milliseconds:>6.2f} ms {ratio:>28} {more_us:>9.2f} µs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
