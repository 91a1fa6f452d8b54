"""What `instructions.py` runs under callgrind: each subject at N and at 2 N, so that what is fixed cancels out.

python bench/instructions_worker.py SWITCH.so SUBJECT…      "planted" plants a loop for those behind it
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

COUNT = 32  # tensors a step
PLANS = 1
PLANTED_TURNS = 400
# Repeats of each run; the least of them counts: what happens now and then, such as a table that grows, only adds.
REPEATS = 4
PLANNER_REPEATS = 2  # each takes seconds under callgrind, and hardly differs from the other

Subject = dict[str, Callable[[], object]]


def planted_loop() -> None:
    """A loop that does nothing, for the guard's own test."""
    for _ in range(PLANTED_TURNS):
        pass


def hooks(stack: ExitStack, kind: str) -> Subject:
    """Settled steps that save tensors of one kind: the engine's, and one without hooks to take away."""
    from hook_rig import HookRig

    from offload.control.limits import LIMITS

    subject = {}
    for label, count in (("once", COUNT), ("twice", 2 * COUNT)):
        rig = stack.enter_context(closing(HookRig(kind.removesuffix(", measured"), count=count, measured=", " in kind)))
        for contestant in ("offload", "none"):
            for _ in range(LIMITS.manual_measured_steps + 2):  # one is recorded, and the next ones are measured
                rig.step(contestant)
            subject[f"{label} {contestant}"] = partial(rig.step, contestant)
    return subject


def planner() -> Subject:
    """One trace, planned for a quarter of what could be saved."""
    from shapes import transformer

    from offload import plan

    trace = transformer(48, seed=1)
    copied = 2 * sum(tensor.copied_bytes for tensor in trace.tensors)
    bandwidth = copied / (0.8 * sum(node.seconds for node in trace.nodes))
    link = plan.Link(bandwidth, bandwidth, 0.0)
    least, peak = plan.least_feasible_limit(trace), max(plan.unswapped_bytes(trace))

    def run(times: int) -> None:
        for _ in range(times):
            plan.fastest_plan(trace, link, least + (peak - least) // 4)

    run(1)
    return {"once": partial(run, PLANS), "twice": partial(run, 2 * PLANS)}


def plant() -> None:
    """Put the loop into the control path and the planner."""
    import offload.plan
    from offload.runtime.hooks import StepHooks

    pack, fastest_plan = StepHooks.pack, offload.plan.fastest_plan

    def slower_pack(self: StepHooks, tensor: object) -> object:
        planted_loop()
        return pack(self, tensor)  # type: ignore[arg-type]

    def slower_plan(*arguments: object) -> object:
        fastest_plan(*arguments)  # type: ignore[arg-type]
        return fastest_plan(*arguments)  # type: ignore[arg-type]

    StepHooks.pack = slower_pack  # type: ignore[method-assign, assignment]
    offload.plan.fastest_plan = slower_plan  # type: ignore[assignment]


def count(switch: ctypes.CDLL, name: str) -> None:
    """Run a subject at both sizes, a dump of callgrind's for each."""
    with ExitStack() as stack:
        subject = planner() if name == "planner" else hooks(stack, name)
        for label, run in subject.items():
            gc.collect()
            gc.disable()
            run()  # a collection empties Python's free lists
            for _ in range(PLANNER_REPEATS if name == "planner" else REPEATS):
                switch.count_from_here()
                run()
                switch.count_until_here(label.encode())
                print(json.dumps([name, label]), flush=True)
            gc.enable()


def main() -> int:
    """Count the subjects in order."""
    from offload.diagnostics import live

    live.LOOK_SECONDS = math.inf  # the look for `offload top` is due by the clock, so in some steps or in all
    switch = ctypes.CDLL(sys.argv[1])
    for name in sys.argv[2:]:
        if name == "planted":
            plant()
        else:
            count(switch, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
