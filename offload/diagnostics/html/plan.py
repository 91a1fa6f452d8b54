"""The page that `offload plan --plot` writes: memory and lanes over the step.

One self-contained file without scripts and external resources.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from offload.diagnostics.html.chart import STEP_KINDS, Box, Series, lane_chart, memory_chart
from offload.diagnostics.html.page import document, paragraphs, section
from offload.plan import Copy, Plan, Timing, simulate
from offload.plan.trace import SavedTensor
from offload.units import format_bandwidth, format_seconds

__all__ = ["render"]

_ORIGIN = "the start of the step"


def render(plan: Plan, title: str, *, limit_bytes: int | None = None) -> str:
    """Return the page of a plan.

    Parameters
    ----------
    plan : Plan
        What to show.
    title : str
        Name of what was planned, such as the trace's file name.
    limit_bytes : int, optional
        The memory limit that was asked for; shown as a line.

    Returns
    -------
    str
        One HTML document; it loads nothing.
    """
    unswapped = simulate(plan.trace, (), plan.link)
    end = max(plan.timing.step_seconds, unswapped.step_seconds)
    link = plan.link
    facts = (
        f"Link: {format_bandwidth(link.out_bandwidth)} out, {format_bandwidth(link.in_bandwidth)} in, latency "
        f"{format_seconds(link.latency)}. Trace: {len(plan.trace.nodes)} nodes, {plan.trace.source or 'no source'}."
    )
    memory = memory_chart(
        "Memory over the step",
        [_series("without offload", "gray", unswapped), _series("with this plan", "blue", plan.timing)],
        seconds=end,
        origin=_ORIGIN,
        limit_bytes=limit_bytes,
    )
    lanes = lane_chart("Compute and copies over the step", _lanes(plan), seconds=end, origin=_ORIGIN)
    return document(
        f"offload plan: {title}",
        f"<h1>offload plan: {escape(title)}</h1>",
        paragraphs(*plan.summary().splitlines()),
        section("Memory over the step", memory),
        section("Compute and copies over the step", lanes),
        f"<details><summary>All tensors</summary><pre>{escape(plan.explain())}</pre></details>",
        paragraphs(facts, kind="faint"),
    )


def _series(name: str, color: str, timing: Timing) -> Series:
    last = [(timing.step_seconds, timing.resident[-1])] if timing.resident else []
    return Series(name, color, [*zip(timing.ready, timing.resident, strict=True), *last])


def _lanes(plan: Plan) -> dict[str, list[Box]]:
    tensors = {tensor.id: tensor for tensor in plan.trace.tensors}
    dropped: dict[int, list[SavedTensor]] = {}
    for row in plan.recomputes:
        dropped.setdefault(row.at, []).append(tensors[row.id])
    compute, again, before = [], [], 0.0
    timing = plan.timing
    for k, (node, start, finish) in enumerate(zip(plan.trace.nodes, timing.start, timing.finish, strict=True)):
        if start > before:
            compute.append(Box(STEP_KINDS["wait"], f"before {node.name}", before, start))
        begin = start
        for tensor in sorted(dropped.get(k, ()), key=lambda x: x.produced):  # the node's first seconds
            assert tensor.recompute is not None
            end = begin + tensor.recompute.seconds
            name = f"tensor {tensor.id} of {plan.trace.nodes[tensor.produced].name}"
            again.append(Box(STEP_KINDS["recompute"], name, begin, end, tensor.bytes))
            begin = end
        compute.append(Box(STEP_KINDS["backward" if node.backward else "forward"], node.name, begin, finish))
        before = finish

    def boxes(kind: str, copies: Sequence[Copy]) -> list[Box]:
        found = []
        for copy in copies:
            tensor = tensors[copy.id]
            name = f"tensor {copy.id} of {plan.trace.nodes[tensor.produced].name}"
            found.append(Box(STEP_KINDS[kind], name, copy.start, copy.end, tensor.bytes))
        return found

    lanes = {"compute": compute, "copy out": boxes("out", timing.copy_outs), "copy in": boxes("in", timing.copy_ins)}
    return {"compute": compute, "recompute": again, **lanes} if again else lanes
