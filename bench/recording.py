"""What recording operators and dropping tensors costs a settled step: time of the training thread, as a share of it.

    python bench/recording.py [--network NAME] [--json FILE]

Each network has a process of its own, in which it trains over a throttled link, so that the plan
recomputes. Counted are what hooks do to drop tensors, what the recorder does around each operator, and what torch needs
to ask a mode of Python's at all, which is measured apart with an operator on one element. What counting itself takes is
measured with a mode that does nothing, and taken away. Running recipes is no part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch
from models import OTHERS
from recomputation import NETWORKS, Contestant, limit_and_peak, min_bytes
from recomputation_tables import RECORDING_SHARE_MAX
from result_file import write_json

import offload
from offload.devices import allocator
from offload.recomputation.following import FollowingRecorder
from offload.runtime.recomputation import DroppedTensors
from offload.torch_compat.dispatch import OperatorMode, push_mode, remove_mode

LINK = "0.15GB/s"
NAMES = ("gpt", "resnet", "unet", "vit", "lstm", "encoder")
SETTLE_STEPS = 24  # a plan is revised until about the 17th step, and the first step of each records all operators
MEASURED_STEPS = 7
GOAL = RECORDING_SHARE_MAX
_TURNS = 2000


class Tally:
    """Seconds and calls of one step, by what they were spent on; those of a call within another are not its own."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner = 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, counted under a name."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.thread_time() - begin
                self.seconds[name] += seconds - self._inner
                self.calls[name] += 1
                self._inner = outer + seconds

        return call


class Timed:
    """An operator whose own time is told apart from the recorder's."""

    def __init__(self, func: Any, tally: Tally) -> None:
        self.func = func
        self.call = tally.timed("operators", func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)

    def __str__(self) -> str:
        return str(self.func)


def watch(tally: Tally) -> None:
    """Count what recording does, in every step from now on."""
    known: dict[Any, Timed] = {}
    record = FollowingRecorder.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        timed = known.get(func) or known.setdefault(func, Timed(func, tally))
        return counted(self, timed, types, args, kwargs)

    counted = tally.timed("recording", record)
    FollowingRecorder.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    for name in ("drop", "saved", "passed", "pause", "begin", "end"):
        setattr(DroppedTensors, name, tally.timed(name, getattr(DroppedTensors, name)))


class _Passing(OperatorMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def mode_seconds() -> float:
    """What an operator takes longer because torch asks a mode of Python's, whatever that does."""
    one, mode = torch.ones(1), _Passing()  # type: ignore[no-untyped-call]

    def run() -> float:
        begin = time.thread_time()
        for _ in range(_TURNS):
            torch.mul(one, one)
        return time.thread_time() - begin

    found = []
    for _ in range(9):
        plain = run()
        push_mode(mode)
        found.append(run() - plain)
        remove_mode(mode)
    return median(found) / _TURNS


def counting_seconds(contestant: Contestant) -> float:
    """What counting adds to each call, between the operators of a step: with caches as cold as there."""
    tally, known = Tally(), {}  # type: ignore[var-annotated]
    passing = tally.timed("nothing", _Passing.__torch_dispatch__)

    class Counted(_Passing):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            timed = known.get(func) or known.setdefault(func, Timed(func, tally))
            return passing(self, timed, types, args, kwargs)

    mode, forward = Counted(), contestant.model.forward  # type: ignore[no-untyped-call]

    def counted(*args: Any) -> Any:
        push_mode(mode)
        try:
            return forward(*args)
        finally:
            remove_mode(mode)

    contestant.model.forward = counted  # type: ignore[method-assign]
    found = []
    for number in range(5):
        tally.seconds.clear()
        tally.calls.clear()
        contestant.step(number)
        found.append(tally.seconds["nothing"] / tally.calls["nothing"])
    return median(found)


def measure(name: str, size_name: str, settle: int, measured: int) -> dict[str, Any]:
    """One row."""
    network = NETWORKS[name]
    size = getattr(network, size_name)
    limit, _ = limit_and_peak(network, size)
    each, counting = mode_seconds(), counting_seconds(Contestant(network, size))
    contestant = Contestant(network, size)
    tally = Tally()
    watch(tally)
    handle = offload.enable(contestant.model, memory_limit=limit, min_tensor_bytes=min_bytes(size))
    rows = []
    for number in range(settle + measured):
        tally.seconds.clear()
        tally.calls.clear()
        dropped = handle.report().recomputed.tensors
        contestant.step(number)
        dropped = handle.report().recomputed.tensors - dropped
        rows.append((dict(tally.seconds), dict(tally.calls), dropped, contestant.processor_seconds[-1]))
    calls, drops = rows[-1][1], rows[-1][2]
    spent = {
        key: max(0.0, median(row[0].get(key, 0.0) for row in rows[-measured:]) - counting * calls[key]) for key in calls
    }
    operators = calls.get("recording", 0)
    recording = spent.get("recording", 0.0) + operators * each
    hooks = sum(spent.get(key, 0.0) for key in ("drop", "saved", "passed", "pause", "begin", "end"))
    step = median(row[3] for row in rows[-measured:])
    return {
        "network": name,
        "operators": operators,
        "drops": drops,
        "step_seconds": step,
        "mode_seconds_each": each,
        "counting_seconds_each": counting,
        "recorder_seconds_each": spent.get("recording", 0.0) / max(operators, 1),
        "drop_seconds_each": spent.get("drop", 0.0) / max(drops, 1),
        "saved_seconds_each": spent.get("saved", 0.0) / max(calls.get("saved", 0), 1),
        "other_seconds": sum(spent.get(key, 0.0) for key in ("passed", "pause", "begin", "end")),
        "share_recording": recording / step,
        "share_hooks": hooks / step,
        "share": (recording + hooks) / step,
    }


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    return (
        f"{row['network']:<9}{row['operators']:>5} operators recorded, each {1e6 * row['mode_seconds_each']:.1f} us of "
        f"torch's and {1e6 * row['recorder_seconds_each']:.1f} us of the recorder's; {row['drops']} drops, each "
        f"{1e6 * row['drop_seconds_each']:.0f} us; {1e6 * row['saved_seconds_each']:.0f} us a saved storage; the rest "
        f"{1e6 * row['other_seconds']:.0f} us of a step of {1e3 * row['step_seconds']:.0f} ms: "
        f"recording {row['share_recording']:.2%} + hooks {row['share_hooks']:.2%} = {row['share']:.2%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 where a step spends more than the goal allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--network", choices=NAMES, action="append", help="only this one (repeatable)")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="quick")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--settle", type=int, default=SETTLE_STEPS, help="steps before those that are measured")
    parser.add_argument("--measured", type=int, default=MEASURED_STEPS, help="steps that are measured")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.worker is not None:
        print(json.dumps(measure(args.worker, args.size, args.settle, args.measured)))
        return 0
    rows = []
    for name in args.network or NAMES:
        passed_on = [f"--{key}={getattr(args, key)}" for key in ("threads", "size", "settle", "measured")]
        command = [sys.executable, __file__, *passed_on, "--worker", name]
        environment = {**os.environ, **allocator.preload_environment(), "OFFLOAD_THROTTLE": LINK}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(line(rows[-1]), flush=True)
        if args.json is not None:
            write_json(args.json, {"format": "offload-recording/1", "machine": machine.describe(), "rows": rows})
    over = [row["network"] for row in rows if row["share"] > GOAL]
    print(f"more than {GOAL:.0%} of the step: {', '.join(over) or 'none'}")
    return 1 if over else 0


NETWORKS.update(encoder=OTHERS["encoder"])

if __name__ == "__main__":
    raise SystemExit(main())
