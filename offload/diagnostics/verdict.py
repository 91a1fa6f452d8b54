"""The verdict: memory, time and state of planned steps, in three lines.

`assessment` computes the figures; a report begins with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from offload.units import alike_bytes, alike_seconds, format_bytes, format_seconds, round_up_bytes

__all__ = ["Kind", "Verdict"]

Kind = Literal["off", "no step", "profiling", "planned", "nothing to swap", "by hand", "refused", "unplanned"]

_SAME = 0.005  # relative; a smaller difference is not mentioned
_SHORT = 1e-4  # seconds; a shorter wait is not mentioned


@dataclass(frozen=True)
class Verdict:
    """Memory and time of planned steps. Profiled steps, which are slower and need less memory, are not counted.

    If several shapes were trained, the verdict describes the one with the most steps. A figure is None if it is not
    known.

    Attributes
    ----------
    kind : str
        ``"planned"``; ``"nothing to swap"``: the plan keeps every tensor; ``"by hand"``: `n_tensors` is given;
        ``"profiling"``: no planned step yet; ``"refused"``: no plan stays within `memory_limit`; ``"unplanned"``: no
        two steps are alike; ``"no step"``; ``"off"``: ``n_tensors=0``.
    device : str
        Device of the model.
    wish : str
        The goal arguments of `offload.enable`, as they are written in the call.
    is_disabled : bool
        Whether offload has been disabled.
    activation_bytes : int or None
        Activations in memory at the peak of a step, measured: the most in one of the last measured steps.
        Activations are the tensors saved for backward that could be swapped.
    activation_bytes_planned : int or None
        The same, as predicted by the plan.
    activation_bytes_unswapped : int or None
        The same without swaps, from the recorded step.
    step_bytes_planned, step_bytes_unswapped : int or None
        All memory on the device at the peak of a step, predicted with offload and without: parameters, gradients,
        optimizer state, temporaries and activations.
    reference_steps : int
        Number of reference steps from which `compute_seconds` was computed; 0: it is estimated.
    steps_measured : int
        Number of measured steps of the current plan; the three figures below are their medians.
    step_seconds : float or None
        Measured time of forward and backward, without the optimizer, in seconds.
    step_seconds_planned : float or None
        The same, as predicted by the plan.
    compute_seconds : float or None
        Approximate time without offload: from reference steps or, without them, the time of measured steps outside the
        engine's hooks.
    tensors, tensors_swapped, tensors_recomputed : int
        Number of tensors of a step that could be swapped, that are swapped, and that are recomputed instead.
    recompute_seconds : float
        Planned time of recomputation per step, in seconds.
    regions : int
        Number of compiled parts of the model that run again in backward, so that their tensors are not saved.
    late_tensors : int
        Number of tensors for which the last measured step waited.
    late_seconds : float
        Total time of these waits, in seconds.
    late_seconds_planned : float
        Planned time per step of waits for copies, in seconds.
    is_removed : bool
        Whether the hooks have been removed because there is nothing to swap.
    limit_bytes, least_limit_bytes : int or None
        If no plan stays within the limit: the limit, and the smallest possible one.
    reason : str
        Why nothing is swapped or planned; empty if something is.
    is_short_of_writes : bool
        Whether tensors that were to be swapped stayed, because writing them failed.
    problems : tuple of str
        Problems of the planned steps.
    process_bytes, process_bytes_peak : int or None
        Resident set of this process, now and at its peak, if malloc keeps freed memory, so that the resident set does
        not shrink with the tensors.
    process_reason : str
        Why malloc keeps freed memory.
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
    regions: int = 0
    late_tensors: int = 0
    late_seconds: float = 0.0
    late_seconds_planned: float = 0.0
    is_removed: bool = False
    limit_bytes: int | None = None
    least_limit_bytes: int | None = None
    reason: str = ""
    is_short_of_writes: bool = False
    problems: tuple[str, ...] = ()
    process_bytes: int | None = None
    process_bytes_peak: int | None = None
    process_reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as numbers and strings, in seconds and bytes."""
        about = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**about, "problems": list(self.problems)}

    def rows(self) -> list[tuple[str, str]]:
        """Return the three lines as name and text; a fourth one if malloc keeps freed memory."""
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
        """Return the line on memory: activations and the whole step, with and without offload."""
        if self.kind == "off":
            return "activations as without offload"
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
            parts.append(f"at least {words(self.least_limit_bytes)} even with all possible swaps")
        return "; ".join(parts) or "not known yet"

    def time(self) -> str:
        """Return the line on time: measured, predicted, and approximately without offload."""
        if self.kind == "off":
            return "not measured: n_tensors=0 needs no plan"
        measured, predicted, compute = self.step_seconds, self.step_seconds_planned, self.compute_seconds
        words = self.seconds_in_words()
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

    def seconds_in_words(self) -> Callable[[float], str]:
        """Return the function that formats the three times of a step alike."""
        return alike_seconds([self.step_seconds, self.step_seconds_planned, self.compute_seconds])

    def state(self) -> str:
        """Return the line on the state: whether steps are as planned, and what is wrong if not."""
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
            yield "off: n_tensors=0 swaps no saved tensor"
        elif self.kind == "no step":
            yield "no training step has run yet"
        else:
            yield f"{self.kind}: {self.reason}"

    def _swapped(self) -> str:
        chosen = "to be swapped" if self.is_short_of_writes else "swapped"
        moved = f"{self.tensors_swapped} of {self.tensors} tensors {chosen}"
        if self.tensors_recomputed:
            moved += f", {self.tensors_recomputed} recomputed"
            moved += f" in {format_seconds(self.recompute_seconds)} a step" if self.recompute_seconds >= _SHORT else ""
        if self.regions:
            moved += f", {self.regions} compiled parts run again"
        if not self.late_tensors:
            return f"{moved}, none late"
        seconds, planned = self.late_seconds, self.late_seconds_planned
        words = alike_seconds([seconds, planned])
        about = [f"{words(seconds)} a step"] if seconds >= _SHORT else []
        about += [f"{words(planned)} planned"] if planned >= _SHORT else []
        late = f"{self.late_tensors} late" + (f" ({', '.join(about)})" if about else "")
        return f"{moved}, {late}"


def _compared(found: int | None, without: int, words: Callable[[int], str], where: str, how: str) -> str:
    """Return one figure compared with the one without offload. `how` is added if the figures differ."""
    if found is None:
        return f"{words(without)}{where} without offload"
    if abs(found - without) <= _SAME * without:
        return f"{words(without)}{where}, as without offload"
    return f"{words(found)}{where}{how} instead of {words(without)}"


def _change(found: float, base: float) -> str:
    """Return the relative difference of two figures, in parentheses."""
    percent = round(100 * (found / base - 1)) if base else 0
    return f" ({percent:+d} %)" if percent else " (±0 %)"
