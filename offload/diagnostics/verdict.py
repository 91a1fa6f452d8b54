"""What a planned step needs and takes, in three lines that are understood without the manual.

A session fills in the figures, and a report begins with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from offload.units import alike_bytes, alike_seconds, format_bytes, format_seconds, round_up_bytes

__all__ = ["Kind", "Verdict"]

Kind = Literal["off", "no step", "profiling", "planned", "nothing to swap", "by hand", "refused", "unplanned"]

_SAME = 0.005  # figures that differ by less are the same in words
_SHORT = 1e-4  # seconds; a wait of less is not worth a word


@dataclass(frozen=True)
class Verdict:
    """What a planned step needs and takes; the profiled one, which is slower and needs less memory, is not counted.

    Where several shapes were trained, it is about the one with most steps. None: not known.

    Attributes
    ----------
    kind : str
        ``"planned"``; ``"nothing to swap"``: the plan keeps every tensor; ``"by hand"``: `n_tensors`; ``"profiling"``:
        no planned step yet; ``"refused"``: no plan keeps `memory_limit`; ``"unplanned"``: the steps never run twice in
        the same way; ``"no step"``; ``"off"``: ``n_tensors=0``.
    device : str
        Where the model is.
    wish : str
        What was asked of `offload.enable`, as it is written there.
    is_disabled : bool
        Whether the engine is off by now.
    activation_bytes : int or None
        Activations in memory at the peak of a step, measured: the most in one of the last measured steps.
        Activations are the tensors saved for backward that could be swapped.
    activation_bytes_planned : int or None
        The same as the plan predicts it.
    activation_bytes_unswapped : int or None
        The same with nothing swapped, as the recorded step saved them.
    step_bytes_planned, step_bytes_unswapped : int or None
        Everything on the device at the peak of a step, as the plan predicts it with its swaps and without: parameters,
        gradients, optimizer state, temporaries and activations.
    reference_steps : int
        Steps that waited for each copy at once, whose computation `compute_seconds` is; 0: it is estimated.
    steps_measured : int
        How many steps the three figures below are the medians of; of the present plan.
    step_seconds : float or None
        Forward and backward, without the optimizer, as measured, in seconds.
    step_seconds_planned : float or None
        The same as the plan predicts it.
    compute_seconds : float or None
        About what they take without offload: the computation of measured steps, between the engine's hooks.
    tensors, tensors_swapped, tensors_recomputed : int
        How many tensors of a step could be swapped, how many are, and how many are dropped and recomputed instead.
    recompute_seconds : float
        How long the plan has a step recompute, in seconds.
    late_tensors : int
        How many of them the last measured step waited for when it needed them.
    late_seconds : float
        How long it waited for them in all, in seconds.
    late_seconds_planned : float
        How long the plan has a step wait for copies, in seconds.
    is_removed : bool
        Whether the hooks are off, because there is nothing to swap.
    limit_bytes, least_limit_bytes : int or None
        Where the limit was refused: what was asked for, and the least that a plan can keep.
    reason : str
        Why nothing is swapped, or no step is planned.
    problems : tuple of str
        What is wrong.
    process_bytes, process_bytes_peak : int or None
        Resident set of this process, now and at most, where it cannot follow: it is more than what the tensors take.
    process_reason : str
        Why it cannot.
    """

    kind: Kind
    device: str
    wish: str = ""
    is_disabled: bool = False
    activation_bytes: int | None = None
    activation_bytes_planned: int | None = None
    activation_bytes_unswapped: int | None = None
    step_bytes_planned: int | None = None
    step_bytes_unswapped: int | None = None
    reference_steps: int = 0
    steps_measured: int = 0
    step_seconds: float | None = None
    step_seconds_planned: float | None = None
    compute_seconds: float | None = None
    tensors: int = 0
    tensors_swapped: int = 0
    tensors_recomputed: int = 0
    recompute_seconds: float = 0.0
    late_tensors: int = 0
    late_seconds: float = 0.0
    late_seconds_planned: float = 0.0
    is_removed: bool = False
    limit_bytes: int | None = None
    least_limit_bytes: int | None = None
    reason: str = ""
    problems: tuple[str, ...] = ()
    process_bytes: int | None = None
    process_bytes_peak: int | None = None
    process_reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers and strings; seconds and bytes."""
        about = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**about, "problems": list(self.problems)}

    def rows(self) -> list[tuple[str, str]]:
        """The three lines, name and words; a fourth one where the process's resident set cannot follow."""
        rows = [("memory", self.memory()), ("time", self.time()), ("state", self.state())]
        if self.process_bytes is not None and self.process_bytes_peak is not None:
            words = alike_bytes([self.process_bytes, self.process_bytes_peak])
            sizes = f"resident set {words(self.process_bytes)} now, {words(self.process_bytes_peak)} at most"
            rows.append(("process", f"{sizes}: {self.process_reason}"))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {words}" for name, words in rows)

    def memory(self) -> str:
        """How much activations and the whole step take, and without offload."""
        if self.kind == "off":
            return "as without offload"
        found, is_measured = self.activation_bytes, self.activation_bytes is not None
        if found is None:
            found = self.activation_bytes_planned
        unswapped, planned, whole = self.activation_bytes_unswapped, self.step_bytes_planned, self.step_bytes_unswapped
        words = alike_bytes([found, unswapped, planned, whole, self.least_limit_bytes, self.limit_bytes])
        parts = []
        if unswapped:
            text = _compared(found, unswapped, words, " at peak", "" if is_measured else " (predicted)")
            change = _change(found, unswapped) if found is not None and "instead" in text else ""
            parts.append(f"activations {text}{change}")
        if whole is not None:
            parts.append(f"whole step {_compared(planned, whole, words, '', ' (predicted)')}")
        if self.limit_bytes is not None and self.least_limit_bytes is not None:
            parts.append(f"at least {words(self.least_limit_bytes)} with every swap there is")
        return "; ".join(parts) or "not known yet"

    def time(self) -> str:
        """How long a step takes, was predicted to take, and about takes without offload."""
        if self.kind == "off":
            return "as without offload"
        measured, predicted, compute = self.step_seconds, self.step_seconds_planned, self.compute_seconds
        words = alike_seconds([measured, predicted, compute])
        if measured is not None:
            parts = [f"step {words(measured)}"]
            parts += [f"predicted {words(predicted)}"] if predicted is not None else []
        elif predicted is not None:
            parts = [f"step {words(predicted)} predicted (not measured yet)"]
        else:
            parts = []
        if compute:
            known = measured if measured is not None else predicted
            change = _change(known, compute) if known is not None else ""
            parts.append(f"without offload about {words(compute)}{change}")
        return ", ".join(parts) or "no planned step has been measured yet"

    def state(self) -> str:
        """Whether all goes as planned, and what is wrong if not."""
        return "; ".join([*self._state(), *self.problems, *(["disabled now"] if self.is_disabled else [])])

    def _state(self) -> Iterator[str]:
        if self.kind == "planned":
            yield f"{'off plan' if self.problems else 'on plan'}: {self._swapped()}"
        elif self.kind == "by hand":
            yield f"by hand ({self.wish}): {self._swapped()}"
        elif self.kind == "nothing to swap":
            yield f"nothing to swap: {self.reason}" + ("; hooks are off" if self.is_removed else "")
        elif self.kind == "refused" and self.limit_bytes is not None and self.least_limit_bytes is not None:
            least = round_up_bytes(self.least_limit_bytes)
            yield f'refused: no plan keeps {format_bytes(self.limit_bytes)}; write memory_limit="{least}" or more'
        elif self.kind == "off":
            yield "off: n_tensors=0 swaps nothing"
        elif self.kind == "no step":
            yield "no training step has run yet"
        else:
            yield f"{self.kind}: {self.reason}"

    def _swapped(self) -> str:
        moved = f"{self.tensors_swapped} of {self.tensors} tensors swapped"
        if self.tensors_recomputed:
            moved += f", {self.tensors_recomputed} recomputed"
            moved += f" in {format_seconds(self.recompute_seconds)} a step" if self.recompute_seconds >= _SHORT else ""
        if not self.late_tensors:
            return f"{moved}, none late"
        seconds, planned = self.late_seconds, self.late_seconds_planned
        words = alike_seconds([seconds, planned])
        about = [f"{words(seconds)} a step"] if seconds >= _SHORT else []
        about += [f"{words(planned)} planned"] if planned >= _SHORT else []
        late = f"{self.late_tensors} late" + (f" ({', '.join(about)})" if about else "")
        return f"{moved}, {late}"


def _compared(found: int | None, without: int, words: Callable[[int], str], where: str, how: str) -> str:
    """One figure beside what it is without offload; `how` it is known, where it differs."""
    if found is None:
        return f"{words(without)}{where} without offload"
    if abs(found - without) <= _SAME * without:
        return f"{words(without)}{where}, as without offload"
    return f"{words(found)}{where}{how} instead of {words(without)}"


def _change(found: float, base: float) -> str:
    """By how much one figure is above or below the other, in parentheses."""
    percent = round(100 * (found / base - 1)) if base else 0
    return f" ({percent:+d} %)" if percent else " (±0 %)"
