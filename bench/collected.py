"""Reads figures from the result files of longer runs: planned steps, whole steps, the largest model that trains.

`goals.py` shows them together with its own measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from result_file import read_json

STEP_OFF_MAX = 0.10
PEAK_OFF_MAX = 0.05
DEFAULT_SLOWDOWN_MAX = 0.07
STEPS_GROWTH_MAX = 0.33
STEPS_TIME_MAX = 1.08
TUTORIAL_SPEEDUP_MIN = 1.8
LARGEST_MIN = 5.0
LARGEST_SLOWDOWN_MAX = 1.20
LEAST_NAME = "offload, least memory"
COMMANDS = {
    "offload-predictions/1": "python bench/predictions.py --json",
    "offload-frontier/1": "python bench/race.py --json",
    "offload-largest/1": "python bench/largest.py --json",
}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Finding:
    """A result as text and as figures; `met` is None if there is no goal."""

    measured: str
    met: bool | None
    figures: dict[str, Any] = field(default_factory=dict)


class Missing(RuntimeError):
    """No file has the figures; the message names the command that writes one."""


class Kept:
    """Result files in a folder and its subfolders; the newest one of each format is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self, kind: str) -> dict[str, Any]:
        """Return the content of the newest file.

        Raises
        ------
        Missing
            There is no such file.
        """
        found = [content for path in sorted(self.folder.rglob("*.json")) if (content := read_json(path))]
        found = [content for content in found if content.get("format") == kind and not content["machine"]["device"]]
        if not found:
            raise Missing(f"no {kind} in {self.folder}; {COMMANDS[kind]} {self.folder / 'FILE.json'} leaves one")
        return max(found, key=lambda content: str(content["machine"]["date"]))

    def rows(self, kind: str) -> tuple[Rows, dict[str, Any]]:
        """Return the complete rows of the newest file, and the run that they belong to."""
        content = self.newest(kind)
        about = {name: content["machine"][name] for name in ("date", "commit", "processor")}
        return [row for row in content["rows"] if not {"error", "inapplicable"} & set(row)], about


def prediction_error(kept: Kept, key: str, limit: float) -> Finding:
    """Compare the measured step time or peak with the predicted one, for the worst plan."""
    rows, about = kept.rows("offload-predictions/1")
    off = {f"{row['family']}, {row['wish']}": row[f"measured_{key}"] / row[f"predicted_{key}"] - 1 for row in rows}
    worst = max(off, key=lambda name: abs(off[name]))
    met = abs(off[worst]) <= limit
    return Finding(f"{off[worst]:+.1%} at worst ({worst})", met, {"off": off, "from": about})


def default_slowdown(kept: Kept) -> Finding:
    """The slowdown of the default settings for the demo's model."""
    rows, about = kept.rows("offload-predictions/1")
    found = {row["family"]: row["slowdown"] for row in rows if row["wish"] == "default"}
    if "gpt" not in found:
        raise Missing("the newest predictions hold no gpt with the default; run bench/predictions.py anew")
    return Finding(f"{found['gpt']:+.1%}", found["gpt"] <= DEFAULT_SLOWDOWN_MAX, {"slowdown": found, "from": about})


def by_family(rows: Rows) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return complete frontier rows by network and contestant."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["family"], {})[row["name"]] = row
    return found


def least_ratio(kept: Kept, key: str, limit: float) -> Finding:
    """Memory growth or step time of the setting with the least memory, relative to plain, for the worst network."""
    rows, about = kept.rows("offload-frontier/1")
    ratios = {family: own[LEAST_NAME][key] for family, own in by_family(rows).items() if LEAST_NAME in own}
    if not ratios:
        raise Missing(f"the newest frontier has no {LEAST_NAME!r}")
    words = ", ".join(f"{family} {ratio:.2f}" for family, ratio in ratios.items())
    return Finding(f"{words} × plain", max(ratios.values()) <= limit, {"ratio": ratios, "from": about})


def ahead_of(kept: Kept, peer: str, is_ahead: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]) -> Finding:
    """Whether for every network some offload setting is better than the peer in both memory and time."""
    rows, about = kept.rows("offload-frontier/1")
    ahead: dict[str, list[str]] = {}
    for family, own in by_family(rows).items():
        if peer in own:
            ours = [row for row in own.values() if row["ours"]]
            ahead[family] = [str(row["name"]) for row in ours if is_ahead(row, own[peer])]
    if not ahead:
        raise Missing(f"the newest frontier has no {peer!r}")
    words = ", ".join(f"{family} {'yes' if names else 'no'}" for family, names in ahead.items())
    return Finding(words, all(ahead.values()), {"ahead": ahead, "from": about})


def below_checkpoint(kept: Kept) -> Finding:
    """Whether a setting needs less memory and less time than checkpointing per block."""
    return ahead_of(
        kept,
        "checkpoint per block",
        lambda ours, theirs: (
            ours["memory_over_plain"] < theirs["memory_over_plain"]
            and ours["step_over_plain"] < theirs["step_over_plain"]
        ),
    )


def faster_than_tutorial(kept: Kept) -> Finding:
    """Whether a setting needs no more memory than the tutorial's hooks, and much less time."""
    return ahead_of(
        kept,
        "tutorial's disk hooks",
        lambda ours, theirs: (
            ours["memory_over_plain"] <= theirs["memory_over_plain"]
            and TUTORIAL_SPEEDUP_MIN * ours["step_over_plain"] <= theirs["step_over_plain"]
        ),
    )


def largest(kept: Kept, what: str = "resnet:batch") -> Finding:
    """The largest batch relative to plain's, and the time per sample with it."""
    rows, about = kept.rows("offload-largest/1")
    own = [row for row in rows if row["what"] == what and row["largest"]]
    base = next((row for row in own if row["name"] == "plain"), None)
    ours = max((row for row in own if row["ours"]), key=lambda row: row["largest"], default=None)
    if base is None or ours is None:
        raise Missing(f"the newest search has no {what} of plain and of offload")
    over = ours["largest"] / base["largest"]
    cost = ours["step_seconds"] / ours["largest"] / (base["step_seconds"] / base["largest"])
    met = over >= LARGEST_MIN and cost <= LARGEST_SLOWDOWN_MAX
    words = f"{over:.1f} × plain ({ours['largest']} against {base['largest']}) at {cost:.2f} × the time per sample"
    return Finding(words, met, {"over_plain": over, "time_per_sample_over_plain": cost, "from": about})


def on_a_gpu(kept: Kept) -> Finding:
    """The copies of at least 1 MiB beside torch's, by the GPU suite; missing until it has run."""
    parts = [read_json(path) for path in sorted(kept.folder.rglob("copies.json"))]
    measured = [part for part in parts if part.get("machine", {}).get("device")]
    if measured:
        rows = measured[-1]["results"]["copies"]
        shares = [row["store_over_torch"] for row in rows if row["block_bytes"] >= 1 << 20]
        words = f"copies: {min(shares):.0%} to {max(shares):.0%} of Tensor.copy_ with blocks of at least 1 MiB"
        return Finding(f"{words}; pinned memory and largest batch not measured", min(shares) >= 0.97)
    return Finding("not measured: no GPU has run bench/gpu_suite.py", None)
