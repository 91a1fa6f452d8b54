"""The data of the charts: what a page hands to its scripts, and that no page draws by itself."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from page_check import charts_of, check_page

from offload.diagnostics.html.chart import STEP_KINDS, TENSOR_KINDS, Box, Part, Series, Tensor, bar_chart, chart
from offload.diagnostics.html.page import document

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "offload"
MIB = 1 << 20
GIB = 1 << 30


def drawn(text: str) -> dict[str, Any]:
    """The data of a chart, which is well formed in a page."""
    check_page(document("a page", text))
    (found,) = charts_of(text)
    return found


def legend(text: str) -> list[str]:
    return re.findall(r"<li><span class=\"key [a-z ]+\"></span>([^<]*)</li>", text)


# A notebook shows no scripts of others: its small curve is a picture.
WITHOUT_SCRIPTS = PACKAGE / "diagnostics/html/inline.py"


@pytest.mark.parametrize("path", sorted({*PACKAGE.rglob("*.py")} - {WITHOUT_SCRIPTS}), ids=lambda path: path.stem)
def test_no_page_draws_by_itself(path: Path) -> None:
    assert not re.search(r"<(svg|rect|line|path|polyline|circle|text|canvas)\b|viewBox", path.read_text("utf-8"))


def test_the_library_comes_with_its_licence() -> None:
    page = document("a page")
    assert (PACKAGE / "diagnostics/html/assets/uplot/LICENSE").read_text("utf-8") in page
    assert "uPlot (v1." in page
    assert page.count("</script>") == 4, "none of the scripts ends early"


def test_curves_say_their_peak_and_a_limit_is_where_there_is_one() -> None:
    curve = Series("a <curve>", "blue", [(0, 2 * GIB), (5, 7 * GIB)])
    text = chart("bytes", series=[curve], seconds=10.0, origin="the start")
    assert legend(text) == ["a &lt;curve&gt;, peak 7.00 GiB"]
    assert drawn(text)["limit"] is None
    text = chart("bytes", series=[curve], seconds=10.0, origin="the start", limit_bytes=8 * GIB)
    assert legend(text)[1:] == ["limit 8.00 GiB"]
    assert drawn(text)["limit"] == 8 * GIB
    text = chart("bytes", series=[curve], seconds=10.0, origin="the start", limit_bytes=24 * GIB)
    assert legend(text)[1:] == ["limit 24.00 GiB, above this picture"]


def test_no_series_and_no_points_are_a_chart() -> None:
    for series in ((), [Series("a", "blue", [])], [Series("b", "red", [(0, 0)])]):
        assert drawn(chart("bytes", series=series, seconds=0.0, origin="the start"))["end"] == 0.0


@pytest.mark.long
def test_a_curve_keeps_the_largest_and_the_last_of_points_that_are_close() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        points = [(at / 100_000, rng.randrange(1000)) for at in range(100_000)]
        points[70_000] = (0.7, 5000)
        found = drawn(chart("bytes", series=[Series("a", "blue", points)], seconds=1.0, origin="the start"))["curves"][
            0
        ]
        assert len(found["x"]) <= 2 * 8193
        assert found["x"] == sorted(found["x"])
        assert found["y"][-1] == points[-1][1]
        assert found["x"][found["y"].index(5000)] == 0.7
        # Where many points follow each other closely, what holds until the next is the last of them.
        given = dict(points)
        assert all(given[at] == count for at, count in zip(found["x"], found["y"], strict=True))
    few = [(0.1 * k, k * MIB) for k in range(10)]
    found = drawn(chart("bytes", series=[Series("a", "blue", few)], seconds=1.0, origin="the start"))["curves"][0]
    assert list(zip(found["x"], found["y"], strict=True)) == [(round(at, 7), count) for at, count in few]


def test_boxes_keep_their_names_and_the_legend_names_their_kinds() -> None:
    forward, out = STEP_KINDS["forward"], STEP_KINDS["out"]
    lanes = {
        "compute": [Box(forward, "</script><fc>", 0.0, 1.0)],
        "copy out": [Box(out, "fc", 1.0, 1.5, 3 * MIB, 7)],
        "copy in": [],
    }
    text = chart("lanes", lanes=lanes, seconds=2.0, origin="the start")
    found = drawn(text)
    assert found["names"] == ["</script><fc>", "fc"]
    assert found["lanes"] == [
        ["compute", [[0, 0, 0.0, 1.0, 0, -1]]],
        ["copy out", [[1, 1, 1.0, 1.5, 3 * MIB, 7]]],
        ["copy in", []],
    ]
    assert legend(text) == ["forward", "copy out"]


def test_boxes_too_narrow_to_tell_apart_are_one() -> None:
    forward = STEP_KINDS["forward"]
    boxes = [Box(forward, f"layer{i}", i * 1e-5, i * 1e-5 + 9e-6, 1024) for i in range(100_000)]
    found = drawn(chart("lanes", lanes={"compute": boxes}, seconds=1.0, origin="the start"))
    rows = found["lanes"][0][1]
    assert len(rows) < 2 * 8193
    assert sum(row[4] for row in rows) == 1024 * len(boxes)
    assert found["names"][0] == "layer0 and 12 more"
    separate = [box._replace(kind=STEP_KINDS["backward" if i % 2 else "forward"]) for i, box in enumerate(boxes[:1000])]
    found = drawn(chart("lanes", lanes={"compute": separate}, seconds=1.0, origin="the start"))
    assert len(found["lanes"][0][1]) == 1000


def test_tensors_are_rows_and_the_small_ones_of_many_are_in_the_legend() -> None:
    kept, swapped = TENSOR_KINDS["kept"], TENSOR_KINDS["swapped"]
    tensors = [
        Tensor(kept, "tensor 3 of a", 5, 3, (0.0, 1.0)),
        Tensor(swapped, "tensor 4 of b", 6, 4, (0.1, 0.2, 0.8, 0.9)),
    ]
    rest = Series("the rest", "pale", [(0.0, 20)])
    text = chart("memory", tensors=tensors, rest=rest, seconds=1.0, origin="the start")
    assert drawn(text)["tensors"] == [[0, 0, 5, 3, 0.0, 1.0], [1, 1, 6, 4, 0.1, 0.2, 0.8, 0.9]]
    assert legend(text) == ["kept", "swapped", "the rest"]
    text = chart("memory", tensors=tensors * 151, rest=rest, seconds=1.0, origin="the start")
    assert legend(text) == ["kept", "swapped", "smaller tensors", "the rest"]


def test_a_bar_leaves_out_what_is_nothing() -> None:
    text = bar_chart(
        "memory", [Part("used", "blue", 3 * MIB), Part("free & idle", "pale", MIB), Part("short", "red", 0)]
    )
    found = drawn(text)
    assert found["unit"] == "bytes"
    assert [row[2:5] for row in found["lanes"][0][1]] == [[0, 3 * MIB, 3 * MIB], [3 * MIB, 4 * MIB, MIB]]
    assert legend(text) == ["3.00 MiB: used", "1.00 MiB: free &amp; idle"]
