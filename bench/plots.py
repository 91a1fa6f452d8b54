"""Draws the tables: memory against time, and bars. Needs matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from control_tables import change_of
from matplotlib import pyplot
from table import Table

SETTLING_MARKERS = {"profiled": "s", "trial": "^", "reference": "o", "bare": "."}
Colors = Mapping[str, str]
Paint = Callable[[Colors], Any]
THEMES: Mapping[str, Colors] = {
    "light": {"ink": "#24292f", "faint": "#8b949e", "ours": "#00796b", "least": "#80b8b0", "theirs": "#b5542b",
              "plain": "#6e7781"},
    "dark": {"ink": "#e6e6e6", "faint": "#7d8590", "ours": "#4db6ac", "least": "#2b6f68", "theirs": "#f0a070",
             "plain": "#a8b1ba"},
}  # fmt: skip


def save_themed(folder: Path, name: str, paint: Paint) -> None:
    """Write `name`-light.svg and `name`-dark.svg."""
    for theme, picture in themed(paint).items():
        (folder / f"{name}-{theme}.svg").write_bytes(picture)


def themed(paint: Paint) -> dict[str, bytes]:
    """Return a picture as SVG, by theme: transparent, in colours that fit light and dark pages."""
    found = {}
    for theme, colors in THEMES.items():
        settings: dict[str, Any] = {
            **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colors["ink"]),
            "axes.axisbelow": True,
            "axes.edgecolor": colors["faint"],
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "font.size": 10,
            "grid.alpha": 0.3,
            "grid.color": colors["faint"],
            "savefig.transparent": True,
            "svg.hashsalt": "offload",
        }
        buffer = io.BytesIO()
        with matplotlib.rc_context(settings):
            figure = paint(colors)
            figure.savefig(buffer, format="svg", metadata={"Date": None})
            pyplot.close(figure)
        found[theme] = buffer.getvalue()
    return found


def summary(networks: Mapping[str, Mapping[str, tuple[float, float]]], ways: Sequence[str], colors: Colors) -> Any:
    """Draw bars for some ways on every network: memory and step time over plain."""
    figure, both = pyplot.subplots(1, 2, figsize=(8.6, 1.0 + 0.75 * len(networks)), layout="constrained", sharey=True)
    height = 0.8 / len(ways)
    kinds = [colors[kind] for kind in ("ours", "least", "theirs")]
    for panel, axes in enumerate(both):
        for number, (way, color) in enumerate(zip(ways, kinds, strict=True)):
            places = [place + (number - (len(ways) - 1) / 2) * height for place in range(len(networks))]
            values = [points[way][panel] if way in points else 0.0 for points in networks.values()]
            drawn = axes.barh(places, values, height * 0.9, color=color, label=way if panel == 0 else None)
            axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
        axes.axvline(1, color=colors["ink"], linewidth=0.8)
        axes.set_yticks(range(len(networks)), list(networks))
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.08)
    both[0].invert_yaxis()
    both[0].set_xlim(0, 1.12)
    both[0].set_xlabel("memory over plain (less is better)")
    both[1].set_xlabel("step time over plain (less is better)")
    figure.legend(loc="outside upper center", ncols=len(ways), frameon=False)
    return figure


def draw(table: Table) -> dict[str, bytes] | None:
    """Return the table's picture by theme, None where it has none."""
    if table.kind == "frontier" and any(row.point for row in table.rows):
        kind = frontier
    elif table.kind == "simulated":
        kind = networks
    elif table.kind == "bars" and table.values:
        kind = bars
    elif table.kind == "settling":
        kind = settling
    else:
        return None

    def paint(colors: Colors) -> Any:
        figure = kind(table, colors)
        title = textwrap.fill(table.title_with_device, 80)  # beside the legend, not above it
        figure.suptitle(title, fontsize=10, x=0.06, ha="left")
        return figure

    return themed(paint)


def frontier(table: Table, colors: Colors) -> Any:
    """Draw memory over plain to the right, step time over plain upwards: lower left is better."""
    figure, axes = pyplot.subplots(figsize=(8.6, 5.2), layout="constrained")
    for number, row in enumerate(row for row in table.rows if row.point):
        assert row.point is not None
        colour = colors["ours" if row.ours else "theirs"]
        label = f"{number + 1}  {row.cells[0]}"
        axes.scatter(*row.point, color=colour, marker="o" if row.ours else "s", zorder=3, label=label)
        axes.annotate(str(number + 1), row.point, (4, 4), textcoords="offset points", fontsize=8, color=colour)
    ours = sorted(row.point for row in table.rows if row.ours and row.point)
    best = [point for place, point in enumerate(ours) if all(point[1] < other[1] for other in ours[:place])]
    if len(best) > 1:
        axes.step(*zip(*best, strict=True), where="post", color=colors["ours"], linewidth=1, alpha=0.5)
    axes.axhline(1, color=colors["faint"], linewidth=0.6)
    axes.axvline(1, color=colors["faint"], linewidth=0.6)
    axes.set_xlabel("memory over plain")
    axes.set_ylabel("step time over plain")
    axes.set_xlim(left=0)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def networks(table: Table, colors: Colors) -> Any:
    """Draw every network's ways: memory over plain to the right, step time over plain upwards, in powers of two."""
    families = list(dict.fromkeys(row.cells[0] for row in table.rows))
    ways = list(dict.fromkeys(row.cells[1] for row in table.rows if row.point is not None))
    figure, grid = pyplot.subplots(2, 3, figsize=(11, 6.6), layout="constrained", sharex=True)
    handles: dict[str, Any] = {}
    for axes, family in zip(grid.flat, families, strict=False):
        for row in table.rows:
            if row.cells[0] != family or row.point is None:
                continue
            number = ways.index(row.cells[1]) + 1
            colour = colors["ours" if row.ours else "theirs"]
            drawn = axes.scatter(*row.point, color=colour, marker="o" if row.ours else "s", zorder=3)
            handles.setdefault(f"{number}  {row.cells[1]}", drawn)
            axes.annotate(str(number), row.point, (4, 4), textcoords="offset points", fontsize=8, color=colour)
        axes.axhline(1, color=colors["faint"], linewidth=0.6)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlim(0, 1.15)
        axes.tick_params(labelbottom=True)
        axes.set_title(family, fontsize=10)
    for axes in list(grid.flat)[len(families) :]:
        axes.axis("off")
    figure.supxlabel("memory over plain", fontsize=9)
    figure.supylabel("step time over plain (simulated)", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="lower right", fontsize=8, frameon=False)
    return figure


def settling(table: Table, colors: Colors) -> Any:
    """Draw step time and memory over the steps of a training, plain and with offload, and mark the decisions."""
    run = table.run
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8.6, 6.0), layout="constrained", sharex=True)
    numbers = range(1, len(run["steps"]) + 1)
    for axes, key, scale in ((upper, "seconds", 1.0), (lower, "peak_bytes", 1 / (1 << 20))):
        for name, rows, color in (("plain", run["plain"], "plain"), ("offload", run["steps"], "ours")):
            axes.plot(numbers, [step[key] * scale for step in rows], color=colors[color], linewidth=1.2, label=name)
        for kind, marker in SETTLING_MARKERS.items():
            found = [(number, step[key] * scale) for number, step in zip(numbers, run["steps"], strict=True)
                     if step["kind"] == kind]  # fmt: skip
            if found:
                points = list(zip(*found, strict=True))
                axes.scatter(*points, color=colors["ours"], marker=marker, s=28, zorder=3, label=f"{kind} step")
        for number, step in zip(numbers, run["steps"], strict=True):
            if changes := [text for text in map(change_of, step["decisions"]) if text]:
                axes.axvline(number, color=colors["faint"], linewidth=0.6, linestyle="--")
                if axes is upper:
                    label = "\n".join(dict.fromkeys(changes))
                    top = axes.get_xaxis_transform()
                    axes.text(number, 0.98, label, transform=top, rotation=90, ha="right", va="top", fontsize=7)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    upper.set_ylabel("step, s")
    lower.set_ylabel("growth of the resident set, MiB")
    lower.set_xlabel("step")
    upper.legend(loc="upper right", fontsize=8, frameon=False)
    return figure


def bars(table: Table, colors: Colors) -> Any:
    """Draw one bar a contestant."""
    figure, axes = pyplot.subplots(figsize=(8.6, 0.8 + 0.42 * len(table.values)), layout="constrained")
    names = list(table.values)
    colours = [colors["ours" if name.startswith("offload") else "theirs"] for name in names]
    drawn = axes.barh(names, list(table.values.values()), color=colours)
    axes.bar_label(drawn, fmt="%g", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return figure
