"""What simulated.py found as tables: one for each card, in virtual time.

Beside the data path: `result_tables.py` reads every kind of result, and this one here. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from result_tables import NOT_REACHED, UNEQUAL, Row, Table, mark_peers

from offload.units import format_bytes, format_seconds

PROMISED_STEP = 1.06  # by default, over plain: 5 % and what rounds


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
        yield Table(f"SIMULATED, no GPU ran: {card}{host}", columns, made, content["machine"], "simulated")


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
    if row["name"] == "offload, default" and step > PROMISED_STEP:
        made.mark = cells[-1] = NOT_REACHED
    return made
