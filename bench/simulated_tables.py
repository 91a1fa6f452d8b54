"""What simulated.py found as tables: one for each card, in virtual time.

`result_tables.py` reads every kind of result, and uses this module for the simulated ones. It needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from result_tables import NOT_REACHED, UNEQUAL, Row, Table, mark_peers

from offload.units import format_bytes, format_seconds

BY_DEFAULT = "offload, default"
PROMISED_STEP = 1.06  # by default, over plain: 5 % and what rounds
ROUNDING = 0.005  # of a limit


def simulated_tables(content: Mapping[str, Any]) -> Iterator[Table]:
    """One table for each card: every network's ways, in virtual time."""
    columns = ["network", "way", "memory", "step", "copies hidden", "exposed", "predicted, to simulated", "bits", ""]
    for card, factor in dict.fromkeys((row["card"], row["host_factor"]) for row in content["rows"]):
        made = []
        for network in content["networks"]:
            wanted = (card, network["family"], factor)
            own = [
                simulated_row(row)
                for row in content["rows"]
                if (row["card"], row["family"], row["host_factor"]) == wanted
            ]
            mark_peers(own)
            made += own
        host = f", host time as measured × {factor:g}" if factor else ""
        title = f"SIMULATED, no GPU ran: {card}{host}"
        yield Table(title, columns, made, content["machine"], "simulated", note=note_on(card, factor, content))


def note_on(card: str, factor: float, content: Mapping[str, Any]) -> str:
    """What is simulated, from which figures, and what stands for what."""
    about = next(each for each in content["cards"] if each["name"] == card)
    each = {name: f"{seconds * 1e6:g} µs" for name, seconds in content["seconds_each"].items()}
    ran = {row["family"] for row in content["rows"] if (row["card"], row["host_factor"]) == (card, factor)}
    networks = [
        f"{network['family']}: {network['stands_for']} (k = {network['factor']})"
        for network in content["networks"]
        if network["family"] in ran
    ]
    host = f"the host's own time, as measured, × {factor:g}" if factor else "nothing for the host's own time"
    rates = (
        f"{about['flops_per_second'] / 1e12:g} TFLOP/s, {about['bytes_per_second'] / 1e12:g} TB/s of memory, "
        f"{about['link_bytes_per_second'] / 1e9:g} GB/s each way over the link"
    )
    parts = [
        "**Every figure here is simulated.** The engine and the peers ran on the simulated accelerator of",
        f"`tests/twin`. Durations follow from assumed figures: {rates}, {each['kernel']} for a kernel and",
        f"{each['copy']} for a copy on top, {each['launch']} of the host to queue one, {host}; pinning costs nothing.",
        "Each network was computed 1/k as wide, over 1/k of the positions, with FLOP/s divided by k³ and bytes a",
        "second by k²/2 (an element of four bytes stands for one of two): every kernel and copy takes as long as the",
        "large network's. What the engine holds to in bytes (blocks below 1 MiB are joined) does not scale.",
        f"They stand for {'; '.join(networks)}. *Hidden*: copy time with a kernel beside it;",
        "*exposed*: without one. *Predicted*: the plan's time to the end of backward. TRL's OffloadActivations is",
        "torchtune's descendant, which is not installed here.",
    ]
    return " ".join(parts)


def simulated_row(row: Mapping[str, Any]) -> Row:
    """One way's row: memory and step of the large network, from virtual time."""
    key, names = f"simulated {row['family']} / {row['name']}", [row["family"], row["name"]]
    if "inapplicable" in row:
        return Row(key, [*names, *["–"] * 6, row["inapplicable"]], ours=row["ours"])
    memory, step = row["memory_over_plain"], row["step_over_plain"]
    predicted = row.get("predicted_seconds")
    cells = [
        *names,
        f"{memory:.2f} × ({format_bytes(row['memory_bytes'])})",
        f"{step:.2f} × ({format_seconds(row['seconds'])})",
        "–" if row["overlap"] is None else f"{row['overlap']:.0%}",
        format_seconds(row["exposed_seconds"]),
        "–" if predicted is None else f"{predicted / row['until_backward_seconds'] - 1:+.1%}",
        "bit-equal" if row["equal"] else UNEQUAL,
        "",
    ]
    made = Row(key, cells, ours=row["ours"], point=(memory, step))
    limit = re.search(r"(\d+)% of plain", row["name"])
    is_over = limit is not None and memory > int(limit[1]) / 100 + ROUNDING
    if is_over or (row["name"] == BY_DEFAULT and step > PROMISED_STEP):
        made.mark = cells[-1] = NOT_REACHED
    return made
