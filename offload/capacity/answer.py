"""The answer to "will it fit?": what a recorded step needs, what each choice costs within a limit, the largest batch.

From a recorded step to `Fit`, which `offload fit` prints and `offload.fit` returns. Nothing runs here.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offload.capacity.device import AbsentDevice
from offload.capacity.optimizer_step import SMALLEST_BYTES, MovedState
from offload.plan import Plan, Reason, fastest_plan, least_feasible_limit, make_plan, unswapped_bytes
from offload.plan.bounds import unavoidable_bytes
from offload.plan.recompute import has_recipes
from offload.plan.rescale import SizedStep, largest_batch, retimed
from offload.plan.trace import OPTIMIZER_NODE, Link, Trace
from offload.units import format_bytes, parse_bytes, round_up_bytes

__all__ = ["Choice", "Fit", "answer", "on_device"]

_REASONS_MAX = 5
_TIMES_FROM = 9.0  # larger slowdowns are given as multiples: 10 × instead of +900 %
KEEP, SWAP, RECOMPUTE = "keep everything", "swap", "swap or recompute"
MOVED = "state moved"


@dataclass(frozen=True)
class Choice:
    """One way to run the step.

    Attributes
    ----------
    name : str
        ``"keep everything"``, ``"swap"``, ``"swap or recompute"``, or ``"state moved"``: as
        ``"swap or recompute"`` (``"swap"``, if no recipes were tried), with optimizer state in the store between steps.
    plan : Plan or None
        The fastest plan within the limit at the batch size that was recorded; None if none stays within it.
    largest_batch : int or None
        The largest batch size within the limit; 0 if not even one item fits. None: not known, or not limited.
    largest_plan : Plan or None
        The fastest plan within the limit at that batch size.
    largest_min_tensor_bytes : int or None
        With this `min_tensor_bytes`, every tensor that `largest_plan` moves can move. None: with the default, too.
    moved : MovedState or None
        The optimizer state that is moved.
    """

    name: str
    plan: Plan | None = field(repr=False)
    largest_batch: int | None = None
    largest_plan: Plan | None = field(default=None, repr=False)
    largest_min_tensor_bytes: int | None = None
    moved: MovedState | None = field(default=None, repr=False)

    def seconds(self, plan: Plan) -> float | None:
        """Return the seconds of a step with one of its plans; None if state moves at an unknown speed."""
        if self.moved is None:
            return plan.expected_seconds
        return plan.expected_seconds + self.moved.seconds(plan) if plan.link.is_steady else None

    def slowdown(self, plan: Plan) -> float | None:
        """Return how much longer a step takes with one of its plans, as a fraction; None where it is not known."""
        seconds = self.seconds(plan)
        return seconds if seconds is None else seconds / plan.compute_seconds - 1 if plan.compute_seconds else 0.0

    def cost(self, plan: Plan) -> str:
        """Return what a plan needs, in words: memory at the peak, and slowdown."""
        return f"{format_bytes(plan.peak_bytes)}, {self.slower(plan)}"

    def slower(self, plan: Plan) -> str:
        """Return the slowdown in words."""
        slowdown = self.slowdown(plan)
        if slowdown is None:
            return "slowdown not measured"
        return f"{100 * max(0.0, slowdown):+.1f} %" if slowdown < _TIMES_FROM else f"{1 + slowdown:,.0f} × the time"

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, in seconds and bytes; slowdowns are fractions of the step time. None: not known."""
        return {
            "name": self.name,
            "fits": self.plan is not None,
            **(self._figures(self.plan) if self.plan is not None else {}),
            "moved_state_bytes": self.moved.nbytes if self.moved is not None else 0,
            "largest_batch": self.largest_batch,
            "largest": None
            if self.largest_plan is None
            else {**self._figures(self.largest_plan), "min_tensor_bytes": self.largest_min_tensor_bytes},
        }

    def _figures(self, plan: Plan) -> dict[str, float | None]:
        return {
            "peak_bytes": plan.peak_bytes,
            "step_seconds": self.seconds(plan),
            "compute_seconds": plan.compute_seconds,
            "slowdown": self.slowdown(plan),
            "swapped_bytes": plan.host_bytes,
        }


@dataclass(frozen=True)
class Fit:
    """Whether a training step fits into a limit, and how: `str` returns one screen of text.

    Attributes
    ----------
    name : str
        The script, or the model's class.
    limit_bytes : int
        The limit, in bytes.
    batch : int or None
        Batch size of the recorded step; None if it is not known.
    choices : tuple of Choice
        In this order: keep everything; swap; swap or recompute, if recipes were tried; state moved, if there is
        optimizer state that can move.
    peak_bytes, least_bytes : int
        Peak of the recorded step with every tensor kept; and the least peak, if everything that can leave memory does.
    in_the_way : tuple of Reason
        What is on the device under every plan at the node that needs `least_bytes`, largest first.
    notes : tuple of str
        How the figures are known.
    """

    name: str
    limit_bytes: int
    batch: int | None
    choices: tuple[Choice, ...]
    peak_bytes: int
    least_bytes: int
    in_the_way: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Choice | None:
        """The fastest choice that fits, preferring the simpler one; None if none does."""
        fitting = [(choice.seconds(choice.plan), choice) for choice in self.choices if choice.plan is not None]
        return min(fitting, key=lambda pair: math.inf if pair[0] is None else pair[0])[1] if fitting else None

    @property
    def fits(self) -> bool:
        """Whether some choice fits."""
        return self.best is not None

    @property
    def line(self) -> str | None:
        """The line to add to the script, with the limit; None if nothing fits, or nothing is needed."""
        if self.best is None or self.best.name == KEEP:
            return None
        text = round_up_bytes(self.limit_bytes)
        limit = f'"{text}"' if parse_bytes(text) == self.limit_bytes else str(self.limit_bytes)
        moved = self.best.moved
        state = ""
        if moved is not None:
            state = f", optimizer={'optimizer' if moved.optimizers == 1 else 'optimizers'}, optimizer_state=True"
        return f"offload.enable(model, memory_limit={limit}{state})"

    def verdict(self) -> str:
        """Return the answer in one sentence."""
        best, limit = self.best, format_bytes(self.limit_bytes)
        if best is None:
            least = format_bytes(self.least_bytes)
            moved = " and moved optimizer state" if any(choice.moved is not None for choice in self.choices) else ""
            return f"DOES NOT FIT in {limit}: it needs {least} even with all possible swaps{moved}"
        if best.name == KEEP:
            return f"FITS AS IT IS in {limit}: {format_bytes(self.peak_bytes)} at the peak of a step"
        assert best.plan is not None
        ways = (
            ("swapping", best.plan.swaps),
            ("recomputation", best.plan.recomputes),
            ("moved optimizer state", best.moved),
        )
        how = " and ".join(word for word, is_used in ways if is_used)
        needs = f"{format_bytes(self.peak_bytes)} as it is"
        is_known = best.slowdown(best.plan) is not None
        slower = f"at {best.slower(best.plan)} a step" if is_known else best.slower(best.plan)
        return f"FITS WITH {how.upper()} in {limit}, {slower} ({needs})"

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Return a table of the choices: the names of its columns, and its rows."""
        at = "" if self.batch is None else f"batch {self.batch}"
        head = ["", at or "as it is", "swapped out"] + ([] if self.batch is None else ["largest batch", "there"])
        rows = []
        for choice in self.choices:
            nbytes = choice.plan.host_bytes if choice.plan is not None and choice.plan.swaps else 0
            nbytes += choice.moved.nbytes if choice.moved is not None else 0
            out = format_bytes(nbytes) if nbytes and choice.plan is not None else "-"
            row = [choice.name, "too large" if choice.plan is None else choice.cost(choice.plan), out]
            if self.batch is not None:
                largest = choice.largest_batch
                row += ["any" if largest is None else "none" if largest == 0 else f"{largest:,}"]
                row += ["-" if choice.largest_plan is None else choice.cost(choice.largest_plan)]
            rows.append(row)
        return head, rows

    def __str__(self) -> str:
        from io import StringIO

        from offload.diagnostics.table import write_table

        out = StringIO()
        out.write(f"{self.name}: {self.verdict()}\n\n")
        head, rows = self.rows()
        write_table(out, rows, head=head)
        out.write("\n" + "\n".join(self.remarks()))
        return out.getvalue()

    def remarks(self) -> list[str]:
        """Return what follows the table: what is in the way, the line to add, how the figures are known."""
        lines = []
        if not self.fits:
            lines += ["In the way:", *(f"  {format_bytes(each.bytes)}  {each.text}" for each in self.in_the_way), ""]
            largest = max(self.choices, key=lambda choice: choice.largest_batch or 0, default=None)
            if largest is not None and largest.largest_batch:
                nbytes = largest.largest_min_tensor_bytes
                setting = "" if nbytes is None else f' with min_tensor_bytes="{round_up_bytes(nbytes)}"'
                limit = round_up_bytes(self.least_bytes)
                lines += [f"Use a batch of {largest.largest_batch:,}{setting}, or a limit of {limit}.", ""]
        if self.line is not None:
            made = "the model" if self.best is None or self.best.moved is None else "the model and its optimizer"
            lines += [f"Add after the line that makes {made}:", f"  import offload; {self.line}", ""]
        return [*lines, *(textwrap.fill(note, 100) for note in self.notes)]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings, as ``offload fit --json`` prints it."""
        best = self.best
        return {
            "name": self.name,
            "verdict": self.verdict(),
            "fits": None if best is None else best.name,
            "limit_bytes": self.limit_bytes,
            "peak_bytes": self.peak_bytes,
            "least_bytes": self.least_bytes,
            "batch": self.batch,
            "choices": [choice.to_dict() for choice in self.choices],
            "in_the_way": [{"bytes": reason.bytes, "text": reason.text} for reason in self.in_the_way],
            "line": self.line,
            "notes": list(self.notes),
        }


def on_device(step: SizedStep | Trace, device: AbsentDevice, flops_here: float) -> tuple[SizedStep | Trace, str]:
    """Return the step with its durations estimated for another device, and a note that says how they are estimated.

    Bytes stay. Durations change by the ratio of the speeds in matrix products; copies take what the link says.
    """
    factor = flops_here / device.flops
    note = (
        f"Estimated for a device that is not here ({device}). Bytes and durations were measured here. Durations "
        f"are multiplied by {factor:.3g}, the ratio of the speeds of matrix products ({flops_here / 1e12:.3g} TFLOP/s "
        "here). Other kernels may gain more or less, and may save other tensors."
    )
    if isinstance(step, Trace):
        return retimed(step, factor, device.link), note
    slopes = tuple(factor * slope for slope in step.second_slopes)
    return replace(step, trace=retimed(step.trace, factor, device.link), second_slopes=slopes), note


def answer(
    name: str,
    step: SizedStep | Trace,
    link: Link,
    limit_bytes: int,
    fixed_bytes: Sequence[int],
    notes: Sequence[str] = (),
    moved: MovedState | None = None,
) -> Fit:
    """Return whether a recorded step fits.

    Parameters
    ----------
    name
        The script, or the model's class.
    step
        The step as a function of its batch size; or a trace, if the batch size is not known.
    link
        The link.
    limit_bytes
        The limit.
    fixed_bytes
        By node: parameters, gradients, buffers and optimizer state.
    notes
        How the figures are known.
    moved
        What moving the optimizers' state would change; None if there is nothing to move.
    """
    trace = least = step.trace if isinstance(step, SizedStep) else step
    keep = Choice(KEEP, *_within(step, trace, limit_bytes, _peak, lambda at: make_plan(at, link, ())))
    choices = [keep]
    for title, recompute in ((SWAP, False), (RECOMPUTE, True)):
        if not recompute or has_recipes(trace):
            choices.append(Choice(title, *_swapping(step, trace, link, limit_bytes, recompute=recompute)))
    if moved is not None:
        least = moved.within(trace)
        then = replace(step, trace=least) if isinstance(step, SizedStep) else least
        found = _swapping(then, least, link, limit_bytes, recompute=has_recipes(trace))
        choices.append(Choice(MOVED, *found, moved=moved))
        less = [before - after for before, after in zip(trace.base_bytes, least.base_bytes, strict=True)]
        fixed_bytes = [max(0, nbytes - each) for nbytes, each in zip(fixed_bytes, less, strict=True)]
    return Fit(
        name=name,
        limit_bytes=limit_bytes,
        batch=step.batch if isinstance(step, SizedStep) else None,
        choices=tuple(choices),
        peak_bytes=_peak(trace),
        least_bytes=least_feasible_limit(least),
        in_the_way=_in_the_way(least, fixed_bytes),
        notes=tuple(notes),
    )


def _swapping(
    step: SizedStep | Trace, trace: Trace, link: Link, limit_bytes: int, *, recompute: bool
) -> tuple[Plan | None, int | None, Plan | None, int | None]:
    def plan(at: Trace) -> Plan:
        return fastest_plan(at, link, limit_bytes, recompute=recompute)

    return _within(step, trace, limit_bytes, least_feasible_limit, plan)


def _within(
    step: SizedStep | Trace,
    trace: Trace,
    limit_bytes: int,
    peak_bytes: Callable[[Trace], int],
    plan: Callable[[Trace], Plan],
) -> tuple[Plan | None, int | None, Plan | None, int | None]:
    """The plan of the step, the largest batch, the plan at that batch, and the `min_tensor_bytes` that it needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = plan(trace) if peak_bytes(trace) <= limit_bytes else None
        if not isinstance(step, SizedStep):
            return here, None, None, None
        largest = largest_batch(step, limit_bytes, peak_bytes)
        there = plan(step.at(largest)) if largest else None
    if largest is None or there is None or largest >= step.batch or not (there.swaps or there.recomputes):
        return here, largest, there, None
    # All that the recorded step moves has at least SMALLEST_BYTES, and with the batch it shrinks at most in proportion.
    least_bytes = max(1, SMALLEST_BYTES * largest // step.batch)
    return here, largest, there, 1 << (least_bytes.bit_length() - 1)


def _peak(trace: Trace) -> int:
    return max(unswapped_bytes(trace), default=0)


def _in_the_way(trace: Trace, fixed_bytes: Sequence[int]) -> tuple[Reason, ...]:
    """What is resident under every plan at the node that needs most, largest first."""
    unavoidable = unavoidable_bytes(trace)
    if not unavoidable:
        return ()
    k = unavoidable.index(max(unavoidable))
    name, fixed = trace.nodes[k].name, min(fixed_bytes[k], trace.base_bytes[k])
    if name == OPTIMIZER_NODE:
        return (Reason(fixed, "parameters, gradients, optimizer state and temporaries while the optimizer steps"),)
    while_it_runs = f"while node {k} ({name}) runs"
    reasons = [
        Reason(fixed, "parameters, buffers, gradients, optimizer state"),
        Reason(trace.base_bytes[k] - fixed, f"inputs, temporaries and what the loop holds {while_it_runs}"),
    ]
    for tensor in trace.tensors:
        if tensor.produced <= k <= tensor.last_forward or tensor.first_backward <= k <= tensor.last_use:
            reasons.append(
                Reason(tensor.bytes, f"saved by {trace.nodes[tensor.produced].name}, in use {while_it_runs}")
            )
    reasons.sort(key=lambda reason: -reason.bytes)
    return tuple(reason for reason in reasons[:_REASONS_MAX] if reason.bytes)
