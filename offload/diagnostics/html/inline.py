"""The small memory curve of a plan that notebooks show in handle, report and plan.

It needs no scripts and no external resources. Its colours fit light and dark pages, as those of the report do.
"""

from __future__ import annotations

from html import escape

from offload.diagnostics.html.chart import Series, memory_chart
from offload.plan import Plan, Timing, simulate

__all__ = ["curve", "render_plan"]

_STYLE = """.offload-curve { max-width: 640px; font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
  --ink: currentColor; --faint: currentColor; --line: rgba(128, 128, 128, .3); --card: transparent;
  --blue: #3d85c6; --gray: #8a939d; --red: #cc4125; }
.offload-curve svg { display: block; width: 100%; height: auto; }
.offload-curve svg text { fill: currentColor; font-size: 17px; }
.offload-curve svg text.mark { fill: var(--color); font-weight: 600; }
.offload-curve .blue { --color: var(--blue); } .offload-curve .gray { --color: var(--gray); }
.offload-curve .grid { stroke: var(--line); } .offload-curve .dot { fill: var(--color); }
.offload-curve .curve { fill: none; stroke: var(--color); stroke-width: 2.5; }
.offload-curve ul { list-style: none; margin: 2px 0; padding: 0; }
.offload-curve li { display: inline-block; margin-right: 18px; }
.offload-curve .key { display: inline-block; width: 18px; height: 3px; margin-right: 7px; vertical-align: middle;
  background: var(--color); }
.offload-curve pre { white-space: pre-wrap; margin: 4px 0; background: transparent; color: inherit; }"""


def curve(plan: Plan) -> str:
    """Return memory over the step as predicted, with the plan and without offload: one element of HTML."""
    unswapped = simulate(plan.trace, (), plan.link)
    series = [_series("without offload", "gray", unswapped)]
    if plan.swaps or plan.recomputes:
        series.append(_series("with this plan", "blue", plan.timing))
    seconds = max(plan.timing.step_seconds, unswapped.step_seconds)
    chart = memory_chart("Memory over the step", series, seconds=seconds, origin="the start of the step")
    return f'<div class="offload-curve"><style>{_STYLE}</style>\n{chart}</div>'


def render_plan(plan: Plan) -> str:
    """Return a plan for a notebook: its summary, its curve, and folded, what becomes of each tensor."""
    folded = f"<details><summary>All tensors</summary><pre>{escape(plan.explain())}</pre></details>"
    summary = escape(plan.summary())
    return f'<div class="offload-plan"><pre>{summary}</pre>{curve(plan)}{folded}</div>'


def _series(name: str, color: str, timing: Timing) -> Series:
    last = [(timing.step_seconds, timing.resident[-1])] if timing.resident else []
    return Series(name, color, [*zip(timing.ready, timing.resident, strict=True), *last])


Plan.notebook_page = staticmethod(render_plan)  # a plan imports nothing that draws
