"""The charts of the pages: what they draw for data given, and that no page draws by itself."""

from __future__ import annotations

import random
import re
from itertools import combinations
from pathlib import Path

import pytest
from page_check import check_page

from offload.diagnostics.html.chart import STEP_KINDS, Box, Part, Series, bar_chart, lane_chart, memory_chart
from offload.diagnostics.html.page import document

PACKAGE = Path(__file__).resolve().parent.parent / "offload"
MIB = 1 << 20
GIB = 1 << 30
TEXT = re.compile(r'<text(?: class="([^"]*)")? x="([-0-9.]+)" y="([-0-9.]+)"(?: text-anchor="(\w+)")?>([^<]*)</text>')


def drawn(*series: Series, limit_bytes: int | None = None, from_zero: bool = True, seconds: float = 10.0) -> str:
    text = memory_chart(
        "bytes", series, seconds=seconds, origin="the start", limit_bytes=limit_bytes, from_zero=from_zero
    )
    check_page(document("a page", text))
    return text


def texts(chart: str) -> list[str]:
    return [match[5] for match in TEXT.finditer(chart)]


def places(chart: str) -> dict[str, tuple[float, float, float, float]]:
    """Where the words of a drawing lie: left, top, right, bottom."""
    found = {}
    for number, match in enumerate(TEXT.finditer(chart)):
        x, y, width = float(match[2]), float(match[3]), 8 * len(match[5])
        left = x - width * {"end": 1.0, "middle": 0.5}.get(match[4], 0.0)
        found[f"{number} {match[5]}"] = (left, y - 11, left + width, y + 2)
    return found


def assert_apart(chart: str) -> None:
    for (one, a), (other, b) in combinations(places(chart).items(), 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (one, other)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_only_the_chart_draws(path: Path) -> None:
    if path.stem != "chart":
        assert not re.search(r"<(svg|rect|line|path|polyline|circle|text)\b|viewBox", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("highest", "unit", "peak"),
    [
        (100, "B", "100 B"),
        (3000, "KiB", "2.93 KiB"),
        (800 * MIB, "MiB", "800 MiB"),
        (1.5 * GIB, "MiB", "1536 MiB"),
        (273.46 * GIB, "GiB", "273 GiB"),
        (5000 * GIB, "TiB", "4.88 TiB"),
    ],
)
def test_the_unit_keeps_numbers_short(highest: float, unit: str, peak: str) -> None:
    found = texts(drawn(Series("a", "blue", [(0, 0), (1, highest), (2, 0)])))
    assert unit in found
    assert peak in found
    ticks = [float(each) for each in found if re.fullmatch(r"[0-9.e+]+", each)]
    assert all(len(f"{tick:g}") <= 5 for tick in ticks)


@pytest.mark.parametrize("highest", [1, 7, 1023, 1025, 5e5, 918 * MIB, 90.2 * GIB, 3e15])
def test_ticks_are_round_and_reach_the_highest(highest: float) -> None:
    found = re.findall(r'text-anchor="end">([^<]*)<', drawn(Series("a", "blue", [(0, highest)])))
    unit, *ticks = found[0], *map(float, found[1:])
    scale = {"B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}[unit]
    assert ticks[0] == 0
    assert (ticks[-2] - ticks[1]) * scale <= highest <= ticks[-1] * scale
    assert len(ticks) <= 8
    assert f"{ticks[1]:e}".partition("e")[0].rstrip("0") in ("1.", "2.", "2.5", "5.")


def test_the_time_axis_says_its_unit_and_its_start() -> None:
    curve = Series("a", "blue", [(0, 1)])
    for seconds, unit in ((0.0, "seconds"), (90.0, "seconds"), (0.3, "milliseconds"), (4e-6, "microseconds")):
        assert f"{unit} from the start" in texts(drawn(curve, seconds=seconds))


def test_a_limit_is_drawn_where_there_is_one() -> None:
    curve = Series("a", "blue", [(0, 2 * GIB), (5, 7 * GIB)])
    assert "limit" not in drawn(curve)
    text = drawn(curve, limit_bytes=8 * GIB)
    assert "limit 8 GiB" in texts(text)
    assert text.count('class="limit') == 1


def test_the_byte_axis_may_begin_near_the_lowest_value() -> None:
    curve = Series("a", "blue", [(0, 530 * MIB), (5, 570 * MIB)])
    assert "0" in texts(drawn(curve))[7:]
    assert "510" in texts(drawn(curve, from_zero=False))
    flat = Series("a", "blue", [(0, 570 * MIB), (5, 570 * MIB + 1)])  # noise shall not fill the picture
    assert "MiB" in texts(drawn(flat, from_zero=False))


def test_no_series_and_no_points_are_a_frame() -> None:
    assert "seconds from the start" in texts(drawn())
    assert "seconds from the start" in texts(drawn(Series("a", "blue", []), Series("b", "red", [(0, 0)])))


def test_labels_do_not_overlap() -> None:
    colors = ("orange", "blue", "green", "violet")
    for seed in range(100):
        rng = random.Random(seed)
        highest = rng.choice((100, 3 * MIB, 9 * GIB))
        level = rng.random()
        series = [
            Series(color, color, [(at, highest * (level if rng.random() < 0.3 else rng.random())) for at in range(11)])
            for color in colors[: rng.randint(1, 4)]
        ]
        limit = rng.choice((None, int(highest * level), highest))
        assert_apart(drawn(*series, limit_bytes=limit))


def test_peaks_at_one_point_are_all_readable() -> None:
    curves = [Series(color, color, [(0, 0), (10, 24 * GIB)]) for color in ("gray", "blue", "green")]
    text = drawn(*curves, limit_bytes=24 * GIB)
    assert_apart(text)
    assert texts(text).count("24 GiB") == 3


def test_boxes_keep_their_names_and_the_legend_names_their_kinds() -> None:
    forward, out = STEP_KINDS["forward"], STEP_KINDS["out"]
    lanes = {
        "compute": [Box(forward, "<fc>", 0.0, 1.0)],
        "copy out": [Box(out, "fc", 1.0, 1.5, 3 * MIB)],
        "copy in": [],
    }
    text = lane_chart("lanes", lanes, seconds=2.0, origin="the start")
    check_page(document("a page", text))
    assert "<title>forward: &lt;fc&gt;, 1.000 s</title>" in text
    assert "<title>copy out: fc, 500 ms, 3.00 MiB</title>" in text
    assert [name for name in lanes if name in texts(text)] == list(lanes)
    legend = text.partition("<ul")[2]
    assert "forward" in legend
    assert "backward" not in legend


def test_boxes_too_narrow_to_see_are_one() -> None:
    forward = STEP_KINDS["forward"]
    boxes = [Box(forward, f"layer{i}", i * 1e-4, i * 1e-4 + 9e-5, 1024) for i in range(1000)]
    text = lane_chart("lanes", {"compute": boxes}, seconds=1.0, origin="the start")
    assert text.count("<rect") < 500
    assert re.search(r"<title>forward: layer0 and \d+ more, [0-9.]+ (ms|us), [0-9.]+ KiB</title>", text)
    separate = [box._replace(kind=STEP_KINDS["backward" if i % 2 else "forward"]) for i, box in enumerate(boxes)]
    assert lane_chart("lanes", {"compute": separate}, seconds=1.0, origin="the start").count("<rect") == 1000


def test_a_bar_leaves_out_what_is_nothing() -> None:
    text = bar_chart(
        "memory", [Part("used", "blue", 3 * MIB), Part("free & idle", "pale", MIB), Part("short", "red", 0)]
    )
    check_page(document("a page", text))
    assert "1.00 MiB: free &amp; idle" in text
    assert "short" not in text
