"""Tables and pictures out of result files: a page, and the document that the repository carries.

    python bench/report.py RESULT… [--html FILE] [--docs FILE] [--pages DIR]

RESULT is a JSON file of pytest-benchmark, race.py, largest.py, goals.py or `offload demo --json`, or a
folder of gpu_suite.py. The pages of the documentation, with their pictures:

    python bench/report.py bench/results --pages docs
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from result_tables import read
from table import SMALL, Row, Table, about, device_of

WHY = Path(__file__).with_name("why.json")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f23 }
table { border-collapse: collapse; font: 13px/1.4 system-ui; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap }
tr.ours td { background: #eaf4f8 } tr.peer td { background: #fbeee6 }
p.machine { color: #57606a; font-size: 13px } img { max-width: 100% }
@media (prefers-color-scheme: dark) {
  body { background: #14181c; color: #e6e6e6 } th, td { border-color: #333 } p.machine { color: #9aa4ae }
  tr.ours td { background: #12303b } tr.peer td { background: #3b2416 }
}
"""
PREFACE = """# Benchmarks

Written by `bench/report.py`.

*Plain* is training without any of these ways. *Memory* is what training adds to the memory of the process after model
and optimizer are loaded, relative to plain. Step time is a median, with its quartiles, of steps that alternate with
plain ones (the demo's runs follow each other). Every way trains the same model on the same data from the same seed with
the same malloc, and its gradients are compared with plain's bit for bit. "Peer better": no setting of offload needs as
little memory and as little time. "Not reached": the figure misses its target. Each of these is explained at the end.
"""
NO_GPU = (
    "No GPU has run the suite yet: nothing on this page was measured on one. Figures under SIMULATED are computed from "
    "assumed figures of a GPU.\n"
)


def explain(tables: Sequence[Table], why: dict[str, str]) -> list[tuple[str, str]]:
    """A paragraph for each row that is marked, or for its group; the missing ones say that they are."""
    found: dict[tuple[str, str], str] = {}
    for table in tables:
        for row in table.rows:
            if row.mark:
                key = next((key for key in keys_of(row, table) if key in why), None)
                name = key if key == group_of(row) else row.key
                reason = why[key] if key else f"Not explained yet: bench/why.json has no {row.key!r}."
                found[name or row.key, device_of(table.machine)] = reason
    return [(name, reason) for (name, _), reason in found.items()]


def needless(tables: Sequence[Table], why: dict[str, str]) -> list[str]:
    """Return the keys of paragraphs that no marked row wants."""
    wanted = {key for table in tables for row in table.rows if row.mark for key in keys_of(row, table)}
    return sorted(set(why) - wanted)


def keys_of(row: Row, table: Table) -> tuple[str, ...]:
    """Where a row's paragraph is looked up: first for this device alone, at last for the whole group."""
    return f"{row.key} / {device_of(table.machine)}", row.key, row.key.removeprefix(SMALL), group_of(row)


def group_of(row: Row) -> str:
    """The first part of a row's key."""
    return row.key.rpartition(" / ")[0]


def markdown(tables: Sequence[Table], why: dict[str, str]) -> str:
    """Lay out the document."""
    on_gpu = any(table.machine.get("device") and not table.machine.get("rehearsal") for table in tables)
    lines = [PREFACE] if on_gpu else [PREFACE, NO_GPU]
    for table in tables:
        lines += [f"## {table.title}\n", f"{about(table.machine)}.\n"]
        if table.note:
            lines.append(f"{table.note}\n")
        lines.append("| " + " | ".join(table.columns) + " |")
        lines.append("|" + "---|" * len(table.columns))
        for row in table.rows:
            cells = [cell.replace("|", "\\|") for cell in row.cells]
            if row.ours:
                cells[0] = f"**{cells[0]}**"
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    reasons = explain(tables, why)
    if reasons:
        lines.append("## Where a peer is better or a figure falls short, and why\n")
        lines += [f"**{key}.** {reason}\n" for key, reason in reasons]
    return "\n".join(lines).rstrip() + "\n"


def page(tables: Sequence[Table], why: dict[str, str], pictures: dict[str, dict[str, bytes]]) -> str:
    """Lay out the page, which needs no other file."""
    parts = [f"<!doctype html><meta charset=utf-8><title>offload: benchmarks</title><style>{STYLE}</style>"]
    parts.append("<h1>offload: benchmarks</h1>")
    for table in tables:
        parts.append(f"<h2>{html.escape(table.title)}</h2><p class=machine>{html.escape(about(table.machine))}</p>")
        if table.slug in pictures:
            data = {theme: base64.b64encode(svg).decode() for theme, svg in pictures[table.slug].items()}
            parts.append(
                '<picture><source media="(prefers-color-scheme: dark)" '
                f'srcset="data:image/svg+xml;base64,{data["dark"]}">'
                f'<img alt="{html.escape(table.title)}" src="data:image/svg+xml;base64,{data["light"]}"></picture>'
            )
        head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
        rows = []
        for row in table.rows:
            kind = "ours" if row.ours else ("peer" if row.mark else "")
            rows.append(f"<tr class='{kind}'>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.cells))
        parts.append(f"<table><tr>{head}</tr>{''.join(rows)}</table>")
    reasons = explain(tables, why)
    if reasons:
        parts.append("<h2>Where a peer is better or a figure falls short, and why</h2>")
        parts += [f"<p><b>{html.escape(key)}.</b> {html.escape(reason)}</p>" for key, reason in reasons]
    return "\n".join(parts)


def draw_all(tables: Sequence[Table]) -> dict[str, dict[str, bytes]]:
    """Return the tables' pictures by slug and theme; nothing without matplotlib, which is said on stderr."""
    try:
        import plots
    except ImportError:
        print('report.py: no pictures without matplotlib (pip install ".[bench]")', file=sys.stderr)
        return {}
    drawn = {table.slug: plots.draw(table) for table in tables}
    return {slug: picture for slug, picture in drawn.items() if picture is not None}


def write_pages(folder: Path, tables: Sequence[Table], why: dict[str, str]) -> None:
    """Write benchmarks.md, its appendices and their pictures; without matplotlib, the pictures stay as they are."""
    from report_pages import BARS, SHOWN, by_network, pages, points_of

    beside = folder / "benchmarks"
    beside.mkdir(parents=True, exist_ok=True)
    drawn = draw_all(tables)
    if drawn:
        import plots

        for slug, pictures in drawn.items():
            for theme, picture in pictures.items():
                (beside / f"{slug}-{theme}.svg").write_bytes(picture)
        networks = {
            name: {SHOWN[way]: point for way, point in ways.items() if way in BARS}
            for name, ways in by_network(points_of(tables, "networks")).items()
        }
        names = [SHOWN[way] for way in BARS]
        plots.save_themed(beside, "summary", lambda colors: plots.summary(networks, names, colors))
    for name, text in pages(tables, why, pictures_in(beside, tables)).items():
        (folder / name).write_text(text, encoding="utf-8")


def pictures_in(folder: Path, tables: Sequence[Table]) -> set[str]:
    """The pictures that are there: slugs of tables, and "summary". Each stands for a light and a dark file."""
    return {name for name in ("summary", *(each.slug for each in tables)) if (folder / f"{name}-light.svg").is_file()}


def main(argv: Sequence[str] | None = None) -> int:
    """Read, lay out, write; with nothing to write asked for, the document goes to standard output."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs no other file")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write everything as one page of Markdown")
    parser.add_argument("--pages", type=Path, metavar="DIR", help="write the documentation's pages and pictures there")
    args = parser.parse_args(argv)
    try:
        tables = [table for path in args.results for table in read(path)]
    except (OSError, ValueError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    why: dict[str, str] = json.loads(WHY.read_text(encoding="utf-8"))
    if args.html is not None:
        args.html.write_text(page(tables, why, draw_all(tables)), encoding="utf-8")
    if args.docs is not None:
        args.docs.parent.mkdir(parents=True, exist_ok=True)
        args.docs.write_text(markdown(tables, why), encoding="utf-8")
    if args.pages is not None:
        write_pages(args.pages, tables, why)
    if args.html is None and args.docs is None and args.pages is None:
        print(markdown(tables, why), end="")
    missing = sum(reason.startswith("Not explained yet") for _, reason in explain(tables, why))
    if missing:
        print(f"report.py: {missing} marked rows are not explained in {WHY.name}", file=sys.stderr)
    for key in needless(tables, why):
        print(f"report.py: {WHY.name} explains {key!r}, which no row is marked for", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
