"""Tables of `settling.py`: the controller's decisions in the first steps of a training. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from table import NETWORKS, Row, Table

from offload.units import format_bytes, format_seconds

SLOW = 2.0  # times plain: the target for every step but the profiled and the trial ones
SETTLED_BY = 20  # steps
WENT_BACK = "back to"
CHANGES = {"new plan": "new plan", "planning again": "plans again", WENT_BACK: "goes back"}  # of the plan, as logged
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
        title = f"The first {len(run['steps'])} steps: {name}"
        yield Table(title, columns, rows, content["machine"], "settling", note=note(run), page="settling", run=run)


def note(run: Mapping[str, Any]) -> str:
    """Say when the plan was found, how slow the steps before were, and whether the controller went back."""
    ratios = [step["seconds"] / plain["seconds"] for step, plain in zip(run["steps"], run["plain"], strict=True)]
    changed = [number for number, step in enumerate(run["steps"], 1) if any(map(change_of, step["decisions"]))]
    settled = max(changed, default=0)
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


def peak(steps: Sequence[Mapping[str, Any]]) -> int:
    """The most memory of these steps, in bytes."""
    return max(int(step["peak_bytes"]) for step in steps)
