"""`offload plan TRACE.json`: prints the plan of a recorded step, as text or JSON.

It reads the trace, calls the planner and prints the plan. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offload.cli.plan_tables import options_json, print_options, print_plan
from offload.cli.script import profile_script
from offload.diagnostics.page_path import page_path
from offload.plan import (
    InfeasibleLimitError,
    Link,
    Plan,
    fastest_plan,
    fastest_swaps,
    least_feasible_limit,
    least_memory_plan,
    make_plan,
    manual_plan,
)
from offload.plan.recompute import has_recipes
from offload.plan.trace import Trace
from offload.units import (
    check_slowdown,
    format_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)

if TYPE_CHECKING:
    from offload.control.profile_listener import RecordedStep

__all__ = ["HELP", "add_parser", "options", "run", "run_script"]

HELP = "plan what to swap in a recorded step"
DEFAULT_SLOWDOWN = 0.05
_SLOWDOWNS = (0.05, 0.10, 0.25)
_LINK = ("out_bandwidth", "in_bandwidth", "latency")
_NOISE = 0.01  # relative gain in time or memory; one that is smaller needs no trial step
_INFEASIBLE = 3
_REFUSED = 2


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `plan` command.

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
        "plan",
        help=HELP,
        usage="offload plan [OPTION …] TRACE.json  |  offload plan [OPTION …] train.py [ARGUMENT …]",
        description="Plan which saved tensors to swap in a recorded step, and when. Without a goal, compare several.",
        epilog="exit status: 0 planned, 2 a mistake in the call or the trace, 3 no plan keeps the limit",
    )
    parser.add_argument(
        "trace",
        metavar="TRACE.json | train.py [ARGUMENT …]",
        help="a trace written by handle.trace().save(...); or a script, run until its first steps are recorded",
    )
    wish = parser.add_argument_group("goal")
    wish.add_argument(
        "--memory-limit",
        type=_argument(parse_bytes, "--memory-limit"),
        metavar="8GiB",
        help="the fastest plan within this limit",
    )
    wish.add_argument(
        "--max-slowdown",
        type=_argument(_slowdown, "--max-slowdown"),
        metavar="0.05",
        help="the plan of least memory within this slowdown",
    )
    wish.add_argument("--n-tensors", type=int, metavar="N", help="manual mode: number of tensors; -1 all, 0 none")
    wish.add_argument("--lb", type=_lead, metavar="K", help="manual mode: lead in backward nodes, or auto (default)")
    wish.add_argument(
        "--exact",
        action="store_true",
        help="with --memory-limit alone: find and prove the fastest swap-only plan (small traces; needs scipy)",
    )
    wish.add_argument(
        "--no-recompute",
        dest="recompute",
        action="store_false",
        help="plan swaps only, and ignore the recipes of the trace",
    )
    link = parser.add_argument_group("link", "default: the link with which the trace was recorded")
    for name, words in (("--out-bandwidth", "out of device memory"), ("--in-bandwidth", "into device memory")):
        link.add_argument(name, type=_argument(parse_bandwidth, name), metavar="12GB/s", help=words)
    latency = _argument(lambda text, name: parse_seconds(text, name, zero=True), "--latency")
    link.add_argument("--latency", type=latency, metavar="10us", help="fixed time of every copy")
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="the plan as JSON")
    shown.add_argument("--explain", action="store_true", help="a sentence for every tensor")
    shown.add_argument(
        "--plot", type=page_path, metavar="plan.html", help="write a page: memory and lanes over the step"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Plan the trace that `args` names and print the result.

    Parameters
    ----------
    args : argparse.Namespace
        The parsed arguments; see `add_parser`.

    Returns
    -------
    int
        Exit status: 0, 2 for a mistake in the call or the trace, 3 if no plan keeps the limit.
    """
    try:
        trace = Trace.load(args.trace)
        link = _link(args, trace.link)
    except (ValueError, OSError) as error:
        if isinstance(error.__cause__, (json.JSONDecodeError, UnicodeDecodeError)):
            error = ValueError(f"{args.trace} is neither a trace (JSON) nor a script (*.py): {error.__cause__}")
        return _refuse(error)
    return _show(args, trace, link)


def run_script(args: argparse.Namespace, script_args: Sequence[str]) -> int:
    """Run a training script until its `offload.enable` has profiled a step, and print the plans for this step.

    If recomputation could improve the swap-only plan (see `_trial_bytes`), the next step is its trial step, and the
    plan may recompute.

    Parameters
    ----------
    args : argparse.Namespace
        The parsed arguments; see `add_parser`. `args.trace` is the script's path.
    script_args : sequence of str
        The script's own arguments.

    Returns
    -------
    int
        Exit status: 0, 2 for a mistake in the call or a script that profiles no step, 3 if no plan keeps the limit;
        the script's own status if it fails before.
    """
    if not Path(args.trace).is_file():
        return _refuse(FileNotFoundError(2, "no such script", args.trace))
    step = profile_script(args.trace, script_args, lambda step: _trial_bytes(args, step), quiet=args.json)
    if isinstance(step, int):
        return step
    if step is None:
        problem = "finished no training step under offload.enable; call offload.enable(model) before its training loop"
        return _refuse(ValueError(f"{args.trace} {problem}"))
    return _show(args, step.trace, _link(args, step.link), step.host_bytes_max)


def _show(args: argparse.Namespace, trace: Trace, link: Link, host_bytes_max: int | None = None) -> int:
    """Make and print the plans that `args` request."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan, title = _plan(args, trace, link)
    except InfeasibleLimitError as error:
        return _infeasible(error, as_json=args.json)
    except (ValueError, ImportError) as error:
        return _refuse(error)
    for warning in caught:
        print(f"offload plan: warning: {warning.message}", file=sys.stderr)
    if args.plot is not None:
        from offload.diagnostics.html.plan import render

        try:
            args.plot.write_text(render(plan, Path(args.trace).name, limit_bytes=args.memory_limit), encoding="utf-8")
        except OSError as error:
            return _refuse(error)
    if args.json:
        rows = {}
        if host_bytes_max is not None:
            rows["options"] = options_json(options(trace, link, recompute=args.recompute), host_bytes_max)
        print(json.dumps({**plan.to_dict(), **rows}))
    elif args.explain:
        print(plan.explain())
    elif _undecided(args):
        print_options(options(trace, link, recompute=args.recompute), host_bytes_max)
    else:
        print_plan(plan, title)
    return 0


def _trial_bytes(args: argparse.Namespace, step: RecordedStep) -> int | None:
    """Return the most bytes that a trial step may take; None if recomputation could not improve the requested plan."""
    if not args.recompute or args.exact or args.n_tensors is not None:
        return None
    trace = step.trace
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = _plan(args, trace, _link(args, step.link))[0]
    except (InfeasibleLimitError, ValueError):
        return None  # `_show` reports the error
    if args.memory_limit is not None and args.max_slowdown is None:
        could_improve = plan.expected_seconds > (1 + _NOISE) * plan.compute_seconds
    else:
        could_improve = bool(plan.swaps) or plan.peak_bytes > (1 + _NOISE) * least_feasible_limit(trace)
    return (args.memory_limit or plan.peak_bytes) if could_improve else None


def _refuse(error: Exception) -> int:
    print(f"offload plan: {error}", file=sys.stderr)
    return _REFUSED


def options(trace: Trace, link: Link, *, recompute: bool = True) -> list[tuple[str, Plan]]:
    """Return the plans worth comparing: none, three slowdowns, least memory.

    Parameters
    ----------
    trace : Trace
        The step.
    link : Link
        Bandwidths and latency.
    recompute : bool, default True
        Whether tensors that have a recipe may be recomputed.

    Returns
    -------
    list of (str, Plan)
        Name and plan, in the order of falling memory.
    """
    plans = [("unswapped", make_plan(trace, link, ()))]
    for slowdown in _SLOWDOWNS:
        plans.append((f"{slowdown:.0%} slowdown", least_memory_plan(trace, link, slowdown, recompute=recompute)))
    least = least_feasible_limit(trace)
    return [*plans, ("least memory", fastest_plan(trace, link, least, recompute=recompute) if least else plans[0][1])]


def _plan(args: argparse.Namespace, trace: Trace, link: Link) -> tuple[Plan, str]:
    """Return the plan that the arguments request, and its name."""
    if args.lb is not None and args.n_tensors is None:
        raise ValueError("--lb needs --n-tensors; write --n-tensors N --lb K, or neither")
    for name, wish in (("--memory-limit", args.memory_limit), ("--max-slowdown", args.max_slowdown)):
        if args.n_tensors is not None and wish is not None:
            raise ValueError(f"use {name} (automatic) or --n-tensors (manual), not both")
    if args.exact and (args.memory_limit is None or args.n_tensors is not None or args.max_slowdown is not None):
        raise ValueError("--exact needs --memory-limit and no other goal; write --memory-limit 8GiB --exact")
    if args.exact and args.recompute and has_recipes(trace):
        raise ValueError("--exact works for swap-only plans; write --exact --no-recompute")
    if args.n_tensors is not None:
        lead: int | Literal["auto"] = "auto" if args.lb is None else args.lb
        return manual_plan(trace, link, args.n_tensors, lead), "by hand"
    if args.memory_limit is None or args.max_slowdown is not None:
        slowdown = DEFAULT_SLOWDOWN if args.max_slowdown is None else args.max_slowdown
        plan = least_memory_plan(trace, link, slowdown, args.memory_limit, recompute=args.recompute)
        return plan, f"{slowdown:.3g} slowdown"
    plan = fastest_plan(trace, link, args.memory_limit, recompute=args.recompute)
    if not args.exact:
        return plan, "this plan"
    exact = fastest_swaps(trace, link, args.memory_limit, plan.swaps)
    name = "exact" if exact.optimal else "exact, not proven"
    return make_plan(trace, link, exact.swaps, args.memory_limit), name


def _link(args: argparse.Namespace, recorded: Link | None) -> Link:
    """Return the recorded link, with the values that `args` give instead."""
    given = {name: value for name in _LINK if (value := getattr(args, name)) is not None}
    if recorded is not None:
        return replace(recorded, **given)
    missing = [f"--{name.replace('_', '-')} 12GB/s" for name in _LINK[:2] if name not in given]
    if missing:
        raise ValueError(f"the trace does not contain a link; write {' '.join(missing)} (offload doctor measures it)")
    return Link(**given)


def _undecided(args: argparse.Namespace) -> bool:
    return args.memory_limit is None and args.max_slowdown is None and args.n_tensors is None


def _infeasible(error: InfeasibleLimitError, *, as_json: bool) -> int:
    lines = [
        f"offload plan: no plan keeps {error.limit_bytes} bytes ({format_bytes(error.limit_bytes)}); the least "
        f"feasible limit is {error.least_limit_bytes} bytes ({format_bytes(error.least_limit_bytes)})"
    ]
    lines += [f"  {format_bytes(reason.bytes)}: {reason.text}" for reason in error.reasons]
    print("\n".join(lines), file=sys.stderr)
    if as_json:
        reasons = [{"bytes": reason.bytes, "text": reason.text} for reason in error.reasons]
        print(json.dumps({"error": "infeasible", "least_feasible_bytes": error.least_limit_bytes, "reasons": reasons}))
    return _INFEASIBLE


def _argument(parse: Callable[[str, str], float], name: str) -> Callable[[str], float]:
    """Return `parse` with one argument for argparse, which then shows the message of its error."""

    def convert(text: str) -> float:
        try:
            return parse(text, name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name}: ")) from error

    return convert


def _slowdown(text: str, name: str) -> float:
    number: object = text
    with suppress(ValueError):
        number = int(text) if text.isdecimal() else float(text)
    return check_slowdown(number, name)


def _lead(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not understood; write a number of nodes of at least 1, or auto")
    return int(text)
