"""The page of one recorded step: lanes of compute and copies, the swapped tensors in memory, and memory in use."""

from __future__ import annotations

from offload.diagnostics.html.chart import STEP_KINDS, TENSOR_KINDS, Box, Series, Tensor, chart
from offload.diagnostics.html.page import document, paragraphs, section, table
from offload.diagnostics.timeline import StepTimeline
from offload.units import format_seconds

__all__ = ["render"]

_ORIGIN = "the start of the recording"
_STACK = (
    "The stack shows the tensors that this step swapped: until their copy-out ended, and from their copy-in to the end "
    "of the operation that used them. The curves are measured, and include recomputed tensors."
)
_WAITS_MAX = 8


def render(step: StepTimeline) -> str:
    """Return the page of a step.

    Parameters
    ----------
    step : StepTimeline
        What to show.

    Returns
    -------
    str
        One HTML document; it loads nothing and needs no server.
    """
    without = Series("without offload", "gray", [(sample.at, sample.unswapped) for sample in step.memory])
    resident = Series("with offload", "blue", [(sample.at, sample.resident) for sample in step.memory])
    in_use = Series(step.memory_label, "green", [(sample.at, sample.in_use) for sample in step.memory])
    tensors = [
        Tensor(
            TENSOR_KINDS["swapped" if each.has_left else "cancelled"],
            each.name,
            each.nbytes,
            each.ticket,
            each.resident,
        )
        for each in step.tensors
    ]
    activations = chart(
        "Compute, copies, and swapped tensors in memory",
        seconds=step.seconds,
        origin=_ORIGIN,
        lanes=_lanes(step),
        series=[without, resident],
        tensors=tensors,
    )
    memory = chart("Memory in use", seconds=step.seconds, origin=_ORIGIN, series=[in_use], from_zero=False)
    return document(
        "offload: one step",
        "<h1>One training step</h1>",
        paragraphs(*step.summary()),
        section(
            "The step: compute, copies, and the swapped tensors in memory",
            activations,
            paragraphs(_STACK, kind="faint"),
        ),
        section("Memory in use", memory),
        _waits(step),
    )


def _lanes(step: StepTimeline) -> dict[str, list[Box]]:
    """Return the boxes by lane; waits are in the compute lane."""
    lanes: dict[str, tuple[str, ...]] = {"compute": ("compute", "waiting")}
    lanes |= {"recompute": ("recompute",)} if step.on("recompute") else {}
    lanes |= {"copy out": ("copy out",), "copy in": ("copy in",)}
    lanes |= {"disk": ("disk",)} if step.on("disk") else {}
    found = {}
    for name, shown in lanes.items():
        spans = sorted((span for lane in shown for span in step.on(lane)), key=lambda span: span.start)
        found[name] = [
            Box(STEP_KINDS[span.kind], span.name, span.start, span.end, span.nbytes, span.ticket) for span in spans
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
