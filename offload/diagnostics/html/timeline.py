"""The page of one recorded step: lanes of compute and copies, the saved tensors in memory, and memory in use."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from offload.diagnostics.html.chart import STEP_KINDS, TENSOR_KINDS, Box, Series, Tensor, chart
from offload.diagnostics.html.page import document, paragraphs, section, table
from offload.diagnostics.timeline import StepTimeline
from offload.units import format_seconds

__all__ = ["render"]

_ORIGIN = "the start of the recording"
_STACK = (
    "The stack shows the tensors that this step saved for backward: each from its save until its memory is free, and "
    "again from its copy-in or recomputation until backward is done with it. Parameters are not part of it."
)
_WAITS_MAX = 8


def render(step: StepTimeline) -> str:
    """Return the page of a step.

    Parameters
    ----------
    step : StepTimeline
        The recorded step.

    Returns
    -------
    str
        One HTML document; it loads nothing and needs no server.
    """
    in_use = Series(step.memory_label, "green", [(sample.at, sample.in_use) for sample in step.memory])
    memory = chart("Memory in use", seconds=step.seconds, origin=_ORIGIN, series=[in_use], from_zero=False)
    return document(
        "offload: one step",
        "<h1>One training step</h1>",
        paragraphs(*step.summary()),
        section(
            "The step: compute, copies, and saved tensors in memory", _chart(step), paragraphs(_STACK, kind="faint")
        ),
        section("Memory in use", memory),
        _waits(step),
    )


def _chart(step: StepTimeline) -> str:
    """Return the chart of the lanes and the saved tensors."""
    tensors = []
    for number, each in enumerate(step.tensors):
        name = (
            f"tensor {number} of {each.name}" if each.name else f"tensor {number}, saved outside of the model's modules"
        )
        tensors.append(Tensor(TENSOR_KINDS[each.kind], name, each.nbytes, number, each.resident))
    spans = [(tensor.nbytes, tensor.resident) for tensor in tensors]
    whole = [(nbytes, (resident[0], resident[-1])) for nbytes, resident in spans]
    return chart(
        "Compute, copies, and saved tensors in memory",
        seconds=step.seconds,
        origin=_ORIGIN,
        lanes=_lanes(step),
        series=[_total("without offload", "gray", whole), _total("with offload", "blue", spans)],
        tensors=tensors,
    )


def _total(name: str, color: str, spans: Iterable[tuple[int, tuple[float, ...]]]) -> Series:
    """Return the sum of tensors over time, given bytes and times in memory."""
    changes: dict[float, int] = {}
    for nbytes, resident in spans:
        for number, at in enumerate(resident):
            changes[at] = changes.get(at, 0) + (-nbytes if number % 2 else nbytes)
    times = sorted(changes)
    return Series(name, color, list(zip(times, accumulate(changes[at] for at in times), strict=True)))


def _lanes(step: StepTimeline) -> dict[str, list[Box]]:
    """Return the boxes by lane; waits are in the compute lane."""
    lanes: dict[str, tuple[str, ...]] = {"compute": ("compute", "waiting")}
    lanes |= {"recompute": ("recompute",)} if step.on("recompute") else {}
    lanes |= {"copy out": ("copy out",), "copy in": ("copy in",)}
    lanes |= {"disk": ("disk",)} if step.on("disk") else {}
    numbers = {each.ticket: number for number, each in enumerate(step.tensors) if each.ticket >= 0}
    found = {}
    for name, shown in lanes.items():
        spans = sorted((span for lane in shown for span in step.on(lane)), key=lambda span: span.start)
        found[name] = [
            Box(STEP_KINDS[span.kind], span.name, span.start, span.end, span.nbytes, numbers.get(span.ticket, -1))
            for span in spans
        ]
    return found


def _waits(step: StepTimeline) -> str:
    """Return a table of the longest waits of compute."""
    by_name: dict[str, float] = {}
    for span in step.on("waiting"):
        by_name[span.name] = by_name.get(span.name, 0.0) + span.end - span.start
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:_WAITS_MAX]
    rows = [(name, format_seconds(seconds)) for name, seconds in longest]
    return section("Longest waits", table(rows, head=("where compute waited", "in total"))) if rows else ""
