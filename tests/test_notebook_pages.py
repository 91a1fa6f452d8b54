"""What a notebook shows of a handle, its report and its plan: HTML that loads nothing, with a small memory curve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from page_check import check_page
from planned_rig import known_link, make, train  # noqa: F401

import offload
from offload.units import format_seconds

CURVE = 'aria-label="Memory over the step"'


def check(page: str) -> str:
    check_page(page)
    assert "<script" not in page
    assert "url(" not in page
    return page


def test_handle_report_and_plan():
    model, optimizer = make()
    with offload.enable(model, "smallest", min_tensor_bytes="4KiB") as handle:
        before = check(handle._repr_html_())
        assert CURVE not in before
        assert "no training step has run yet" in before
        train(model, optimizer, [256] * 4)
        pages = [check(each._repr_html_()) for each in (handle, handle.report(), handle.plan)]
        plan = handle.plan
    for page in pages:
        assert page.count(CURVE) == 1
        assert "with this plan" in page
        assert len(page) < 200_000
    assert "offload.Session of Sequential" in pages[0]
    assert plan.summary().splitlines()[1].split(";")[0] in pages[2]
    assert f", {format_seconds(plan.expected_seconds)}</span>" in pages[2]
    (state,) = re.findall(r": (o\w+ plan: .*?)&gt;</code>", pages[0])
    assert f"<td>{state}</td>" in pages[0], "the repr and the report agree"


@pytest.mark.long
def test_the_curve_of_a_report_has_the_times_of_the_report():
    """The profiled step was slow: the plan's own time without offload is not that of measured steps."""
    model, optimizer = make()
    with offload.enable(model, "smallest", min_tensor_bytes="4KiB") as handle:
        train(model, optimizer, [256] * 12)
        report = handle.report()
    slow = replace(report, verdict=replace(report.verdict, compute_seconds=report.plan.compute_seconds / 3))
    page = check(slow._repr_html_())
    (said,) = re.findall(r"without offload (about [^(,]+?)(?: \(|,|\n|<)", page)
    (legend,) = re.findall(r"without offload: .*? at most, (.*?)</span>", page)
    assert legend == said
    (planned,) = re.findall(r"predicted ([^(,<]+?)[,<(]", slow.verdict.time())
    assert f" at most, {planned}</span>" in page
    ends = [
        float(points.split("L")[-1].split(",")[0]) for points in re.findall(r'<path class="w\w+" d="M(.*?)Z"', page)
    ]
    ratio = slow.verdict.compute_seconds / report.plan.expected_seconds
    assert ends == [pytest.approx(640 * ratio, abs=0.1), pytest.approx(640, abs=0.1)], "drawn as long as it says"
    (own,) = re.findall(r"without offload: .*? at most, (.*?)</span>", report.plan._repr_html_())
    assert own == format_seconds(report.plan.compute_seconds), "a plan by itself knows no measured step"


def test_a_plan_that_swaps_nothing_has_one_curve():
    model, optimizer = make()
    with offload.enable(model, "fast", min_tensor_bytes="4KiB") as handle:
        train(model, optimizer, [256] * 3)
        page = check(handle.plan._repr_html_())
    assert page.count("<path") == 1


def test_the_planner_alone_shows_text():
    """It imports nothing that draws."""
    script = (
        "from offload.plan import Link, fastest_plan\n"
        "from offload.plan.trace import Node, Trace\n"
        "plan = fastest_plan(Trace((Node('a', 1.0, False),), (1,), ()), Link(1.0, 1.0), 10)\n"
        "assert plan._repr_html_() is None\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200, env=dict(os.environ))
