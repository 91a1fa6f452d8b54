"""The pages in a browser: they open, say what is under the pointer, zoom, and obey keys, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, need_browser
from example_pages import MIB, PAGES, plan

from offload.diagnostics.html import plan as plan_page
from offload.diagnostics.html.chart import STEP_KINDS, TENSOR_KINDS, Box, Series, Tensor, chart
from offload.diagnostics.html.page import document

SCHEMES = {"light": False, "dark": True}
CHARTS = {"plan": 1, "timeline": 2, "demo": 3, "demo of state": 2, "oom": 1, "oom without a plan": 1, "fit": 2}
# Where a tensor is drawn: the middle of its first segment, in the window.
MIDDLE = """(name => {
  const chart = document.querySelector("figure.chart").chart;
  const { stack, panels, data } = chart;
  const plot = panels.at(-1).plot;
  const [index, start, end, below] = stack.segments.find(each => data.names[data.tensors[each[0]][1]] === name);
  plot.over.scrollIntoView({ block: "center" });
  const box = plot.over.getBoundingClientRect();
  return [box.left + plot.valToPos((start + end) / 2, "x"),
          box.top + plot.valToPos(below + data.tensors[index][2] / 2, "y")];
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(need_browser(), tmp_path_factory.mktemp("browser")) as started:
        yield started


def opened(browser: Browser, folder: Path, text: str, *, dark: bool = False) -> None:
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    browser.open(page, dark=dark)
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]


def panel_of(browser: Browser, figure: int = 0, panel: int = -1) -> list[float]:
    """Left, top, width and height of the area in which a chart draws."""
    script = f"document.querySelectorAll('figure.chart')[{figure}].chart.panels.at({panel}).plot.over"
    browser.run(f"{script}.scrollIntoView({{block: 'center'}})")
    box: list[float] = browser.run(
        f"(box => [box.left, box.top, box.width, box.height])({script}.getBoundingClientRect())"
    )
    return box


def view(browser: Browser, figure: int = 0) -> tuple[float, float]:
    """The range that a chart shows."""
    words = browser.run(f"(data => [data.from, data.to])(document.querySelectorAll('figure.chart')[{figure}].dataset)")
    return float(words[0]), float(words[1])


def tip(browser: Browser, figure: int = 0) -> str:
    """What the tooltip says; empty where there is none."""
    script = f"document.querySelectorAll('figure.chart')[{figure}].querySelector('.tip')"
    text: str = browser.run(f"(tip => tip.hidden ? '' : tip.innerText)({script})")
    return text


def a_chart(count: int = 1, **changes: Any) -> str:
    """A page of one chart: `count` tensors of 8 MiB, of which the first is there for the whole second."""
    tensors = [Tensor(TENSOR_KINDS["swapped"], "tensor 0 of <fc>", 8 * MIB, 0, (0.0, 1.0))]
    for k in range(1, count):
        tensors.append(Tensor(TENSOR_KINDS["kept"], f"tensor {k} of fc", MIB, k, (k / count / 2, 1 - k / count / 2)))
    lanes = {
        "compute": [Box(STEP_KINDS["forward"], "fc", 0.0, 0.5)],
        "copy": [Box(STEP_KINDS["out"], "fc", 0.2, 0.4, 9, 0)],
    }
    given = {
        "series": [Series("all of it", "blue", [(0.0, 8 * MIB), (0.5, 16 * MIB)])],
        "lanes": lanes,
        "tensors": tensors,
    }
    return document("a page", chart("a chart", seconds=1.0, origin="the start", **{**given, **changes}))


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", PAGES)
def test_a_page_opens_hovers_and_zooms(browser: Browser, tmp_path: Path, kind: str, scheme: str) -> None:
    opened(browser, tmp_path, PAGES[kind](), dark=SCHEMES[scheme])
    charts = browser.run("document.querySelectorAll('figure.chart').length")
    assert charts == CHARTS[kind]
    for figure in range(charts):
        left, top, width, height = panel_of(browser, figure)
        whole = view(browser, figure)
        browser.mouse("mouseMoved", left + width / 2, top + height - 12)
        browser.settle()
        assert tip(browser, figure)
        browser.drag([(left + width * share, top + height / 2) for share in (0.25, 0.4, 0.5)])
        from_, to = view(browser, figure)
        assert from_ == pytest.approx(whole[0] + 0.25 * (whole[1] - whole[0]), rel=0.02)
        assert to == pytest.approx(whole[0] + 0.5 * (whole[1] - whole[0]), rel=0.02)
    ink, paper = browser.run("['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])")
    assert (sum(shades(ink)) > sum(shades(paper))) == SCHEMES[scheme]
    assert browser.problems == []


def shades(words: str) -> list[int]:
    """Red, green and blue."""
    return [int(each) for each in words.partition("(")[2].rstrip(")").split(",")]


def test_a_tensor_says_its_name_size_and_module(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, PAGES["plan"]())
    browser.mouse("mouseMoved", *browser.run(f"{MIDDLE}('tensor 4 of blocks.2.mlp')"))
    lines = tip(browser).splitlines()
    assert lines[0] == "tensor 4 of blocks.2.mlp"
    assert lines[1] == "64.00 MiB, swapped"
    assert lines[2].startswith("in memory ")
    assert lines[2].count(" – ") == 2, "before its copy-out and after its copy-in"
    assert [line.partition(":")[0] for line in lines[3:]] == ["without offload", "with this plan"]


def test_the_copies_of_a_tensor_are_outlined_with_it(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, a_chart())
    marked = "document.querySelector('figure.chart').chart.panels.map(({glass}) => glass.getContext('2d')\
        .getImageData(0, 0, glass.width, glass.height).data.some(value => value > 0))"
    assert browser.run(marked) == [False, False]
    browser.mouse("mouseMoved", *browser.run(f"{MIDDLE}('tensor 0 of <fc>')"))
    assert browser.run(marked) == [True, True]
    assert tip(browser).splitlines()[:2] == ["tensor 0 of <fc>", "8.00 MiB, swapped"]


def test_a_box_says_what_ran(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, a_chart())
    left, top, width, height = panel_of(browser, panel=0)
    browser.mouse("mouseMoved", left + 0.3 * width, top + 0.75 * height)
    assert tip(browser).splitlines() == ["fc", "copy out, 200 ms, 9 B", "200 ms – 400 ms"]
    browser.mouse("mouseMoved", left + 0.9 * width, top + 0.75 * height)
    assert tip(browser) == ""


def test_keys_move_the_pointer_zoom_and_pan(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, a_chart(3))
    said = "document.querySelector('figure.chart .said').textContent"
    browser.run("document.querySelector('figure.chart').focus()")
    browser.press("ArrowDown")
    assert tip(browser).startswith("fc\nforward")
    for _ in range(16):
        browser.press("ArrowLeft")
    for line in ("fc\ncopy out", "tensor 2 of fc", "tensor 1 of fc", "tensor 0 of <fc>", "tensor 0 of <fc>"):
        browser.press("ArrowDown")
        assert tip(browser).startswith(line)
    assert browser.run(said).startswith("tensor 0 of <fc>, 8.00 MiB, swapped, in memory 0 s – 1 s")
    browser.press("ArrowUp")
    assert tip(browser).startswith("tensor 1 of fc")
    browser.press("+")
    zoomed = view(browser)
    assert zoomed[1] - zoomed[0] == pytest.approx(0.5)
    browser.press("ArrowLeft", shift=True)
    assert view(browser)[0] == pytest.approx(max(zoomed[0] - 0.125, 0.0))
    browser.press("-")
    assert view(browser) == (0.0, 1.0)
    browser.press("+")
    browser.press("0")
    assert view(browser) == (0.0, 1.0)
    browser.press("ArrowDown")
    browser.press("Escape")
    assert tip(browser) == ""
    assert browser.problems == []


def test_a_double_click_and_the_buttons_show_the_whole(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, a_chart())
    for button, width in (("zoom in", 0.5), ("zoom in", 0.25), ("zoom out", 0.5), ("show the whole", 1.0)):
        browser.run(f"document.querySelector('[aria-label=\"{button}\"]').click()")
        assert view(browser)[1] - view(browser)[0] == pytest.approx(width)
    left, top, width, height = panel_of(browser)
    browser.drag([(left + 0.2 * width, top + 9), (left + 0.3 * width, top + 9), (left + 0.4 * width, top + 9)])
    assert view(browser) == pytest.approx((0.2, 0.4), abs=0.01)
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            browser.mouse(kind, left + width / 2, top + height / 2, button="left", clicks=clicks)
    assert view(browser) == (0.0, 1.0)


def test_a_box_around_a_small_tensor_zooms_to_it(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, a_chart())
    left, top, width, height = panel_of(browser)
    browser.drag([(left + width * share, top + height * (0.2 + share)) for share in (0.1, 0.3, 0.5)])
    low, high = browser.run("document.querySelector('figure.chart').chart.view.y")
    assert 0 < low < high < 16 * MIB


def test_small_tensors_of_ten_thousand_are_one_until_zoomed_to(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, plan_page.render(plan(5000, nbytes=4 * MIB, seconds=1e-3), "ten thousand tensors"))
    chart = "document.querySelector('figure.chart').chart"
    assert browser.run(f"{chart}.data.tensors.length") == 10_000
    alone = f"new Set({chart}.stack.segments.map(each => each[0])).size"
    assert browser.run(alone) == 300
    browser.run("document.querySelector('figure.chart').focus()")
    found = []
    for _ in range(8):
        browser.press("ArrowDown")
        found.append(tip(browser).splitlines()[0])
    assert any(line.startswith("other: ") and line.endswith(" tensors") for line in found), found
    for _ in range(12):
        browser.press("+")
    assert 0 < browser.run(alone) <= 300
    assert browser.problems == []


def test_the_colours_follow_the_system(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, a_chart())
    pixels = "document.querySelector('.memory canvas').toDataURL()"
    light = browser.run(pixels)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.settle()
    assert browser.run(pixels) != light


def test_a_chart_of_nothing_is_a_frame(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, document("a page", chart("nothing", seconds=0.0, origin="the start")))
    opened(browser, tmp_path, a_chart(series=(), tensors=(), lanes=None))
    opened(browser, tmp_path, a_chart(series=(), tensors=()))
    opened(browser, tmp_path, a_chart(series=[Series("a", "blue", [])], tensors=(), lanes=None))
