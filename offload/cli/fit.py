"""`offload fit train.py --memory 12GiB`: finds out whether the step of an unmodified script fits, and how.

It runs the script until its first step has been profiled, and prints the answer of `offload.capacity`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.script import exit_status, profile_script, run_script
from offload.diagnostics.page_path import page_path
from offload.plan import unswapped_bytes
from offload.units import parse_bytes

if TYPE_CHECKING:
    from offload.capacity.answer import Fit
    from offload.capacity.device import AbsentDevice
    from offload.capacity.optimizer_step import OptimizerWatch
    from offload.capacity.replay import Call, Run
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
        epilog="exit status: 0 it fits, 2 a mistake in the call or no training step, 3 it does not fit; that of the "
        "script if it fails",
    )
    parser.add_argument("script", metavar="train.py", help="the script; it need not call offload.enable")
    parser.add_argument("--memory", metavar="12GiB", help="the limit; default: the memory of the device")
    parser.add_argument(
        "--device",
        metavar="12GiB,12GB/s,40TFLOP/s",
        help="estimate for a GPU that is not here: memory, link in each direction, speed in matrix products",
    )
    parser.add_argument(
        "--without-data",
        action="store_true",
        help="where the step cannot run here: parameters have a shape and no data, memory is counted, and times follow "
        "from operations and the speed of --device",
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.add_argument(
        "--plot", type=page_path, metavar="fit.html", help="write a page: step time by memory, the plan"
    )
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
        not fit; the script's own status if it fails before its first step is over, or while the optimizer's
        is awaited.
    """
    from offload.capacity.device import parse_device

    try:
        device = None if args.device is None else parse_device(args.device, "--device")
        memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    except ValueError as error:
        return _refuse(str(error))
    if not Path(args.script).is_file():
        return _refuse(f"{args.script}: no such script; arguments after -- are passed to the script")
    if Path(args.script).suffix == ".ipynb":
        return _refuse(
            f"{args.script} is a notebook: call offload.fit(model, make_batch) in it, or make a script of it: jupyter "
            f"nbconvert --to script {args.script}"
        )
    if args.without_data:
        if device is None:
            return _refuse("--without-data needs --device: what cannot run here cannot be timed here")
        found = _count(args.script, words, device, quiet=args.json)
    else:
        found = _measure(args.script, words, quiet=args.json)
    if isinstance(found, int):
        return found
    fit, trace, link = _answer(args.script, found, memory, device)
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


@dataclass(frozen=True)
class _Found:
    """A script's step, the memory of its optimizers, and the call of its model."""

    step: RecordedStep
    watch: OptimizerWatch
    call: Call | None
    replay: Run
    models: Sequence[str]
    notes: Sequence[str]
    is_counted: bool = False  # without data


def _measure(script: str, words: Sequence[str], *, quiet: bool) -> _Found | int:
    """Run the script and measure its step; an exit status if there is none."""
    from offload.capacity.optimizer_step import watching_optimizers
    from offload.capacity.replay import replayed
    from offload.capacity.unmodified import enable_models
    from offload.diagnostics.oom import is_out_of_memory

    state_bytes = 0  # that the step contains

    def trial_bytes(step: RecordedStep) -> int | None:
        nonlocal state_bytes
        state_bytes = watch.state_bytes
        return _trial_bytes(step)

    try:
        with watching_optimizers() as watch, enable_models(watch) as enabled:
            step = profile_script(script, words, trial_bytes, quiet=quiet, goes_on=enabled.await_optimizer)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _refuse(
            f"{script} does not fit here: {str(error).splitlines()[0] if str(error) else 'out of memory'}. With "
            "--without-data and a --device its step is counted without data"
        )
    if isinstance(step, int):
        return step
    if step is None:
        return _refuse(f"{script} finished no training step: forward in training mode, and backward")
    step = _holding(step, watch.state_bytes - state_bytes)
    notes = [f"Measured on {step.device}: one step of the script, swapped as far as possible."]
    return _Found(step, watch, enabled.call, replayed, enabled.names, notes)


def _count(script: str, words: Sequence[str], device: AbsentDevice, *, quiet: bool) -> _Found | int:
    """Run the script with parameters that have no data, and count its step; an exit status if there is none."""
    from offload.capacity.without_data import CountedScript, how_counted
    from offload.torch_compat.fake import NEEDS_VALUES

    counted = CountedScript(device)
    try:
        with counted.running():
            run_script(script, words, quiet=quiet)
    except SystemExit as end:
        if counted.step() is None and (status := exit_status(end)) is not None:
            return status
    except NEEDS_VALUES as error:
        return _refuse(
            f"{script} reads the values of a tensor before its first optimizer step is over, and without data there "
            f"are none: {str(error).splitlines()[0]}"
        )
    step = counted.step()
    if step is None:
        return _refuse(f"{script} finished no training step: forward in training mode, and backward")
    return _Found(step, counted.watch, counted.call, counted.run, (), [how_counted(device)], is_counted=True)


def _holding(step: RecordedStep, nbytes: int) -> RecordedStep:
    """Return the step with more optimizer state in memory: gradients accumulate in it, before the optimizer's first."""
    base_bytes = tuple(nbytes + each for each in step.trace.base_bytes)
    fixed_bytes = tuple(nbytes + each for each in step.fixed_bytes)
    return replace(step, trace=replace(step.trace, base_bytes=base_bytes), fixed_bytes=fixed_bytes)


def _trial_bytes(step: RecordedStep) -> int | None:
    """Return the most that the trial step may take: the peak of the unswapped step, or the device's memory if less."""
    if not step.trace.tensors:
        return None
    return min(max(unswapped_bytes(step.trace)), step.device_bytes)


def _answer(script: str, found: _Found, memory: int | None, device: AbsentDevice | None) -> tuple[Fit, Trace, Link]:
    from offload.capacity.answer import answer, on_device
    from offload.capacity.device import matmul_flops
    from offload.capacity.optimizer_step import with_optimizer
    from offload.plan.rescale import SizedStep

    watch, link, notes = found.watch, found.step.link, list(found.notes)
    sized, about_sizes = _sized(found)
    step = with_optimizer(sized, watch.peak_bytes, watch.seconds)
    fixed_bytes = [*found.step.fixed_bytes, watch.peak_bytes] if watch.peak_bytes else found.step.fixed_bytes
    if device is not None and not found.is_counted:
        import torch

        step, note = on_device(step, device, matmul_flops(torch.device(found.step.device)))
        link, notes = device.link, [note]
    if len(found.models) > 1:
        names = ", ".join(found.models)
        notes.append(f"The script trains {len(found.models)} models ({names}); this is about the first one.")
    if watch.is_incomplete or not watch.peak_bytes:
        notes.append(
            "The memory of the optimizer's own step is not counted, or not all of it: none stepped, or it could not be "
            "recorded."
        )
    is_one = len(found.models) <= 1  # with several models, the state may be another one's
    notes += watch.notes(link) if is_one else []
    if found.step.no_recipes:
        notes.append(f"Recomputation could not be tried: {found.step.no_recipes}.")
    notes += about_sizes
    limit_bytes = memory or (device.memory_bytes if device is not None else found.step.device_bytes)
    moved = watch.moved if is_one else None
    fit = answer(Path(script).name, step, link, limit_bytes, fixed_bytes, notes, moved)
    return fit, step.trace if isinstance(step, SizedStep) else step, link


def _sized(found: _Found) -> tuple[SizedStep | Trace, list[str]]:
    """Return the step as a function of its batch size, if it has one, and how that is known."""
    from offload.capacity.replay import sized
    from offload.plan.rescale import SizedStep, in_proportion

    step = found.step
    if step.batch is None:
        return step.trace, []
    is_it = f"{step.batch}, the first dimension of the first input"
    made = sized(step, found.call, found.replay) if found.call is not None else "the script enables offload itself"
    if isinstance(made, SizedStep):
        return made, [
            f"Other batch sizes: the model ran forward and backward twice more, with {step.batch} items and with "
            f"{step.batch // 2}. Its tensors, its other memory and its durations are taken as linear, through these "
            f"two; what the script's loss and loop need, as proportional to the batch ({is_it})."
        ]
    return in_proportion(step.trace, step.batch, step.fixed_bytes), [
        "Other batch sizes are estimated from this one: saved tensors, inputs, temporaries and durations in "
        f"proportion to the batch ({is_it}); parameters, gradients, buffers and optimizer state as they are. The model "
        f"could not be run with half of the batch: {made}."
    ]


def _refuse(problem: str) -> int:
    print(f"offload fit: {problem}", file=sys.stderr)
    return _REFUSED
