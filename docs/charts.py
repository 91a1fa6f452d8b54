"""Draws the charts of the front page and of "Which one?", and writes the figures beside them into the pages.

    python docs/charts.py [--check]

Everything comes from measurements in bench/results: demo-memory-cpu.json (`python bench/demo_memory.py`), the newest
predictions-cpu-*.json (`python bench/predictions.py`) and frontier-cpu.json (`python bench/race.py`). What stands in a
page between `<!-- NAME: …` and `<!-- end of NAME -->` is replaced. `--check` only says whether the pages agree with the
measurements. The charts need matplotlib; without it only the figures are written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PICTURES = ROOT / "docs" / "pictures"
NETWORKS = {"gpt": "GPT", "vit": "ViT", "unet": "U-Net", "resnet": "ResNet", "lstm": "LSTM"}
WAYS = {
    "offload, max_slowdown 5 %": "offload, default",
    "offload, least memory": "offload, least memory",
    "checkpoint per block": "checkpoint per block",
    "selective checkpointing": "selective checkpointing",
    "tutorial's disk hooks": "PyTorch tutorial's disk hooks",
    "save_on_cpu": "save_on_cpu",
}
LINE = 120
MARKERS = ("o", "s", "^", "D", "v")


def demo_memory() -> dict[str, Any]:
    """Return the memory of the demonstration over one step."""
    content: dict[str, Any] = json.loads((RESULTS / "demo-memory-cpu.json").read_text(encoding="utf-8"))
    return content


def demo_steps() -> dict[str, Any]:
    """Return memory and time of the demo's model by default, in steps that alternate with plain ones."""
    newest = max(RESULTS.glob("predictions-cpu-*.json"))
    content = json.loads(newest.read_text(encoding="utf-8"))
    row = next(row for row in content["rows"] if (row["family"], row["wish"]) == ("gpt", "default"))
    return {**row, "machine": content["machine"]}


def measured_ways() -> dict[str, dict[str, tuple[float, float]]]:
    """Return memory and step time relative to plain training, by way and network."""
    rows = json.loads((RESULTS / "frontier-cpu.json").read_text(encoding="utf-8"))["rows"]
    found: dict[str, dict[str, tuple[float, float]]] = {words: {} for words in WAYS.values()}
    for row in rows:
        if row["name"] in WAYS and row.get("memory_over_plain") is not None:
            point = (row["memory_over_plain"], row["step_over_plain"])
            found[WAYS[row["name"]]][NETWORKS[row["family"]]] = point
    return found


# -- figures ----------------------------------------------------------------------------------------------------------


def where(machine: Mapping[str, Any]) -> str:
    """Say on what a measurement ran, and when."""
    return f"{machine['processor']}, {machine['processors']} cores, torch {machine['torch']}, {machine['date'][:10]}"


def demo_numbers() -> str:
    """Return the three numbers of the front page, as HTML."""
    tiles = [
        (f"{ratio('peak_bytes'):.2f} ×", f"the memory, model and optimizer included: {words('peak_bytes')}"),
        (f"{ratio('seconds'):.2f} ×", f"the step time: {words('seconds')}"),
        ("0 bits" if demo_steps()["bits_equal"] else "SOME BITS", "differ in all losses and gradients"),
    ]
    cells = "".join(f"<div><b>{number}</b><span>{unbroken(text)}</span></div>" for number, text in tiles)
    return f'<div class="numbers">{cells}</div>'


def unbroken(text: str) -> str:
    """Keep a number and its unit on one line."""
    return re.sub(r"(?<=\d) (?=MiB|s\b)", "&nbsp;", text)


def ratio(what: str) -> float:
    """Memory or time with offload over that without."""
    row = demo_steps()
    return float(row[f"measured_{what}"] / row["unswapped_peak_bytes" if what == "peak_bytes" else "plain_seconds"])


def words(what: str) -> str:
    """Memory or time with and without offload."""
    row = demo_steps()
    if what == "peak_bytes":
        return f"{row['measured_peak_bytes'] / 2**20:.0f} MiB instead of {row['unswapped_peak_bytes'] / 2**20:.0f} MiB"
    return f"{row['measured_seconds']:.2f} s instead of {row['plain_seconds']:.2f} s"


def demo_caption() -> str:
    """Say what the numbers and the picture of the front page show."""
    memory, steps = demo_memory(), demo_steps()
    size = f"{memory['runs'][0]['parameters'] / 1e6:.0f} M parameters"
    before, after = (run["peak"] for run in picture_runs())
    busy = ", while other programs ran" if is_busy(memory["machine"]) else ""
    return (
        f"*The model of `offload demo`, a GPT with {size}, with default settings; tensors are swapped to disk. "
        "The numbers above the picture: memory is the peak of all tensors; time is that of forward and backward. Steps "
        f"with and without offload alternated ({where(steps['machine'])}). The picture is another measurement{busy}, "
        f"which does not count model and optimizer; the rest peaks at {after:.0f} MiB instead of {before:.0f} MiB, "
        f"{after / before:.2f} × ({where(memory['machine'])}).*"
    )


def picture_runs() -> list[dict[str, Any]]:
    """Return name, peak and curve in MiB of the two runs of the picture, the plain one first."""
    runs = []
    for run in demo_memory()["runs"]:
        curve = [(100 * share, used / 2**20) for share, used in run["last_step"]]
        runs.append({"curve": curve, "peak": max(used for _, used in curve)})
    return runs


def is_busy(machine: Mapping[str, Any]) -> bool:
    """Whether other programs used the processors when a measurement began."""
    return bool(machine["load_average"][0] > machine["processors"])


def demo_sentence() -> str:
    """Say in the README what was measured with the demo's model."""
    before, after = (run["peak"] for run in picture_runs())
    return (
        f"The model of `offload demo` with default settings, swapping to disk ({where(demo_steps()['machine'])}): "
        f"**{ratio('peak_bytes'):.2f} × the memory**, model and optimizer included ({words('peak_bytes')}), "
        f"**{ratio('seconds'):.2f} × the step time** ({words('seconds')}), and **not one bit of difference** in losses "
        "and gradients. The picture shows another measurement of the same model. It does not count model and "
        f"optimizer, which stay in memory; the rest peaks at {after:.0f} MiB instead of {before:.0f} MiB, "
        f"{after / before:.2f} ×."
    )


def ways_table() -> str:
    """Return the range of every way over the five networks."""
    lines = ["| way | memory, relative to plain | step time, relative to plain | networks |", "|---|---|---|---|"]
    for words, points in measured_ways().items():
        memory, step = zip(*points.values(), strict=True)
        name = f"**{words}**" if words.startswith("offload") else words
        ranges = [f"{min(each):.2f} to {max(each):.2f} ×" for each in (memory, step)]
        lines.append(f"| {name} | {ranges[0]} | {ranges[1]} | {len(points)} |")
    return "\n".join(lines)


# -- charts -----------------------------------------------------------------------------------------------------------


def draw_demo(colors: Mapping[str, str]) -> Any:
    """Draw the memory of one step, plain and with offload."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.6, 3.5), layout="constrained")
    kinds = (("without offload", "plain"), ("with offload", "ours"))
    for run, (name, color) in zip(picture_runs(), kinds, strict=True):
        across, up = zip(*run["curve"], strict=True)
        axes.plot(across, up, color=colors[color], linewidth=1.8, drawstyle="steps-post")
        axes.fill_between(across, up, color=colors[color], alpha=0.15, step="post", linewidth=0)
        top = (across[up.index(max(up))] if color == "plain" else 50, max(up))  # the lower one has room in the middle
        text = f"{name}: {max(up):.0f} MiB at most"
        style = {"color": colors[color], "ha": "center", "fontsize": 11, "fontweight": "bold"}
        axes.annotate(text, top, (0, 5), textcoords="offset points", **style)
    axes.set(xlabel="one training step, from start (0 %) to end (100 %)", ylabel="MiB, without model and optimizer")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    return figure


def draw_ways(colors: Mapping[str, str]) -> Any:
    """Draw every way's memory and step time, one mark for each network."""
    from matplotlib import pyplot

    ways = measured_ways()
    figure, both = pyplot.subplots(1, 2, figsize=(8.6, 3.7), layout="constrained", sharey=True)
    for panel, axes in enumerate(both):
        for line, (words, points) in enumerate(ways.items()):
            color = colors["ours" if words.startswith("offload") else "theirs"]
            for place, (network, marker) in enumerate(zip(NETWORKS.values(), MARKERS, strict=True)):
                if network in points:
                    offset = 0.11 * (place - 2)  # marks of equal value do not cover each other
                    x = points[network][panel]
                    axes.scatter(x, line + offset, color=color, marker=marker, s=34, alpha=0.85, linewidth=0, zorder=3)
        axes.axvline(1, color=colors["ink"], linewidth=0.8)
        axes.set_yticks(range(len(ways)), list(ways))
        for label in axes.get_yticklabels():
            label.set_fontweight("bold" if label.get_text().startswith("offload") else "normal")
    both[0].invert_yaxis()
    both[0].set_xlim(0, None)  # up to the largest value: no mark is cut off
    both[0].set_xlabel("memory, relative to plain (less is better)")
    both[1].set_xlim(0.9, None)
    both[1].set_xlabel("step time, relative to plain (less is better)")
    marks = [both[0].scatter([], [], color=colors["faint"], marker=marker, s=34, linewidth=0) for marker in MARKERS]
    figure.legend(marks, NETWORKS.values(), loc="outside upper center", ncols=5, fontsize=9, frameon=False,
                  labelcolor=colors["ink"], handletextpad=0.3)  # fmt: skip
    return figure


def draw_all() -> None:
    """Write each chart as SVG, for light and for dark pages."""
    sys.path.insert(0, str(ROOT / "bench"))
    import plots

    plots.save_themed(PICTURES, "demo", draw_demo)
    plots.save_themed(PICTURES, "ways", draw_ways)


# -- pages ------------------------------------------------------------------------------------------------------------

PARTS = {
    "README.md": {"demo sentence": demo_sentence},
    "docs/index.md": {"demo numbers": demo_numbers, "demo caption": demo_caption},
    "docs/which.md": {"ways table": ways_table},
}


def with_figures(text: str, parts: Mapping[str, Any]) -> str:
    """Replace each part of a page by what was measured."""
    for name, make in parts.items():
        between = re.compile(rf"(<!-- {name}[^>]*-->\n).*?(<!-- end of {name} -->)", re.S)
        whole, body = between, wrapped(make())
        text, count = whole.subn(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
        if count != 1:
            raise ValueError(f"a page must have <!-- {name} --> and its end once, not {count} times")
    return text


def wrapped(text: str) -> str:
    """Break a paragraph into lines of a width that people edit; tables and HTML stay as they are."""
    return text if text[0] in "|<" else textwrap.fill(text, LINE, break_long_words=False, break_on_hyphens=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, and write the figures; with --check, 1 where a page has others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say which pages have other figures")
    args = parser.parse_args(argv)
    stale = []
    for name, parts in PARTS.items():
        page = ROOT / name
        now = page.read_text(encoding="utf-8")
        made = with_figures(now, parts)
        if now != made:
            stale.append(name)
            if not args.check:
                page.write_text(made, encoding="utf-8")
    if args.check:
        print(
            "\n".join(f"{name}: other figures; run python docs/charts.py" for name in stale), end="\n" if stale else ""
        )
        return int(bool(stale))
    try:
        draw_all()
    except ImportError:
        print('docs/charts.py: no charts without matplotlib (pip install ".[bench]")', file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
