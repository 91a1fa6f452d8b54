"""The page of one recorded step: lanes of compute and copies, and memory over time.

One self-contained file without scripts and external resources.
"""

from __future__ import annotations

from offload.diagnostics.html.chart import STEP_KINDS, Box, Series, lane_chart, memory_chart
from offload.diagnostics.html.page import document, paragraphs, section, table
from offload.diagnostics.timeline import StepTimeline
from offload.units import format_seconds

__all__ = ["render"]

_ORIGIN = "the start of the recording"
_HINT = "Hover over a box for its name, duration and size. Neighbours narrower than a pixel are one box."
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
    seconds = step.seconds
    lanes = lane_chart("Compute and copies over the step", _lanes(step), seconds=seconds, origin=_ORIGIN)
    without = Series("without offload", "gray", [(sample.at, sample.unswapped) for sample in step.memory])
    resident = Series("with offload", "blue", [(sample.at, sample.resident) for sample in step.memory])
    in_use = Series(step.memory_label, "green", [(sample.at, sample.in_use) for sample in step.memory])
    activations = memory_chart("Activations in memory", [without, resident], seconds=seconds, origin=_ORIGIN)
    memory = memory_chart("Memory in use", [in_use], seconds=seconds, origin=_ORIGIN, from_zero=False)
    return document(
        "offload: one step",
        "<h1>One training step</h1>",
        paragraphs(*step.summary()),
        section("Compute and copies over the step", lanes, paragraphs(_HINT, kind="faint")),
        section("Activations in memory: the tensors that this step swapped or recomputed", activations),
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
        found[name] = [Box(STEP_KINDS[span.kind], span.name, span.start, span.end, span.nbytes) for span in spans]
    return found


def _waits(step: StepTimeline) -> str:
    """Return a table of the longest waits of compute."""
    by_name: dict[str, float] = {}
    for span in step.on("waiting"):
        by_name[span.name] = by_name.get(span.name, 0.0) + span.end - span.start
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:_WAITS_MAX]
    rows = [(name, format_seconds(seconds)) for name, seconds in longest]
    return section("Longest waits", table(rows, head=("where compute waited", "in total"))) if rows else ""
