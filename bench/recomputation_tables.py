"""Tables about recomputation: results of `recomputation.py`, `recording.py`, `recipe_coverage.py`. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from table import EQUAL, GRADIENTS, NOT_REACHED, UNEQUAL, Row, Table

from offload.units import format_bytes, format_seconds

HIDDEN_SLOWDOWN = 0.03  # less is noise
RECORDING_SHARE_MAX = 0.01  # of the step
SHOWN_SHARE = 0.005  # of the saved bytes: operators below it are not named


def recomputation_table(content: Mapping[str, Any]) -> Table:
    """Steps within one limit, by swapping alone and with recomputation, over links of several speeds."""
    columns = [
        "network, link",
        GRADIENTS,
        "plain step",
        "swapping alone",
        "with recomputation",
        "predicted",
        "swapped",
        "recomputed",
        "peak predicted",
        "",
    ]
    rows = []
    for row in content["rows"]:
        name = f"{row['network']}, {row['link'] or 'not throttled'}"
        mark = "" if keeps_goal(row) else NOT_REACHED
        seconds = row["seconds"]
        plain = seconds["plain"]["median"]
        cells = [
            EQUAL if row["bits_equal"] else UNEQUAL,
            format_seconds(plain),
            f"{1 + row['slowdown_swap']:.2f} ×",
            f"{1 + row['slowdown_joint']:.2f} × "
            f"({seconds['joint']['low'] / plain:.2f}–{seconds['joint']['high'] / plain:.2f})",
            f"{row['predicted_seconds'] / plain:.2f} ×",
            format_bytes(row["swapped_bytes"]),
            f"{format_bytes(row['recomputed_bytes'])} in {format_seconds(row['recompute_seconds'])}",
            f"{row['predicted_peak_bytes'] / row['unswapped_peak_bytes']:.2f} × "
            f"{format_bytes(row['unswapped_peak_bytes'])}",
            mark,
        ]
        rows.append(Row(f"recomputation / {name}", [name, *cells], mark))
    note = (
        "The limit is a tenth of the way from the lowest feasible limit to the peak without swaps. Step times are "
        "relative to plain steps, which alternate with the others; quartiles are in brackets. "
        "The link is throttled by `OFFLOAD_THROTTLE`. The target: with a throttled link, recomputation "
        "leaves at most a third of the slowdown of swapping alone; "
        f"otherwise at most as much. A slowdown of less than {HIDDEN_SLOWDOWN:.0%} always counts as reached."
    )
    commits = dict.fromkeys(row["commit"][:12] for row in content["rows"] if "commit" in row)
    if commits:
        note += f" Rows were measured at commits {', '.join(commits)}."
    title = "Recomputation beside swapping alone"
    return Table(title, columns, rows, content["machine"], note=note, page="recomputation")


def keeps_goal(row: Mapping[str, Any]) -> bool:
    """Whether recomputation takes at most a third of the slowdown of swapping alone; not throttled: at most as much."""
    allowed = row["slowdown_swap"] / 3 if row["link"] else row["slowdown_swap"]
    return bool(row["slowdown_joint"] <= max(allowed, HIDDEN_SLOWDOWN))


def coverage_table(content: Mapping[str, Any]) -> Table:
    """How much of what networks save can be recomputed, by operator."""
    columns = ["network", "saved", "recomputed without heavy operators", "by operator", "with heavy operators too"]
    rows = []
    for row in content["rows"]:
        saved, light = row["saved_bytes"], row["light_bytes"]
        name = f"{row['network']}, {'autocast to bfloat16' if row['autocast'] else 'float32'}"
        parts = [(operator, nbytes / saved) for operator, nbytes in light.items()]
        named = [f"`{operator}` {share:.0%}" for operator, share in parts if share >= SHOWN_SHARE]
        without = sum(light.values()) / saved
        both = without + sum(row["heavy_bytes"].values()) / saved
        cells = [name, format_bytes(saved), f"{without:.0%}", ", ".join(named), f"{both:.0%}"]
        rows.append(Row(f"coverage / {name}", cells))
    note = (
        "The share of the saved bytes that a recipe gives, bit for bit. Heavy operators are matrix products, "
        "convolutions and attention. The operator is the last one of the recipe. Tensors below 1 KiB are left out; "
        "plans leave out those below 1 MiB."
    )
    return Table("What can be recomputed", columns, rows, content["machine"], note=note, page="recomputation")


def recording_table(content: Mapping[str, Any]) -> Table:
    """What recording operators and dropping tensors takes of a settled step."""
    columns = ["network", "step", "operators", "recording", "drops", "dropping", "both", ""]
    rows = []
    for row in content["rows"]:
        mark = NOT_REACHED if row["share"] > RECORDING_SHARE_MAX else ""
        each = row["mode_seconds_each"] + row["recorder_seconds_each"]
        cells = [
            row["network"],
            format_seconds(row["step_seconds"]),
            f"{row['operators']} × {format_seconds(each)}",
            f"{row['share_recording']:.2%}",
            f"{row['drops']} × {format_seconds(row['drop_seconds_each'])}",
            f"{row['share_hooks']:.2%}",
            f"{row['share']:.2%}",
            mark,
        ]
        rows.append(Row(f"recording / {row['network']}", cells, mark))
    note = (
        "Time of the training thread, as a share of the step, once plans are settled, over a link throttled to "
        "0.15 GB/s, torch with one thread. Running the recipes is no part. The target for both together is "
        f"{RECORDING_SHARE_MAX:.0%}."
    )
    title = "Recording operators and dropping tensors"
    return Table(title, columns, rows, content["machine"], note=note, page="recomputation")
