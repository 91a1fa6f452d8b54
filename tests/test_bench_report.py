"""Result files become tables, a page and the document; a row where a peer is better is marked and wants a reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def report() -> Iterator[Any]:
    """The report as a module; it imports what draws late."""
    sys.path.insert(0, str(ROOT / "bench"))
    import report

    yield report
    sys.path.remove(str(ROOT / "bench"))


def row(name: str, memory: float, step: float, **more: Any) -> dict[str, Any]:
    return {
        "family": "gpt",
        "name": name,
        "ours": name.startswith("offload"),
        "memory_over_plain": memory,
        "step_over_plain": step,
        "peak_bytes": int(memory * 1e9),
        "step_seconds_median": step,
        "step_seconds_spread": [step, step],
        "equal_losses": True,
        "equal_gradients": True,
        **more,
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A frontier with a peer behind us, one ahead, one that computes other bits and one that could not run."""
    rows = [
        row("plain", 1.0, 1.0),
        row("offload, a", 0.2, 1.05),
        row("behind", 0.3, 1.06),
        row("ahead", 0.25, 1.01),
        row("other", 0.9, 3.0, equal_gradients=False),
        {"family": "gpt", "name": "absent", "ours": False, "inapplicable": "needs CUDA: no device"},
    ]
    machine = {"processor": "Some | CPU", "device": None, "date": "2026-01-01", "commit": "abc", "torch": "2"}
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps({"format": "offload-frontier/1", "machine": machine, "rows": rows}))
    return path


def test_a_better_peer_is_marked_and_no_other(report: Any, results: Path) -> None:
    (table,) = report.read(results)
    assert [each.cells[0] for each in table.rows if each.mark] == ["ahead"]
    assert [each.cells[-1] for each in table.rows] == ["", "", "", "peer better", "", "needs CUDA: no device"]
    assert [each.cells[-2] for each in table.rows][4] == "OTHER BITS"


def test_networks_measured_apart_say_when_each(report: Any, results: Path) -> None:
    content = json.loads(results.read_text())
    content["rows"] += [row("plain", 1.0, 1.0, family="unet", date="2026-02-02", commit="def")]
    results.write_text(json.dumps(content))
    dates = [(table.machine["date"], table.machine["commit"]) for table in report.read(results)]
    assert dates == [("2026-01-01", "abc"), ("2026-02-02", "def")]


def test_the_document_gives_the_reason_or_says_that_it_is_missing(report: Any, results: Path) -> None:
    tables = report.read(results)
    said = report.markdown(tables, {"gpt / ahead": "Its kernel is fused."})
    assert "**gpt / ahead.** Its kernel is fused." in said
    assert "No GPU has run the suite yet" in said
    assert "Not explained yet: bench/why.json has no 'gpt / ahead'." in report.markdown(tables, {})
    own = report.markdown(tables, {"gpt / ahead / Some | CPU": "Here only.", "gpt / ahead": "Everywhere."})
    assert "Here only." in own


def test_a_paragraph_may_be_a_groups_and_one_that_nobody_wants_is_named(report: Any, results: Path) -> None:
    tables = report.read(results)
    assert report.explain(tables, {"gpt": "For all."}) == [("gpt", "For all.")]
    assert report.needless(tables, {"gpt / ahead": "", "gpt": "", "gpt / ahead / Some | CPU": ""}) == []
    assert report.needless(tables, {"gpt / behind": "", "gpt / ahead": ""}) == ["gpt / behind"]


def test_what_falls_short_is_marked_and_wants_a_reason(report: Any, tmp_path: Path) -> None:
    found = {"far": False, "near": True, "seen": None}
    rows = {name: {"what": f"so {name}", "goal": "≤ 1", "measured": "2", "met": met} for name, met in found.items()}
    path = tmp_path / "goals.json"
    path.write_text(json.dumps({"format": "offload-goals/1", "machine": {"processor": "CPU"}, "rows": rows}))
    tables = report.read(path)
    assert [row.cells for row in tables[0].rows] == [
        ["so far", "≤ 1", "2", "not reached"],
        ["so near", "≤ 1", "2", "yes"],
        ["so seen", "≤ 1", "2", "–"],
    ]
    assert [key for key, _ in report.explain(tables, {})] == ["goal / far"]


def test_the_page_needs_no_other_file(report: Any, results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    assert report.main([str(results), "--html", str(page)]) == 0
    said = page.read_text(encoding="utf-8")
    assert said.count("data:image/svg+xml;base64,") == 2, "for light and for dark pages"
    assert 'src="http' not in said


def test_charts_are_drawn_for_light_and_for_dark_pages(report: Any, results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report.main([str(results), "--pages", str(tmp_path)]) == 0
    text = (tmp_path / "benchmarks" / "networks.md").read_text(encoding="utf-8")
    names = [f"training-steps-gpt-some-cpu-{theme}.svg" for theme in ("light", "dark")]
    assert "\n".join(f"![Training steps: GPT]({name}#only-{name[:-4].split('-')[-1]})" for name in names) in text
    light, dark = ((tmp_path / "benchmarks" / name).read_text(encoding="utf-8") for name in names)
    assert "#24292f" in light
    assert "#e6e6e6" in dark
    for picture in (light, dark):
        assert "fill: #ffffff" not in picture, "no background"
        assert "fill: none" in picture


def test_groups_of_pytest_benchmark(report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = {
        "name": "test_spill[1]",
        "group": "spill file, read",
        "stats": {"median": 0.5},
        "extra_info": {"bytes_per_second": 2.5e9, "share_of_yardstick": 0.8, "gap_share": 0.001},
    }
    largest = {"what": "resnet:batch", "cap_bytes": 1 << 27, "step_seconds": 1.0}
    found = [
        {**bench, "group": "largest x", "extra_info": {**largest, "name": name, "ours": ours, "largest": value}}
        for name, ours, value in (("plain", False, 10), ("offload, a", True, 50), ("peer", False, 60))
    ]
    content = {
        "machine_info": {"offload": {"processor": "CPU", "date": "2026-01-01"}},
        "benchmarks": [bench, *found],
        "not_run": [{"name": "test_steps[x]", "reason": "needs CUDA"}],
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    assert report.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "| 1 | 500.000 ms | 2.50 GB/s | 80.00% | 0.10% | peer better |" in said
    assert "| **offload, a** | 50 | 5.0 × | 1.00 s | 0.20 × |  |" in said
    assert "| peer | 60 | 6.0 × | 1.00 s | 0.17 × | peer better |" in said
    assert "| x | needs CUDA |" in said


def test_an_unknown_file_is_refused(report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert report.main([str(path)]) == 2
    assert "x.json: no result of bench/; it reads what" in capsys.readouterr().err


def test_the_pages_are_made_from_the_results(report: Any) -> None:
    from report_pages import pages

    docs = ROOT / "docs"
    tables = report.read(ROOT / "bench" / "results")
    why = json.loads(report.WHY.read_text(encoding="utf-8"))
    made = pages(tables, why, report.pictures_in(docs / "benchmarks", tables))
    assert {path.name for path in (docs / "benchmarks").glob("*.md")} == {Path(name).name for name in made} - {
        "benchmarks.md"
    }
    for name, text in made.items():
        command = "python bench/report.py bench/results --pages docs"
        assert (docs / name).read_text(encoding="utf-8") == text, f"{name}; run: {command}"
        assert "Not explained yet" not in text
    assert report.needless(tables, why) == []
    for table in tables:
        assert table.machine["date"]
        assert table.machine["commit"]


def test_the_summary_says_where_offload_loses(report: Any, results: Path) -> None:
    from report_pages import pages

    content = json.loads(results.read_text())
    content["rows"] += [row("offload, max_slowdown 5 %", 0.5, 1.12), row("checkpoint per block", 0.6, 1.3)]
    results.write_text(json.dumps(content))
    made = pages(report.read(results), {"gpt / ahead": "Its kernel is fused."}, set())
    assert set(made) == {"benchmarks.md", "benchmarks/networks.md"}
    summary = made["benchmarks.md"].replace("&nbsp;", " ")
    first = summary.split("\n\n")[3]
    assert first.startswith("* No GPU has run these benchmarks yet.")
    assert "steps are more than 5 % slower on GPT (12 %)." in first
    assert (
        "* On GPT (0.25 × memory, 1.01 × time), no setting of offload needs as little memory *and* as little time as"
        in first
    )
    won = "On 1 of 1 networks, a setting of offload needs less memory *and* less time than checkpointing every block"
    assert f"{won}: with *offload, default* on GPT." in summary
    assert "| GPT | 0.50 × memory<br>1.12 × time | – | 0.60 × memory<br>1.30 × time | – |" in summary
    whole = made["benchmarks/networks.md"]
    assert "* **ahead:** Its kernel is fused." in whole
    assert "Not run: absent (needs CUDA: no device)." in whole
    assert "| other | 0.90 × | 3.00 × | 858.31 MiB | 3.000 s (3.000–3.000) | OTHER BITS |" in whole


def test_a_difference_that_rounding_hides_is_given_in_more_digits(report: Any, results: Path) -> None:
    from report_pages import pages

    content = json.loads(results.read_text())
    content["rows"] = [row("plain", 1.0, 1.0), row("peer", 0.92, 1.0527), row("offload, least memory", 0.54, 1.0534)]
    results.write_text(json.dumps(content))
    said = pages(report.read(results), {"gpt / peer": "Less."}, set())["benchmarks.md"]
    assert "No setting of offload is as fast as peer on GPT, by a difference that rounding hides" in said
    assert "1.0527 × the time at 0.92 × the memory, *offload, least memory* 1.0534 × the time at 0.54 ×" in said
    assert "as little memory *and* as little time as peer" not in said
    content["rows"] = [row("plain", 1.0, 1.0), row("peer", 0.1493, 1.22), row("offload, least memory", 0.1494, 1.17)]
    results.write_text(json.dumps(content))
    said = pages(report.read(results), {"gpt / peer": "Less."}, set())["benchmarks.md"]
    assert "needs as little memory as peer on GPT, by a difference that rounding hides: it takes 0.1493 ×" in said


def test_a_setting_that_is_not_in_the_table_is_named(report: Any, results: Path) -> None:
    from report_pages import pages

    content = json.loads(results.read_text())
    rows = [row("plain", 1.0, 1.0), row("offload, max_slowdown 5 %", 0.5, 1.02), row("checkpoint per block", 0.4, 1.3)]
    content["rows"] = [*rows, row("offload, n_tensors −1, lb 4", 0.3, 1.1)]
    results.write_text(json.dumps(content))
    said = pages(report.read(results), {}, set())["benchmarks.md"].replace("&nbsp;", " ")
    assert "checkpointing every block: with `n_tensors=-1, lb=4` (0.30 × memory, 1.10 × time) on GPT." in said


def test_columns_without_figures_are_left_out(report: Any, results: Path) -> None:
    from report_pages import pages

    content = json.loads(results.read_text())
    content["rows"] = [row("plain", 1.0, 1.0), row("offload, a", 0.2, 1.05)]
    results.write_text(json.dumps(content))
    text = pages(report.read(results), {}, set())["benchmarks/networks.md"]
    assert "| way | memory | step | peak | median step |\n" in text
    assert "Losses and gradients of all of them are equal to plain's to the last bit." in text
