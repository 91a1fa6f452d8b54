"""Tables of the races (`race.py`, the demo) and of the searches for the largest network. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from table import EQUAL, GRADIENTS, NETWORKS, PEER_BETTER, SMALL, UNEQUAL, Row, Table

from offload.units import format_bytes

SIZES = {
    "layers": "{} layers",
    "levels": "{} levels",
    "width": "width {}",
    "heads": "{} heads",
    "resolution": "{0} × {0} pixels",
    "patch": "patches of {0} × {0}",
    "batch": "batch {}",
    "length": "length {}",
}

# -- frontiers ----------------------------------------------------------------------------------------------------


def frontiers(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], *, small: bool = False) -> Iterator[Table]:
    """One table for each network: memory and time of every contestant over plain's."""
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        memory = ["memory", "step", "peak", "in all steps"]
        columns = ["way", *memory, "median step", "on disk", "pinned", "waits", GRADIENTS, ""]
        made = [frontier_row(row) for row in own]
        mark_peers(made)
        for each in made:
            each.key = f"{SMALL if small else ''}{each.key}"
        when = {name: own[0][name] for name in ("date", "commit") if name in own[0]}
        title = f"Training steps: {NETWORKS.get(family, family)}{' (small)' if small else ''}"
        page = "small" if small else "networks"
        yield Table(title, columns, made, {**machine, **when}, "frontier", note=size_of(own), page=page)


def size_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The network's dimensions as a sentence, where a row tells them."""
    size: Mapping[str, int] = next((row["setting"]["size"] for row in rows if "setting" in row), {})
    stages = [str(value) for name, value in size.items() if name.startswith("blocks")]
    words = [f"stages of {', '.join(stages)} blocks"] if stages else []
    words += [SIZES.get(name, f"{name} {{}}").format(value) for name, value in size.items() if name[:6] != "blocks"]
    text = ", ".join(words)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def frontier_row(row: Mapping[str, Any]) -> Row:
    """One contestant's row; dashes where it did not run, and why."""
    key = f"{row['family']} / {row['name']}"
    reason = row.get("inapplicable") or (f"failed: {row['error'].splitlines()[-1]}" if "error" in row else None)
    if reason or row.get("memory_over_plain") is None:
        return Row(key, [row["name"], *["–"] * 9, reason or "no memory measured"], ours=bool(row.get("ours")))
    memory, step = float(row["memory_over_plain"]), float(row["step_over_plain"])
    lower, upper = row["step_seconds_spread"]
    equal = row["equal_losses"] and row["equal_gradients"]
    stalled = row.get("stall_seconds_per_step")
    cells = [
        row["name"],
        f"{memory:.2f} ×",
        f"{step:.2f} ×",
        format_bytes(int(row["peak_bytes"])),
        format_bytes(int(row["all_steps_peak_bytes"])) if row.get("all_steps_peak_bytes") else "–",
        f"{row['step_seconds_median']:.3f} s ({lower:.3f}–{upper:.3f})",
        format_bytes(int(row["disk_bytes"])) if row.get("disk_bytes") else "–",
        format_bytes(int(row["pinned_bytes"])) if row.get("pinned_bytes") else "–",
        "–" if stalled is None else f"{stalled:.3f} s",
        EQUAL if equal else ("other kernels" if not row.get("equal_expected", True) else UNEQUAL),
        "",
    ]
    return Row(key, cells, ours=bool(row.get("ours")), point=(memory, step))


def mark_peers(rows: Sequence[Row]) -> None:
    """Mark every peer of which no setting of ours needs as little memory and as little time."""
    ours = [row.point for row in rows if row.ours and row.point]
    for row in rows:
        if row.ours or row.point is None or "plain" in row.cells[:2]:
            continue
        memory, step = row.point
        if ours and not any(mine[0] <= memory and mine[1] <= step for mine in ours):
            row.mark = row.cells[-1] = PEER_BETTER


def demo_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows out of what `offload demo --json` prints."""
    base = content["contestants"][0]
    names = {"offloaded": "offload, default", "checkpointed": "checkpoint per block"}
    return [
        {
            "family": "gpt, the demo",
            "name": names.get(each["name"], each["name"]),
            "ours": each["name"] == "offloaded",
            "memory_over_plain": each["peak_bytes"] / base["peak_bytes"],
            "step_over_plain": each["step_seconds_median"] / base["step_seconds_median"],
            "peak_bytes": each["peak_bytes"],
            "step_seconds_median": each["step_seconds_median"],
            "step_seconds_spread": [min(each["step_seconds"][1:]), max(each["step_seconds"][1:])],
            "disk_bytes": (each["report"] or {}).get("spill_file_bytes"),
            "stall_seconds_per_step": each["report"]["stall_seconds"] / each["steps"] if each["report"] else None,
            "equal_losses": each["losses"] == base["losses"],
            "equal_gradients": each["gradients"] == base["gradients"],
        }
        for each in content["contestants"]
    ]


def demo_machine(content: Mapping[str, Any]) -> dict[str, Any]:
    """The machine of a demo's run."""
    first = content["contestants"][0]
    return {
        "processor": first["device"],
        "processors": first["threads"],
        "device": first["device"] if first["gpu"] else None,
        "python": first["python"],
        "torch": first["torch"],
        "date": content.get("date", "date unknown"),
        "commit": content.get("commit", "unknown"),
    }


# -- largest ------------------------------------------------------------------------------------------------------


def largest_tables(
    rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], *, small: bool = False
) -> Iterator[Table]:
    """One table for each dimension: the largest of every contestant, and what a sample costs there."""
    for what in dict.fromkeys(row["what"] for row in rows):
        own = [row for row in rows if row["what"] == what]
        base = next((row for row in own if row["name"] == "plain"), {})
        dimension = what.split(":")[1]
        cap = format_bytes(int(own[0]["cap_bytes"]))
        each = {"batch": "sample", "layers": "layer", "resolution": "pixel row"}.get(dimension, dimension)
        columns = ["way", dimension, "over plain", "step", f"time per {each} over plain", ""]
        made = [largest_row(row, base) for row in own]
        if small:
            for found in made:
                found.key = SMALL + found.key
        ours = [row for row in own if row.get("ours") and "largest" in row]
        best = max((row["largest"] for row in ours), default=None)
        if any(row.get("cut_short") for row in ours):  # larger values may fit: no peer is known to be better
            best = None
        for row, found in zip(own, made, strict=True):
            if best is not None and not row.get("ours") and row.get("largest", 0) > best:
                found.mark = found.cells[-1] = PEER_BETTER
        values = {row["name"]: float(row["largest"]) for row in own if "largest" in row}
        network = NETWORKS.get(what.split(":")[0], what.split(":")[0])
        most = "most layers" if dimension == "layers" else f"largest {dimension}"
        title = f"{network}: {most} in {cap.replace('.00', '')}"
        note = f"Memory over the model is limited to {cap.replace('.00', '')}."
        yield Table(title, columns, made, machine, "bars", values, note, "largest")


def largest_row(row: Mapping[str, Any], base: Mapping[str, Any]) -> Row:
    """One contestant's row."""
    key = f"{row['what']} / {row['name']}"
    if "largest" not in row or not (row["largest"] or row.get("tries", True)):
        reason = row.get("inapplicable") or row.get("cut_short") or f"failed: {row['error']}"
        return Row(key, [row["name"], *["–"] * 4, reason], ours=bool(row.get("ours")))
    over, cost = "–", "–"
    bound = "≥ " if row.get("cut_short") else ""
    has_seconds = bool(row.get("step_seconds")) and not row.get("cut_short")  # else not those of the largest
    if base.get("largest"):
        over = f"{bound}{row['largest'] / base['largest']:.1f} ×"
        if has_seconds and base.get("step_seconds"):
            each = row["step_seconds"] / row["largest"]
            cost = f"{each / (base['step_seconds'] / base['largest']):.2f} ×"
    seconds = f"{row['step_seconds']:.2f} s" if has_seconds else "–"
    return Row(key, [row["name"], f"{bound}{row['largest']}", over, seconds, cost, row.get("cut_short", "")],
               ours=bool(row.get("ours")))  # fmt: skip
