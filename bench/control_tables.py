"""Tables of what the controller does: the results of `settling.py`, `same_script.py`, `mallocs.py` and `pairs.py`.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, sqrt
from statistics import NormalDist, median
from typing import Any

from table import EQUAL, GRADIENTS, NETWORKS, NOT_REACHED, UNEQUAL, Row, Table, processor_of

from offload.units import format_bytes, format_seconds

SLOW = 2.0  # times plain: the target for every step but the profiled and the trial ones
SETTLED_BY = 20  # steps
SPREAD_MAX = 0.1  # of the memory of the same script
KEPT_SHARE = 0.9  # of searches that begin with the same plan
PAIRS_IN_TIME = 8  # pairs of steps that a search can measure before step `SETTLED_BY`
FIRST_STEPS = 3  # before the first pair: the profiled and the trial step, and the first step of the plan
WENT_BACK = "back to"
CHANGES = {  # of the plan, as logged
    "new plan": "new plan",
    "planning again": "plans again",
    "searching again": "searches again",
    "measuring a plan again": "measures a plan again",
    WENT_BACK: "goes back",
}
MORE = "steady_peak_bytes", "allocated_bytes", "file_bytes"
BY_ITSELF = ("profiled", "trial")  # slow steps that no plan is judged by


def settling_tables(content: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table for each network: every line that the library logged, with its step."""
    columns = ["step", "kind", "step time", "memory", "logged"]
    for run in content["rows"]:
        name = NETWORKS.get(run["family"], run["family"])
        rows = []
        for number, step in enumerate(run["steps"], 1):
            for place, (_, text) in enumerate(step["decisions"]):
                about = [str(number), step["kind"], format_seconds(step["seconds"]), format_bytes(step["peak_bytes"])]
                cells = about if place == 0 else [""] * len(about)
                rows.append(Row(f"settling / {run['family']} {number}.{place}", [*cells, "; ".join(text.splitlines())]))
        plain = format_seconds(median(step["seconds"] for step in run["plain"]))  # a network has two sizes
        title = f"The first {len(run['steps'])} steps: {name}, {plain}, {processor_of(content['machine'])}"
        yield Table(title, columns, rows, content["machine"], "settling", note=note(run), page="settling", run=run)


def same_script_table(content: Mapping[str, Any]) -> Table:
    """How much memory varies between runs of the same script."""
    columns = ["runs", GRADIENTS, "memory", "spread of memory", "memory over plain", "step over plain", "kept", ""]
    malloc = " and ".join(sorted({run["allocator"] for run in content["runs"]}))
    is_anew = content.get("anew", True)  # in older results, no run began with those before it
    groups = {
        "alone": [run for run in content["runs"] if not run["beside"]],
        "beside another program": [run for run in content["runs"] if run["beside"]],
        "all": content["runs"],
    }
    rows = []
    for name, runs in groups.items():
        if not runs:
            continue
        peaks, ratios = [run["peak_bytes"] for run in runs], [run["ratio"] for run in runs]
        apart = (max(peaks) - min(peaks)) / median(peaks)
        kept = sum(run["kept"] for run in runs)
        mark = "" if apart <= SPREAD_MAX and kept == len(runs) else NOT_REACHED
        cells = [
            f"{len(runs)} {name}" if name != "all" else f"all {len(runs)}",
            EQUAL if all(run["bits_equal"] for run in runs) else UNEQUAL,
            f"{format_bytes(min(peaks))}–{format_bytes(max(peaks))}",
            f"{apart:.0%}",
            f"{median(run['peak_bytes'] / run['plain_peak_bytes'] for run in runs):.2f} ×",
            f"{median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})",
            f"{kept} of {len(runs)}",
            mark,
        ]
        rows.append(Row(f"same script{'' if is_anew else ' again'}, {malloc} / {name}", cells, mark))
    begins = (
        "begins without what earlier ones have measured" if is_anew else "begins with what those before it measured"
    )
    note = (
        f"The {NETWORKS.get(content['family'], content['family'])} with default settings, each time in a new process "
        f"(with {malloc}) that {begins}, in turn with plain steps. The other program computes on one "
        "processor, beside plain steps too. *Spread*: from the least to the most memory, relative to the median. The "
        f"target: at most {SPREAD_MAX:.0%}, and the slowdown is kept within 1 % of noise."
    )
    title = "The same script, each run anew" if is_anew else "The same script again"
    return Table(f"{title}, {malloc}", columns, rows, content["machine"], note=note, page="targets")


def memory_noise_table(content: Mapping[str, Any]) -> Table:
    """How often a process needs more memory than a plain one beside it: a second plain one, and one with offload.

    `content`: the result of `slowdown.py` with several rows for each network, plain and with a `max_slowdown`.
    """
    compared = ["plain again", "above plain", "with offload", "above plain"]
    columns = ["network", GRADIENTS, "plain growth", *compared, "more", "of it allocated", "of it code"]
    families = list(dict.fromkeys(row["family"] for row in content["rows"]))
    rows, again = [], []
    for family in families:
        found = [row for row in content["rows"] if row["family"] == family]
        plain, own = ([row for row in found if (row["max_slowdown"] is None) is is_plain] for is_plain in (True, False))
        again += map(_is_above, plain)
        mark = NOT_REACHED if any(map(_is_above, own)) else ""
        cells = [
            NETWORKS.get(family, family),
            EQUAL if all(row["bits_equal"] for row in found) else UNEQUAL,
            format_bytes(int(median(row["plain_steady_peak_bytes"] for row in found))),
            *_comparison(plain),
            *_comparison(own),
            *(format_bytes(max(0, int(median(row[each] - row[f"plain_{each}"] for row in own)))) for each in MORE),
        ]
        rows.append(Row(f"memory noise / {family}", cells, mark))
    note = (
        "Growth of the resident set in the measured steps, over that of a plain process that steps in turn. *Plain "
        "again*: the other process trains without offload, too. *More*: how much with offload, in the median; the rest "
        "of it is free memory that malloc and Python keep. These networks end with nothing swapped, so the process "
        "allocates what plain allocates, and keeps offload's records and pages of the code that has run besides. "
        f"{sum(again)} of {len(again)} plain processes needed more memory than the plain process beside them."
    )
    title = f"Memory above plain: {processor_of(content['machine'])}"
    return Table(title, columns, rows, content["machine"], note=note, page="targets")


def _is_above(row: Mapping[str, Any]) -> bool:
    above: bool = row["steady_peak_bytes"] > row["plain_steady_peak_bytes"]
    return above


def _comparison(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    shares = [row["steady_peak_bytes"] / row["plain_steady_peak_bytes"] for row in rows]
    above = sum(map(_is_above, rows))
    return f"{median(shares):.2f} × ({min(shares):.2f}–{max(shares):.2f})", f"{above} of {len(rows)}"


def mallocs_table(content: Mapping[str, Any]) -> Table:
    """Memory and time with each malloc, and how much memory varies between processes."""
    columns = ["network", "malloc", GRADIENTS, "plain memory", "memory", "spread of memory", "plain step",
               "step over plain"]  # fmt: skip
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in content["rows"]:
        groups.setdefault((row["family"], row["malloc"]), []).append(row)
    rows = []
    for (family, malloc), runs in groups.items():
        plain, own = ([run[way]["peak_bytes"] for run in runs] for way in ("plain", "offloaded"))
        cells = [
            NETWORKS.get(family, family),
            malloc,
            EQUAL if all(run["bits_equal"] for run in runs) else UNEQUAL,
            *(f"{format_bytes(min(peaks))}–{format_bytes(max(peaks))}" for peaks in (plain, own)),
            f"{(max(own) - min(own)) / median(own):.0%}",
            format_seconds(median(run["plain"]["seconds"] for run in runs)),
            f"{median(run['offloaded']['seconds'] / run['plain']['seconds'] for run in runs):.2f} ×",
        ]
        rows.append(Row(f"mallocs / {family} {malloc}", cells))
    counts = sorted({len(runs) for runs in groups.values()})
    note = (
        f"Medians of {' or '.join(map(str, counts))} rounds. In each, new processes with each malloc take turns: one "
        "trains plain, one with `max_slowdown=0.25`, which almost always keeps its first plan. glibc has its own "
        f"settings, the others those of `offload run`. The first {FIRST_STEPS} steps and reference steps are not "
        "timed; memory is that of all steps. *Spread*: from the least to the most memory, relative to the median."
    )
    return Table("Mallocs", columns, rows, content["machine"], note=note)


def pairs_table(content: Mapping[str, Any]) -> Table:
    """How exactly a slowdown is known from some pairs of steps, and how often the plan would be kept."""
    columns = ["network", "slowdown", "pairs of steps", "known at step", "off by", "error found", "kept in", ""]
    rows, needed = [], []
    for row in content["rows"]:
        beside = ", beside another program" if row.get("beside") else ""
        name = NETWORKS.get(row["family"], row["family"]) + beside
        for each in row["counts"]:
            cells = [
                name,
                f"{row['all']:.1%}",
                str(each["count"]),
                str(FIRST_STEPS + 2 * each["count"] + 1),
                *(f"{100 * each[key]:.2f} points" for key in ("deviation", "error")),
                f"{each['kept']:.0%}",
            ]
            is_short = each["count"] == PAIRS_IN_TIME and each["kept"] < KEPT_SHARE
            mark = NOT_REACHED if is_short else ""
            rows.append(Row(f"pairs / {row['family']}{beside} {each['count']}", [*cells, mark], mark))
        pairs = pairs_needed(row)
        needed.append(f"{name}: {f'about {pairs}' if pairs else 'no number of'} pairs")
    limits = sorted({f"{row['max_slowdown']:.0%}" for row in content["rows"]})
    note = (
        "Each network follows the first plan of a search with the default `max_slowdown`, in turn with reference "
        "steps. *Off by*: the standard deviation of the slowdowns that searches would find from so many consecutive "
        "pairs of steps. *Error found*: the mean standard error that they would find. *Kept in*: how often slowdown "
        f"plus standard error is at most {', '.join(limits)}. The target of {SETTLED_BY} steps leaves time for "
        f"{PAIRS_IN_TIME} pairs. Computed from *off by* with {PAIRS_IN_TIME} pairs, to keep the plan in "
        f"{KEPT_SHARE:.0%} of all searches takes: {'; '.join(needed)}."
    )
    return Table("How exactly a slowdown is known", columns, rows, content["machine"], note=note, page="targets")


def pairs_needed(row: Mapping[str, Any]) -> int:
    """How many pairs of steps a search has to measure to keep the plan in `KEPT_SHARE` of all cases; 0: no number.

    Slowdowns from n pairs are taken as normally distributed, with a deviation that shrinks with √n. The plan is kept if
    the slowdown is below the limit by one standard error.
    """
    found = next(each for each in row["counts"] if each["count"] == PAIRS_IN_TIME)
    below = row["max_slowdown"] - row["all"]
    errors = NormalDist().inv_cdf(KEPT_SHARE) + 1
    return ceil((errors * found["deviation"] * sqrt(PAIRS_IN_TIME) / below) ** 2) if below > 0 else 0


def note(run: Mapping[str, Any]) -> str:
    """Say when the plan was found, how slow the steps before were, and whether the controller went back."""
    ratios = [step["seconds"] / plain["seconds"] for step, plain in zip(run["steps"], run["plain"], strict=True)]
    settled = last_change(run["steps"])
    by_plan = [ratio for ratio, step in zip(ratios, run["steps"], strict=True) if step["kind"] not in BY_ITSELF]
    words = [f"Losses and gradients are {'equal to the last bit' if run['bits_equal'] else 'NOT EQUAL'}."]
    words.append(f"The plan changes for the last time at step {settled} (target: {SETTLED_BY} or fewer).")
    if by_plan:
        words.append(
            f"The slowest step besides profiled and trial steps takes {max(by_plan):.2f} × plain's time in the same "
            f"turn (target: {SLOW:g} × or less)."
        )
    if ratios[settled:]:
        memory = peak(run["steps"][settled:]) / max(1, peak(run["plain"][settled:]))
        words.append(
            f"After the last change, the median is {median(ratios[settled:]):.2f} ×, at {memory:.2f} × memory."
        )
    back = [number for number, step in enumerate(run["steps"], 1)
            if any(text.startswith(WENT_BACK) for _, text in step["decisions"])]  # fmt: skip
    words.append(f"The controller goes back to an earlier plan at step {', '.join(map(str, back))}." if back else
                 "In this run the controller goes back to no earlier plan.")  # fmt: skip
    return " ".join(words)


def change_of(decision: Sequence[str]) -> str:
    """How a logged line changes the plan, in two words; empty if it does not."""
    return next((words for begin, words in CHANGES.items() if decision[1].startswith(begin)), "")


def last_change(steps: Sequence[Mapping[str, Any]]) -> int:
    """The number of the last step, from 1, before which the plan changed; 0 if it never changed."""
    return max((number for number, step in enumerate(steps, 1) if any(map(change_of, step["decisions"]))), default=0)


def decisions(steps: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """What the controller logged at level INFO: the number of the step, from 1, and the text."""
    return [
        (number, text) for number, step in enumerate(steps, 1) for level, text in step["decisions"] if level == "INFO"
    ]


def peak(steps: Sequence[Mapping[str, Any]]) -> int:
    """The most memory of these steps, in bytes."""
    return max(int(step["peak_bytes"]) for step in steps)
