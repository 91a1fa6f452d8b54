"""Converts result files of every kind to tables, and marks where an alternative is better than offload.

`report.py` shows these tables. Needs no torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_tables import mallocs_table, memory_noise_table, pairs_table, same_script_table, settling_tables
from recomputation_tables import coverage_table, recomputation_table, recording_table
from step_tables import demo_machine, demo_rows, frontiers, largest_tables
from table import EQUAL, GRADIENTS, NOT_REACHED, PEER_BETTER, UNEQUAL, Row, Table, processor_of

from offload.units import format_bytes, format_seconds

SHARE_EVEN = 0.97  # of a yardstick: less is marked as the yardstick's
NOISE = 0.01  # of a ratio of step times
SHARE_FRONTIER = 1 / 0.9  # of the least growth: more is far from the frontier
GROUPS = {
    "copies of the slab tier, cpu": (
        "Copies to pinned memory, imitated on the CPU",
        "A *slab* is a large allocation of pinned memory that is divided into blocks. Blocks are copied *out* to the "
        "slab, back *into* the device's memory, or *both* ways at once.",
    ),
    "spill file, write": ("Writing the spill file", "The case is the size of a block in MiB."),
    "spill file, read": ("Reading the spill file", "The case is the size of a block in MiB."),
    "slab memory, 1 GiB": ("Preparing 1 GiB of slab memory", ""),
    "slab memory, blocks of odd sizes": ("Slab memory lost to blocks of odd sizes", ""),
    "hooks, one step that saves tensors": (
        "Time of the hooks for one saved tensor",
        "*Empty hooks* are saved-tensor hooks that return what they get. *Duplicate*: the same tensor saved again. "
        "*View*: one of several views of a storage that is swapped once.",
    ),
    "planner, recorded traces": (
        "Planner: recorded steps",
        "The limit is half or a tenth of the way from the lowest feasible limit to the peak without swaps. *Gap*: how "
        "much faster a plan could be at most.",
    ),
    "planner, shapes of 250 tensors": ("Planner: generated steps of 250 tensors", "As above."),
}
FIGURES = {
    "bytes": "size",
    "bytes per second": "speed",
    "yardstick": "compared with",
    "yardstick bytes per second": "its speed",
    "share of yardstick": "speed over it",
    "block bytes": "block",
    "waste share": "memory wasted",
    "power of two waste share": "wasted with powers of two",
    "plain hooks us": "empty hooks",
    "pack us": "save",
    "pack and unpack us": "save and use",
    "processor us": "of it computing",
    "over plain hooks us": "more than empty hooks",
    "over copies us": "beyond copies",
    "gap share": "gap",
    "slowdown share": "slowdown",
    "swaps": "swapped",
    "peak bytes": "peak",
    "limit bytes": "limit",
    "unswapped peak bytes": "peak without swaps",
}


def read(path: Path) -> list[Table]:
    """Read the tables of one result file, or of every one in a folder.

    Raises
    ------
    ValueError
        The file is of no known kind.
    """
    if path.is_dir():
        return [table for file in sorted(path.rglob("*.json")) for table in read(file)]
    content = json.loads(path.read_text(encoding="utf-8"))
    if "benchmarks" in content:
        return list(from_benchmarks(content))
    if "part" in content:
        return [replace(table, page="gpu") for table in from_part(content)]
    if content.get("format") == "offload-frontier/1":
        return list(frontiers(content["rows"], content["machine"]))
    if content.get("format") == "offload-largest/1":
        return list(largest_tables(content["rows"], content["machine"]))
    if content.get("format") == "offload-goals/1":
        return [reach_table(content)]
    if content.get("format") == "offload-predictions/1":
        return [predictions_table(content)]
    if content.get("format") == "offload-slowdown/1":
        wishes = Counter((row["family"], str(row["size"]), row["max_slowdown"]) for row in content["rows"])
        is_repeated = min(wishes.values()) > 1
        return [memory_noise_table(content) if is_repeated else slowdown_table(content)]
    if content.get("format") == "offload-sweep/1":
        return [sweep_table(content)]
    if content.get("format") in ("offload-same-script/1", "offload-same-script/2"):
        return [same_script_table(content)]
    if content.get("format") == "offload-mallocs/1":
        return [mallocs_table(content)]
    if content.get("format") == "offload-pairs/1":
        return [pairs_table(content)]
    if content.get("format") == "offload-settling/1":
        return list(settling_tables(content))
    if content.get("format") == "offload-recomputation/1":
        return [recomputation_table(content)]
    if content.get("format") == "offload-coverage/1":
        return [coverage_table(content)]
    if content.get("format") == "offload-recording/1":
        return [recording_table(content)]
    if content.get("format") == "offload-simulated/1":
        from simulated_tables import simulated_tables  # which is made of what is defined here

        return list(simulated_tables(content))
    if content.get("format") == "offload-demo-memory/1":
        return []  # drawn by docs/charts.py
    if content.get("format") in ("offload-state/2", "offload-state-plan/1", "offload-frozen-base/1"):
        return []  # told in docs/optimizer.md and docs/parameters.md
    if content.get("format") == "offload-gpu-suite/1":
        return [summary_table(content)]
    if "contestants" in content:
        return list(frontiers(demo_rows(content), demo_machine(content)))
    raise ValueError(
        f"{path}: no result of bench/; it reads what pytest-benchmark, race.py, largest.py, "
        "goals.py, simulated.py, gpu_suite.py and `offload demo --json` write"
    )


# -- what pytest-benchmark and the suite leave ---------------------------------------------------------------------


def from_benchmarks(content: Mapping[str, Any]) -> Iterator[Table]:
    """Tables by group; what could not run here is the last one."""
    machine = content["machine_info"].get("offload", {})
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for each in content["benchmarks"]:
        groups.setdefault(each["group"] or "other", []).append(each)
    steps = [each["extra_info"] for group, rows in groups.items() if group.startswith("steps, ") for each in rows]
    yield from frontiers(steps, machine, small=True)
    found = [each["extra_info"] for group, rows in groups.items() if group.startswith("largest ") for each in rows]
    yield from largest_tables(found, machine, small=True)
    for group, rows in groups.items():
        if not group.startswith(("steps, ", "largest ")):
            yield plain_table(group, rows, machine)
    if content.get("not_run"):
        rows = [Row(each["name"], [case_of(each["name"]), each["reason"]]) for each in content["not_run"]]
        yield Table("Not run here", ["what", "why"], rows, machine, page="small")


def plain_table(group: str, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> Table:
    """A group's medians beside its extra_info."""
    extra = list(dict.fromkeys(name for row in rows for name, value in row["extra_info"].items() if is_flat(value)))
    extra = [name for name in extra if name != "kind"]  # as the case
    made = []
    for row in rows:
        cells = [case_of(row["name"]), f"{row['stats']['median'] * 1e3:.3f} ms"]
        cells += [shown(name, row["extra_info"].get(name)) for name in extra]
        share = row["extra_info"].get("share_of_yardstick")
        mark = PEER_BETTER if share is not None and share < SHARE_EVEN else ""
        made.append(Row(f"{group} / {row['name']}", [*cells, mark], mark))
    spelt = [name.replace("_", " ") for name in extra]
    columns = ["case", "median time", *(FIGURES.get(name, name) for name in spelt), ""]
    title, note = GROUPS.get(group, (group[0].upper() + group[1:], ""))
    return Table(title, columns, made, machine, note=note)


def case_of(test: str) -> str:
    """The case in the name of a benchmark: what its brackets hold, otherwise its words.

    Examples
    --------
    >>> case_of("test_recorded[vit-half]"), case_of("test_slab_waste")
    ('vit, half', 'slab waste')
    """
    inner = re.fullmatch(r"test_\w+\[(.*)\]", test)
    return inner[1].replace("-", ", ", 1) if inner else test.removeprefix("test_").replace("_", " ")


def is_flat(value: object) -> bool:
    """Whether a cell can hold it."""
    return value is None or isinstance(value, (str, int, float))


def shown(name: str, value: object) -> str:
    """A figure in the unit that its name tells."""
    if value is None or isinstance(value, (bool, str)):
        return "–" if value is None else str(value)
    assert isinstance(value, (int, float))
    if "bytes_per_second" in name:
        return f"{value / 1e9:.2f} GB/s"
    if "bytes" in name:
        return format_bytes(round(value))
    if "share" in name or name.startswith(("gap", "above")):
        return f"{value:.2%}"
    if name.endswith("_us"):
        return f"{value:.1f} µs"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def from_part(content: Mapping[str, Any]) -> Iterator[Table]:
    """Tables of one part of the GPU suite."""
    machine, results, part = content["machine"], content["results"], content["part"]
    if part.startswith("frontier"):
        yield from frontiers(results.get("rows", []), machine)
    elif part == "largest":
        yield from largest_tables(results.get("rows", []), machine)
    elif part == "copies":
        yield from copy_tables(results, machine)


def copy_tables(results: Mapping[str, Any], machine: Mapping[str, Any]) -> Iterator[Table]:
    """The suite's copies, its control path and its slab memory."""
    rows = []
    for each in results.get("copies", []):
        name = f"{each['direction']}, {format_bytes(each['block_bytes'])}"
        rates = [f"{each[f'{who}_bytes_per_second'] / 1e9:.2f} GB/s" for who in ("store", "torch")]
        mark = PEER_BETTER if each["store_over_torch"] < SHARE_EVEN else ""
        rows.append(Row(f"copies / {name}", [name, *rates, f"{each['store_over_torch']:.0%}", mark], mark))
    if rows:
        yield Table("Copies", ["blocks", "swap store", "Tensor.copy_, pinned", "share", ""], rows, machine)
    costs = [Row(each["kind"], [each["kind"], f"{each['plain_us']:.1f} µs", f"{each['offload_us']:.1f} µs"])
             for each in results.get("control_path", [])]  # fmt: skip
    if costs:
        yield Table("Control path per saved tensor", ["kind", "hooks that do nothing", "offload"], costs, machine)
    memory = results.get("slab_memory")
    if memory:
        taken = memory["seconds_per_gib"]
        cells = [f"{taken['slab']:.3f} s", f"{taken['torch']:.3f} s", f"{memory['slab_over_torch']:.2f} ×"]
        mark = PEER_BETTER if memory["slab_over_torch"] < SHARE_EVEN else ""
        row = Row("pinned memory", ["1 GiB pinned", *cells, mark], mark)
        yield Table("Pinned memory", ["what", "slab", "pin_memory()", "faster", ""], [row], machine)


def summary_table(content: Mapping[str, Any]) -> Table:
    """How the parts of the GPU suite ended."""
    rows = [
        Row(f"suite / {name}", [name, part["status"], f"{part['seconds']:.0f} s", part["reason"]])
        for name, part in content["parts"].items()
    ]
    return Table("GPU suite", ["part", "ended", "took", "why"], rows, content["machine"])


def predictions_table(content: Mapping[str, Any]) -> Table:
    """Plans that ran: predicted beside measured."""
    columns = [
        "network, goal",
        GRADIENTS,
        "peak measured",
        "peak predicted",
        "peak without swaps",
        "step measured",
        "step predicted",
        "plain step",
    ]
    rows = []
    for row in content["rows"]:
        name = f"{row['family']}, {row['wish']}"
        peaks = [row[f"{each}_peak_bytes"] for each in ("measured", "predicted", "unswapped")]
        seconds = [row[f"{each}_seconds"] for each in ("measured", "predicted", "plain")]
        cells = [EQUAL if row["bits_equal"] else UNEQUAL, *map(format_bytes, peaks), *map(format_seconds, seconds)]
        rows.append(Row(f"prediction / {name}", [name, *cells]))
    note = "A plan predicts its peak and its step time. Peaks count tensors, not the resident set."
    return Table("Predicted and measured", columns, rows, content["machine"], note=note, page="targets")


def slowdown_table(content: Mapping[str, Any]) -> Table:
    """Whether `max_slowdown` was kept, network by network; the longer steps of a network in two sizes are "large"."""
    columns = [
        "network, max_slowdown",
        GRADIENTS,
        "plain step",
        "step over plain",
        "spread",
        "kept",
        "memory over plain",
        "of the measured steps",
        "last change at step",
    ]
    rows = []
    for row in content["rows"]:
        lower, upper = row["ratio_spread"]
        others = [each for each in content["rows"] if each["family"] == row["family"] and each["size"] != row["size"]]
        is_large = any(each["plain_seconds"] < row["plain_seconds"] for each in others)
        limit = "plain again" if row["max_slowdown"] is None else format(row["max_slowdown"], ".0%")
        name = f"{row['family']}{', large' if is_large else ''}, {limit}"
        mark = "" if row["kept"] else NOT_REACHED
        cells = [
            EQUAL if row["bits_equal"] else UNEQUAL,
            format_seconds(row["plain_seconds"]),
            f"{row['ratio']:.2f} ×",
            f"{lower:.2f}–{upper:.2f}",
            "–" if row["max_slowdown"] is None else mark or "yes",
            f"{row['peak_bytes'] / row['plain_peak_bytes']:.2f} × {format_bytes(row['plain_peak_bytes'])}",
            f"{row['steady_peak_bytes'] / max(1, row['plain_steady_peak_bytes']):.2f} ×",
            str(row["last_change"]),
        ]
        rows.append(Row(f"slowdown / {name}", [name, *cells], mark))
    note = (
        "Plain and offloaded steps take turns. Step time: the medians of the measured steps, those after the first 40, "
        "in which the search for a plan usually ends. Memory: growth of the resident set in all steps, search included,"
        " and in the measured steps. *Kept* allows 1 % for noise. *Last change*: the number of the first step with the "
        "last plan."
    )
    if any(row["max_slowdown"] is None for row in content["rows"]):
        note += " *Plain again*: both processes train without offload, so the difference is noise."
    note += above_plain([row for row in content["rows"] if row["max_slowdown"] is not None])
    asked = {row["max_slowdown"] for row in content["rows"]} - {None}
    what = "max_slowdown"
    if len(asked) == 1:
        [share] = asked
        what = "the default max_slowdown" if share == 0.05 else f"a max_slowdown of {share:.0%}"
    # Both are measured on several machines, each with a table of its own.
    title = f"Is {what} kept? {processor_of(content['machine'])}"
    return Table(title, columns, rows, content["machine"], note=note, page="targets")


def above_plain(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in how many rows the measured steps need more memory than plain's, by how much and why; empty if in none."""
    above = [row for row in rows if row["steady_peak_bytes"] > row["plain_steady_peak_bytes"]]
    if not above:
        return ""
    more = [row["steady_peak_bytes"] - row["plain_steady_peak_bytes"] for row in above]
    said = (
        f" In {len(above)} of {len(rows)} rows the measured steps need more memory than plain's: by "
        f"{format_bytes(min(more))} to {format_bytes(max(more))}."
    )
    counts = [(row.get("allocated_bytes"), row.get("plain_allocated_bytes")) for row in above]
    own = [one - other for one, other in counts if one is not None and other is not None]
    if not own:
        return f"{said} Malloc may keep free memory from the search."
    return (
        f"{said} By malloc's count, at most {format_bytes(max(0, *own))} more than with plain was allocated after the "
        f"last step ({len(own)} of these rows counted); malloc may keep free memory from the search."
    )


def sweep_table(content: Mapping[str, Any]) -> Table:
    """What `max_slowdown` chose, beside the plans of a sweep over memory limits."""
    columns = ["network", GRADIENTS, "plain step", "max_slowdown chose", "least growth within it", "sweep", ""]
    rows = []
    for row in content["rows"]:
        chosen, best = row["chosen"], least_kept(row)
        is_far = best is not None and chosen["growth"] > SHARE_FRONTIER * best["growth"]
        mark = NOT_REACHED if is_far or not is_kept(chosen, row) else ""
        cells = [
            EQUAL if row["bits_equal"] else UNEQUAL,
            format_seconds(row["plain_seconds"]),
            f"{chosen['growth']:.2f} × at {chosen['ratio']:.2f} ×",
            "none" if best is None else f"{best['growth']:.2f} × at {best['ratio']:.2f} ×",
            ", ".join(f"{each['growth']:.2f} × at {each['ratio']:.2f} ×" for each in row["points"].values()),
            mark,
        ]
        rows.append(Row(f"sweep / {row['family']}", [row["family"], *cells], mark))
    note = (
        "*Growth* is the predicted peak of tensors above what is in memory before the step, relative to the same "
        "without swaps. The target: the slowdown is kept within 1 % of noise, and no plan of the sweep that keeps it "
        "has 10 % less growth."
    )
    title = f"max_slowdown and the frontier, {processor_of(content['machine'])}"
    return Table(title, columns, rows, content["machine"], note=note, page="targets")


def is_kept(point: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether the step time of a point of a sweep is within the row's `max_slowdown`."""
    return bool(point["ratio"] <= 1 + row["max_slowdown"] + NOISE)


def least_kept(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The point of least memory that is within `max_slowdown`; None if there is none."""
    kept = [each for each in row["points"].values() if is_kept(each, row)]
    return min(kept, key=lambda each: float(each["growth"]), default=None)


def reach_table(content: Mapping[str, Any]) -> Table:
    """What `goals.py` measured or found in other results."""
    rows = []
    for name, row in content["rows"].items():
        mark = NOT_REACHED if row["met"] is False else ""
        verdict = mark or ("yes" if row["met"] else "–")
        rows.append(Row(f"goal / {name}", [row["what"], row["goal"], row["measured"], verdict], mark))
    columns = ["what", "target", "measured", "reached"]
    return Table("Targets without a GPU", columns, rows, content["machine"], page="targets")
