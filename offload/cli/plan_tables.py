"""The tables that `offload plan` prints: a comparison of plans, and one plan with its tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from offload.plan import Plan, make_plan
from offload.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["options_json", "print_options", "print_plan"]

_ROWS_MAX = 20


def print_options(plans: Sequence[tuple[str, Plan]], host_bytes_max: int | None = None) -> None:
    """Print a table of plans on standard output, one row for each.

    Parameters
    ----------
    plans : sequence of (str, Plan)
        Name and plan.
    host_bytes_max : int, optional
        Most bytes that are swapped to host memory; the rest goes to disk. If this is not given, the table does not
        show how the bytes are divided.
    """
    head = ["", "peak", "step", "slowdown", "swapped out", "tensors", "gap"]
    rows = [list(_row(name, plan)) for name, plan in plans]
    if any(plan.recomputes for _, plan in plans):
        head.insert(6, "recomputed")
        for row, (_, plan) in zip(rows, plans, strict=True):
            row.insert(6, format_bytes(_recomputed_bytes(plan)))
    if host_bytes_max is not None:
        tiers = [_tiers(plan, host_bytes_max) for _, plan in plans]
        columns = zip(("in host memory", "on disk"), zip(*tiers, strict=True), strict=True)
        used = [(name, nbytes) for name, nbytes in columns if any(nbytes)]  # if none is: "swapped out" stays, all 0
        if used:
            head[4:5] = [name for name, _ in used]
            for number, row in enumerate(rows):
                row[4:5] = [format_bytes(nbytes[number]) for _, nbytes in used]
    _print_table(head, rows)


def _recomputed_bytes(plan: Plan) -> int:
    size = {tensor.id: tensor.bytes for tensor in plan.trace.tensors}
    return sum(size[row.id] for row in plan.recomputes)


def _tiers(plan: Plan, host_bytes_max: int) -> tuple[int, int]:
    in_memory = min(plan.host_bytes, host_bytes_max)
    return in_memory, plan.host_bytes - in_memory


def options_json(plans: Sequence[tuple[str, Plan]], host_bytes_max: int) -> list[dict[str, Any]]:
    """Return plans for JSON: their figures, and how their bytes are divided between host memory and disk."""
    rows = []
    for name, plan in plans:
        in_memory, on_disk = _tiers(plan, host_bytes_max)
        about = {key: value for key, value in plan.to_dict().items() if key not in ("swaps", "recomputes")}
        rows.append({"name": name, **about, "host_bytes": in_memory, "disk_bytes": on_disk})
    return rows


def print_plan(plan: Plan, title: str) -> None:
    """Print a table with a plan and the unswapped step, and the plan's largest tensors.

    Parameters
    ----------
    plan : Plan
        The plan.
    title : str
        Name of the plan's row.
    """
    link, tensors = plan.link, len(plan.trace.tensors)
    print(
        f"{len(plan.trace.nodes)} nodes, {tensors} tensor{'s' * (tensors != 1)} saved for backward; link "
        f"{format_bandwidth(link.out_bandwidth)} out, {format_bandwidth(link.in_bandwidth)} in\n"
    )
    print_options([("unswapped", make_plan(plan.trace, link, ())), (title, plan)])
    print()
    if not plan.swaps and not plan.recomputes:
        print(plan.explain())
        return
    print(plan.summary())
    if plan.swaps:
        _print_swaps(plan)
    if plan.recomputes:
        _print_recomputes(plan)


def _print_swaps(plan: Plan) -> None:
    print()
    tensors = {tensor.id: tensor for tensor in plan.recomputed_trace.tensors}
    late = plan.late_seconds()
    swaps = sorted(plan.swaps, key=lambda swap: (-tensors[swap.id].bytes, swap.id))
    rows = []
    for swap in swaps[:_ROWS_MAX]:
        tensor = tensors[swap.id]
        waits = sum(late[swap.id])
        rows.append(
            (
                f"{tensor.id}",
                plan.trace.nodes[tensor.produced].name,
                format_bytes(tensor.bytes),
                f"{swap.release}",
                f"{swap.prefetch}",
                f"{tensor.first_backward - swap.prefetch}",
                f"late by {format_seconds(waits)}" if waits else "hidden",
            )
        )
    _print_table(("tensor", "of", "bytes", "release", "prefetch", "lead", ""), rows)
    if len(swaps) > _ROWS_MAX:
        print(f"… and {len(swaps) - _ROWS_MAX} more; --explain lists all")


def _print_recomputes(plan: Plan) -> None:
    print()
    tensors = {tensor.id: tensor for tensor in plan.trace.tensors}
    chosen = sorted(plan.recomputes, key=lambda row: (-tensors[row.id].bytes, row.id))
    rows = []
    for each in chosen[:_ROWS_MAX]:
        tensor = tensors[each.id]
        recipe = tensor.recompute
        assert recipe is not None
        name = plan.trace.nodes[tensor.produced].name
        sources = ", ".join(str(i) for i in recipe.inputs)
        rows.append(
            (f"{tensor.id}", name, format_bytes(tensor.bytes), f"{each.at}", sources, format_seconds(recipe.seconds))
        )
    _print_table(("tensor", "of", "bytes", "recomputed at", "from", "takes"), rows)
    if len(chosen) > _ROWS_MAX:
        print(f"… and {len(chosen) - _ROWS_MAX} more; --explain lists all")


def _row(name: str, plan: Plan) -> tuple[str, ...]:
    slowdown = plan.expected_seconds / plan.compute_seconds - 1 if plan.compute_seconds else 0.0
    return (
        name,
        format_bytes(plan.peak_bytes),
        format_seconds(plan.expected_seconds),
        f"{slowdown:.2%}",
        format_bytes(plan.host_bytes),
        f"{len(plan.swaps)}",
        f"{plan.gap:.3%}",
    )


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from offload.diagnostics.table import write_table

    write_table(sys.stdout, rows, head=head)
