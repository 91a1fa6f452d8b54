"""`offload fit train.py --memory 12GiB`: finds out whether the step of an unmodified script fits, and how.

It runs the script until its first step has been profiled, and prints the answer of `offload.capacity`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.script import profile_script
from offload.plan import unswapped_bytes
from offload.units import parse_bytes

if TYPE_CHECKING:
    from offload.capacity.answer import Fit
    from offload.capacity.device import AbsentDevice
    from offload.control.profile_listener import RecordedStep
    from offload.plan.rescale import SizedStep
    from offload.plan.trace import Link, Trace

__all__ = ["HELP", "add_parser", "run"]

HELP = "tell whether the training step of an unmodified script fits into a limit, and how"
_DOES_NOT_FIT = 3
_REFUSED = 2


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `fit` command.

    Parameters
    ----------
    subparsers : argparse's subparsers action
        The subparsers of the `offload` command.

    Returns
    -------
    argparse.ArgumentParser
        The command's parser; `run` takes what it parses.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "fit",
        help=HELP,
        allow_abbrev=False,
        usage="offload fit [OPTION …] train.py [ARGUMENT …] [-- ARGUMENT …]",
        description="Run a training script, which need not mention offload, until its first step has been profiled "
        "under the least memory. Tell whether the step fits into a limit: as it is, with swapping, or not. Options may "
        "come before or after the script's name; arguments after -- are passed to the script.",
        epilog="exit status: 0 it fits, 2 a mistake in the call or no training step, 3 it does not fit",
    )
    parser.add_argument("script", metavar="train.py", help="the script; it need not call offload.enable")
    parser.add_argument("--memory", metavar="12GiB", help="the limit; default: the memory of the device")
    parser.add_argument(
        "--device",
        metavar="12GiB,12GB/s,40TFLOP/s",
        help="estimate for a GPU that is not here: memory, link in each direction, speed in matrix products",
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.add_argument("--plot", type=Path, metavar="fit.html", help="write a page: step time by memory, the plan")
    return parser


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the script that `args` names and print the answer.

    Parameters
    ----------
    args : argparse.Namespace
        The parsed arguments; see `add_parser`.
    words : sequence of str
        The script's own arguments.

    Returns
    -------
    int
        Exit status: 0 if the step fits, 2 for a mistake in the call or a script that trains nothing, 3 if the step does
        not fit; the script's own status if it exits before its first step is over.
    """
    from offload.capacity.device import parse_device
    from offload.capacity.optimizer_step import watching_optimizers, with_optimizer
    from offload.capacity.unmodified import enable_models

    try:
        device = None if args.device is None else parse_device(args.device, "--device")
        memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    except ValueError as error:
        return _refuse(str(error))
    if not Path(args.script).is_file():
        return _refuse(f"{args.script}: no such script; arguments after -- are passed to the script")
    with watching_optimizers() as watch, enable_models(watch) as models:
        step = profile_script(args.script, words, _trial_bytes, quiet=args.json)
    if isinstance(step, int):
        return step
    if step is None:
        return _refuse(f"{args.script} finished no training step: forward in training mode, and backward")
    notes = []
    if len(models) > 1:
        notes.append(f"The script trains {len(models)} models ({', '.join(models)}); this is about the first one.")
    if watch.is_incomplete or not watch.peak_bytes:
        notes.append(
            "The memory of the optimizer's own step is not counted: none stepped, or it could not be recorded."
        )
    fit, trace, link = _answer(args.script, with_optimizer(step, watch.peak_bytes), memory, device, notes)
    if args.plot is not None:
        from offload.capacity.page import render

        try:
            args.plot.write_text(render(fit, trace, link), encoding="utf-8")
        except OSError as error:
            return _refuse(str(error))
    if args.json:
        print(json.dumps(fit.to_dict()))
    else:
        print(fit)
    return 0 if fit.fits else _DOES_NOT_FIT


def _trial_bytes(step: RecordedStep) -> int | None:
    """Return the most that the trial step may take: the peak of the unswapped step, or the device's memory if less."""
    if not step.trace.tensors:
        return None
    return min(max(unswapped_bytes(step.trace)), step.device_bytes)


def _answer(
    script: str, step: RecordedStep, memory: int | None, device: AbsentDevice | None, more: Sequence[str]
) -> tuple[Fit, Trace, Link]:
    from offload.capacity.answer import answer, on_device
    from offload.capacity.device import matmul_flops
    from offload.plan.rescale import in_proportion

    trace, link, notes = step.trace, step.link, []
    if device is not None:
        import torch

        trace, note = on_device(trace, device, matmul_flops(torch.device(step.device)))
        link = device.link
        notes.append(note)
    else:
        notes.append(f"Measured on {step.device}: one step of the script, swapped as far as possible.")
    notes += more
    if step.no_recipes:
        notes.append(f"Recomputation could not be tried: {step.no_recipes}.")
    sized: SizedStep | Trace = trace
    if step.batch is not None:
        sized = in_proportion(trace, step.batch, step.fixed_bytes)
        notes.append(
            "Other batch sizes are estimated from this one: saved tensors, inputs, temporaries and durations in "
            f"proportion to the first dimension of the first input ({step.batch}); parameters, gradients, buffers and "
            "optimizer state as they are."
        )
    limit_bytes = memory or (device.memory_bytes if device is not None else step.device_bytes)
    return answer(Path(script).name, sized, link, limit_bytes, step.fixed_bytes, notes), trace, link


def _refuse(problem: str) -> int:
    print(f"offload fit: {problem}", file=sys.stderr)
    return _REFUSED
