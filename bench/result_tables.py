"""Converts result files of every kind to tables, and marks where an alternative is better than offload.

`report.py` shows these tables. Needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.units import format_bytes, format_seconds

SHARE_EVEN = 0.97  # of a yardstick: less is marked as the yardstick's
PEER_BETTER = "peer better"
NOT_REACHED = "not reached"
UNEQUAL = "OTHER BITS"
EQUAL = "bit-equal"
GRADIENTS = "gradients"
SMALL = "small "  # begins the keys of rows that pytest-benchmark measured, at a small size
NETWORKS = {"gpt": "GPT", "gpt, the demo": "GPT of the demo", "lstm": "LSTM", "resnet": "ResNet", "unet": "U-Net",
            "vit": "ViT"}  # fmt: skip
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
    "kind": "what happens to it",
    "plain hooks us": "empty hooks",
    "pack us": "save",
    "pack and unpack us": "save and use",
    "processor us": "of it computing",
    "over plain hooks us": "more than empty hooks",
    "gap share": "gap",
    "slowdown share": "slowdown",
    "swaps": "swapped",
    "peak bytes": "peak",
    "limit bytes": "limit",
    "unswapped peak bytes": "peak without swaps",
}


@dataclass
class Row:
    """One line of a table. `key` names it for `why.json`; `point` is memory and step time over plain."""

    key: str
    cells: list[str]
    mark: str = ""
    ours: bool = False
    point: tuple[float, float] | None = None


@dataclass
class Table:
    """Rows under one title, and the machine they were measured on."""

    title: str
    columns: list[str]
    rows: list[Row]
    machine: Mapping[str, Any]
    kind: str = "plain"  # "frontier", "bars" and "simulated" have a picture
    values: dict[str, float] = field(default_factory=dict)  # of the bars, by label
    note: str = ""  # stands above the rows
    page: str = "parts"  # the page of the documentation that it is on

    @property
    def slug(self) -> str:
        """The title as a file's name."""
        whole = f"{self.title} {device_of(self.machine)}"
        words = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in whole)
        return "-".join(words.lower().split())


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
        return list(from_part(content))
    if content.get("format") == "offload-frontier/1":
        return list(frontiers(content["rows"], content["machine"]))
    if content.get("format") == "offload-largest/1":
        return list(largest_tables(content["rows"], content["machine"]))
    if content.get("format") == "offload-goals/1":
        return [reach_table(content)]
    if content.get("format") == "offload-predictions/1":
        return [predictions_table(content)]
    if content.get("format") == "offload-slowdown/1":
        return [slowdown_table(content)]
    if content.get("format") == "offload-simulated/1":
        from simulated_tables import simulated_tables  # which is made of what is defined here

        return list(simulated_tables(content))
    if content.get("format") == "offload-demo-memory/1":
        return []  # drawn by docs/charts.py
    if content.get("format") == "offload-gpu-suite/1":
        return [summary_table(content)]
    if "contestants" in content:
        return list(frontiers(demo_rows(content), demo_machine(content)))
    raise ValueError(
        f"{path}: no result of bench/; it reads what pytest-benchmark, race.py, largest.py, "
        "goals.py, simulated.py, gpu_suite.py and `offload demo --json` write"
    )


def device_of(machine: Mapping[str, Any]) -> str:
    """Where it ran, in two words."""
    return str(machine.get("device") or machine.get("processor") or "unknown")


def about(machine: Mapping[str, Any]) -> str:
    """Where, when and with what it ran, in one line."""
    words = [device_of(machine)]
    if machine.get("device") is None and machine.get("processors"):
        words.append(f"{machine['processors']} cores")
    for name, key in (("driver", "driver"), ("Python", "python"), ("torch", "torch")):
        if machine.get(key):
            words.append(f"{name} {machine[key]}")
    words += [str(machine.get("date", "date unknown"))[:10], f"commit {str(machine.get('commit', 'unknown'))[:12]}"]
    if machine.get("rehearsal"):
        words.append("A REHEARSAL: sizes are tiny, figures mean nothing")
    return ", ".join(words)


# -- frontiers ----------------------------------------------------------------------------------------------------


def frontiers(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], *, small: bool = False) -> Iterator[Table]:
    """One table for each network: memory and time of every contestant over plain's."""
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        columns = ["way", "memory", "step", "peak", "median step", "on disk", "pinned", "waits", GRADIENTS, ""]
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
        return Row(key, [row["name"], *["–"] * 8, reason or "no memory measured"], ours=bool(row.get("ours")))
    memory, step = float(row["memory_over_plain"]), float(row["step_over_plain"])
    lower, upper = row["step_seconds_spread"]
    equal = row["equal_losses"] and row["equal_gradients"]
    stalled = row.get("stall_seconds_per_step")
    cells = [
        row["name"],
        f"{memory:.2f} ×",
        f"{step:.2f} ×",
        format_bytes(int(row["peak_bytes"])),
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
        best = max((row["largest"] for row in own if row.get("ours") and "largest" in row), default=None)
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
    if "largest" not in row:
        reason = row.get("inapplicable") or f"failed: {row['error']}"
        return Row(key, [row["name"], *["–"] * 4, reason], ours=bool(row.get("ours")))
    over, cost = "–", "–"
    if base.get("largest"):
        over = f"{row['largest'] / base['largest']:.1f} ×"
        if row.get("step_seconds") and base.get("step_seconds"):
            each = row["step_seconds"] / row["largest"]
            cost = f"{each / (base['step_seconds'] / base['largest']):.2f} ×"
    seconds = f"{row['step_seconds']:.2f} s" if row.get("step_seconds") else "–"
    return Row(key, [row["name"], str(row["largest"]), over, seconds, cost, row.get("cut_short", "")],
               ours=bool(row.get("ours")))  # fmt: skip


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
        "bits",
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
        cells = ["equal" if row["bits_equal"] else "DIFFER", *map(format_bytes, peaks), *map(format_seconds, seconds)]
        rows.append(Row(f"prediction / {name}", [name, *cells]))
    note = "A plan predicts its peak and its step time. Peaks count tensors, not the resident set."
    return Table("Predicted and measured", columns, rows, content["machine"], note=note, page="targets")


def slowdown_table(content: Mapping[str, Any]) -> Table:
    """Whether `max_slowdown` was kept, network by network."""
    columns = ["network, max_slowdown", "bits", "plain step", "step over plain", "spread", "kept", "memory over plain"]
    rows = []
    for row in content["rows"]:
        lower, upper = row["ratio_spread"]
        name = f"{row['family']}, {row['max_slowdown']:.0%}"
        mark = "" if row["kept"] else NOT_REACHED
        cells = [
            "equal" if row["bits_equal"] else "DIFFER",
            format_seconds(row["plain_seconds"]),
            f"{row['ratio']:.2f} ×",
            f"{lower:.2f}–{upper:.2f}",
            mark or "yes",
            f"{row['peak_bytes'] / row['plain_peak_bytes']:.2f} × {format_bytes(row['plain_peak_bytes'])}",
        ]
        rows.append(Row(f"slowdown / {name}", [name, *cells], mark))
    return Table("Is max_slowdown kept?", columns, rows, content["machine"], page="targets")


def reach_table(content: Mapping[str, Any]) -> Table:
    """What `goals.py` measured or found in other results."""
    rows = []
    for name, row in content["rows"].items():
        mark = NOT_REACHED if row["met"] is False else ""
        verdict = mark or ("yes" if row["met"] else "–")
        rows.append(Row(f"goal / {name}", [row["what"], row["goal"], row["measured"], verdict], mark))
    columns = ["what", "target", "measured", "reached"]
    return Table("Targets without a GPU", columns, rows, content["machine"], page="targets")
