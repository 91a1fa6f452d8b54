"""What simulated.py found as tables: one for each card, in virtual time.

`result_tables.py` reads every kind of result, and uses this module for the simulated ones. It needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from step_tables import mark_peers
from table import EQUAL, GRADIENTS, NETWORKS, NOT_REACHED, UNEQUAL, Row, Table

from offload.units import format_bytes, format_seconds

BY_DEFAULT = "offload, default"
NOTE = """**Every figure here is simulated; no GPU ran.** The real engine and its alternatives ran on the simulated
accelerator of `tests/twin`, in virtual time. Durations are computed from assumed figures of the card: {rates},
{kernel} for a kernel, {copy} to start a copy, {launch} of the host to queue one of them, {host}. Pinning memory costs
nothing.

Each network is computed smaller than the one it stands for: 1/k as wide, with 1/k of the positions. The card's figures
are scaled too, so that every kernel and copy takes as long as that of the large network. The engine's thresholds in
bytes, such as that for joining small blocks, are not scaled. The networks stand for:

{networks}

*Beside kernels*: share of the copy time during which a kernel runs. *Alone*: copy time while none runs. *Predicted*:
how far the plan's prediction of the time until the end of backward is off."""
PROMISED_STEP = 1.06  # by default, over plain: 5 % and what rounds
ROUNDING = 0.005  # of a limit


def simulated_tables(content: Mapping[str, Any]) -> Iterator[Table]:
    """One table for each card: every network's ways, in virtual time."""
    columns = ["network", "way", "memory", "step", "beside kernels", "alone", "predicted", GRADIENTS, ""]
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
        note = note_on(card, factor, content)
        yield Table(title, columns, made, content["machine"], "simulated", note=note, page="simulated")


def note_on(card: str, factor: float, content: Mapping[str, Any]) -> str:
    """What is simulated, from which figures, and what stands for what."""
    about = next(each for each in content["cards"] if each["name"] == card)
    each = {name: f"{seconds * 1e6:g} µs" for name, seconds in content["seconds_each"].items()}
    ran = {row["family"] for row in content["rows"] if (row["card"], row["host_factor"]) == (card, factor)}
    networks = [
        f"* {NETWORKS.get(network['family'], network['family'])}: {network['stands_for']}, k = {network['factor']}"
        for network in content["networks"]
        if network["family"] in ran
    ]
    host = f"the host's own time, as measured, × {factor:g}" if factor else "nothing for the host's own time"
    rates = (
        f"{about['flops_per_second'] / 1e12:g} TFLOP/s, {about['bytes_per_second'] / 1e12:g} TB/s of memory, "
        f"{about['link_bytes_per_second'] / 1e9:g} GB/s each way over the link"
    )
    return NOTE.format(rates=rates, host=host, networks="\n".join(networks), **each)


def simulated_row(row: Mapping[str, Any]) -> Row:
    """One way's row: memory and step of the large network, from virtual time."""
    key, names = f"simulated {row['family']} / {row['name']}", [NETWORKS.get(row["family"], row["family"]), row["name"]]
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
        EQUAL if row["equal"] else UNEQUAL,
        "",
    ]
    made = Row(key, cells, ours=row["ours"], point=(memory, step))
    limit = re.search(r"(\d+)% of plain", row["name"])
    is_over = limit is not None and memory > int(limit[1]) / 100 + ROUNDING
    if is_over or (row["name"] == BY_DEFAULT and step > PROMISED_STEP):
        made.mark = cells[-1] = NOT_REACHED
    return made
