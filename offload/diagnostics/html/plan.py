"""The page that `offload plan --plot` writes: copies and recomputations over the step, and the tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from offload.diagnostics.html.chart import STEP_KINDS, TENSOR_KINDS, Box, Series, Tensor, chart
from offload.diagnostics.html.page import document, paragraphs, section
from offload.plan import Copy, Plan, Timing, simulate
from offload.plan.trace import OPTIMIZER_NODE, SavedTensor
from offload.units import format_bandwidth, format_seconds

__all__ = ["figure", "render"]

_REST = "everything else: parameters, gradients, temporaries"


def render(plan: Plan, title: str, *, limit_bytes: int | None = None) -> str:
    """Return the page of a plan.

    Parameters
    ----------
    plan : Plan
        The plan.
    title : str
        Name of the planned step, such as the trace's file name.
    limit_bytes : int, optional
        The requested memory limit, shown as a line. None: no limit was requested.

    Returns
    -------
    str
        One HTML document; it loads nothing.
    """
    link = plan.link
    facts = (
        f"Link: {format_bandwidth(link.out_bandwidth)} out, {format_bandwidth(link.in_bandwidth)} in, latency "
        f"{format_seconds(link.latency)}. Trace: {len(plan.trace.nodes)} nodes, {plan.trace.source or 'no source'}."
    )
    return document(
        f"offload plan: {title}",
        f"<h1>offload plan: {escape(title)}</h1>",
        paragraphs(*plan.summary().splitlines()),
        section("The step: compute, copies, and the tensors in memory", figure(plan, limit_bytes=limit_bytes)),
        f"<details><summary>All tensors</summary><pre>{escape(plan.explain())}</pre></details>",
        paragraphs(facts, kind="faint"),
    )


def figure(
    plan: Plan,
    *,
    limit_bytes: int | None = None,
    last_node: int | None = None,
    without: str = "without offload",
) -> str:
    """Return the chart of a plan: lanes of compute and copies, and the tensors in memory, over the step.

    Parameters
    ----------
    plan : Plan
        What to show.
    limit_bytes : int, optional
        Shown as a line.
    last_node : int, optional
        The chart ends with this node. Default: with the step.
    without : str, default "without offload"
        Name of the curve of the same step without swaps and recomputation.

    Returns
    -------
    str
        HTML.
    """
    unswapped = simulate(plan.trace, (), plan.link)
    seconds = max(plan.timing.step_seconds, unswapped.step_seconds)
    if last_node is not None:
        seconds = plan.timing.finish[last_node]
    with_plan = _series("with this plan", "blue", plan.timing)
    curves = [with_plan] if last_node is not None else [_series(without, "gray", unswapped), with_plan]
    return chart(
        "Compute, copies and the tensors in memory over the step",
        seconds=seconds,
        origin="the start of the step",
        lanes=_lanes(plan, seconds),
        series=[_points_until(each, seconds) for each in curves],
        tensors=[stay for each in _tensors(plan) if (stay := _stay_until(each, seconds))],
        rest=_points_until(Series(_REST, "pale", with_plan.points), seconds),
        limit_bytes=limit_bytes,
    )


def _until(boxes: Sequence[Box], seconds: float) -> list[Box]:
    return [box._replace(end=min(box.end, seconds)) for box in boxes if box.start < seconds]


def _stay_until(tensor: Tensor, seconds: float) -> Tensor | None:
    times = tuple(min(at, seconds) for at in tensor.resident)
    stays = [(begin, end) for begin, end in zip(times[::2], times[1::2], strict=True) if begin < end]
    return tensor._replace(resident=tuple(at for stay in stays for at in stay)) if stays else None


def _points_until(series: Series, seconds: float) -> Series:
    points = [(at, nbytes) for at, nbytes in series.points if at < seconds]
    last = [(seconds, points[-1][1])] if points else []
    return replace(series, points=[*points, *last])


def _series(name: str, color: str, timing: Timing) -> Series:
    last = [(timing.step_seconds, timing.resident[-1])] if timing.resident else []
    return Series(name, color, [*zip(timing.ready, timing.resident, strict=True), *last])


def _tensors(plan: Plan) -> Iterator[Tensor]:
    """Yield every saved tensor with its times in memory: from its first to its last node, except while it is away."""
    begin = (*plan.timing.ready, plan.timing.step_seconds)
    swaps = {swap.id: swap for swap in plan.swaps}
    remade = {row.id: row.at for row in plan.recomputes}
    remakes: dict[int, int] = {}  # for each source, the last node at which a tensor is recomputed from it
    for tensor in plan.trace.tensors:
        if tensor.id in remade and tensor.recompute is not None:
            for source in tensor.recompute.inputs:
                remakes[source] = max(remakes.get(source, 0), remade[tensor.id])
    for tensor in sorted(plan.trace.tensors, key=lambda each: (each.produced, each.id)):
        name = f"tensor {tensor.id} of {plan.trace.nodes[tensor.produced].name}"
        kind, away = "kept", tuple[int, ...]()
        if tensor.id in swaps:
            kind, away = "swapped", (swaps[tensor.id].release, swaps[tensor.id].prefetch)
        elif tensor.id in remade and tensor.last_forward + 1 < remade[tensor.id]:
            kind, away = "recomputed", (tensor.last_forward + 1, remade[tensor.id])
        last_use = max(tensor.last_use, remakes.get(tensor.id, 0))
        times = tuple(begin[node] for node in (tensor.produced, *away, last_use + 1))
        yield Tensor(TENSOR_KINDS[kind], name, tensor.bytes, tensor.id, times)


def _lanes(plan: Plan, seconds: float) -> dict[str, list[Box]]:
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
        for tensor in sorted(dropped.get(k, ()), key=lambda x: x.produced):  # at the start of the node
            assert tensor.recompute is not None
            end = begin + tensor.recompute.seconds
            name = f"tensor {tensor.id} of {plan.trace.nodes[tensor.produced].name}"
            again.append(Box(STEP_KINDS["recompute"], name, begin, end, tensor.bytes, tensor.id))
            begin = end
        kind = "optimizer" if node.name == OPTIMIZER_NODE else "backward" if node.backward else "forward"
        compute.append(Box(STEP_KINDS[kind], node.name, begin, finish))
        before = finish

    def boxes(kind: str, copies: Sequence[Copy]) -> list[Box]:
        found = []
        for copy in copies:
            tensor = tensors[copy.id]
            name = f"tensor {copy.id} of {plan.trace.nodes[tensor.produced].name}"
            found.append(Box(STEP_KINDS[kind], name, copy.start, copy.end, tensor.copied_bytes, tensor.id))
        return found

    lanes = {"compute": compute, "recompute": again}
    lanes |= {"copy out": boxes("out", timing.copy_outs), "copy in": boxes("in", timing.copy_ins)}
    found = {name: _until(each, seconds) for name, each in lanes.items()}
    return {name: each for name, each in found.items() if each or name != "recompute"}
