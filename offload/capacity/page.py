"""The page that `offload fit --plot` writes: the answer, what less memory costs, and the plan that fits."""

from __future__ import annotations

import warnings
from dataclasses import replace
from html import escape

from offload.capacity.answer import RECOMPUTE, SWAP, Fit
from offload.diagnostics.html import plan as plan_page
from offload.diagnostics.html.chart import Series, cost_chart
from offload.diagnostics.html.page import document, paragraphs, section, table
from offload.plan import Link, fastest_plan, least_feasible_limit, unswapped_bytes
from offload.plan.recompute import has_recipes
from offload.plan.trace import Trace

__all__ = ["render"]

_LIMITS = 10  # limits at which each frontier is computed
_COST = "Time of the fastest plan that is known for each limit. The left end is the least memory there is."


def render(fit: Fit, trace: Trace, link: Link) -> str:
    """Return the page.

    Parameters
    ----------
    fit : Fit
        The answer.
    trace : Trace
        The step that it is about.
    link : Link
        The link that it was planned with.

    Returns
    -------
    str
        One HTML document; it loads nothing.
    """
    title = f"offload fit: {fit.name}"
    head, rows = fit.rows()
    parts = [
        f"<h1>{escape(title)}</h1>",
        paragraphs(fit.verdict(), kind="lead"),
        section("Choices", table(rows, head=head)),
    ]
    series = [_frontier(trace, link, SWAP, "blue", recompute=False)]
    if has_recipes(trace):
        series.append(_frontier(trace, link, RECOMPUTE, "violet", recompute=True))
    for choice in fit.choices:
        if choice.moved is not None:
            least = choice.moved.within(trace)
            curve = _frontier(least, link, choice.name, "green", recompute=has_recipes(trace))
            points = [(nbytes, seconds + choice.moved_seconds) for nbytes, seconds in curve.points]
            series.append(replace(curve, points=points))
    picture = cost_chart("Time of a step by memory", series, limit_bytes=fit.limit_bytes)
    parts.append(section("What less memory costs", paragraphs(_COST, kind="faint"), picture))
    if fit.best is not None and fit.best.plan is not None:
        figure = plan_page.figure(fit.best.plan, limit_bytes=fit.limit_bytes)
        parts.append(section(f"The step within the limit: {fit.best.name}", figure))
    return document(title, *parts, f"<pre>{escape(chr(10).join(fit.remarks()))}</pre>")


def _frontier(trace: Trace, link: Link, name: str, color: str, *, recompute: bool) -> Series:
    """Return peak and time of the fastest plans, from the least memory to that of the step as it is."""
    least, most = least_feasible_limit(trace), max(unswapped_bytes(trace), default=0)
    points: list[tuple[float, float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(_LIMITS if most else 0):
            limit_bytes = least + (most - least) * k // (_LIMITS - 1)
            seconds = fastest_plan(trace, link, limit_bytes, recompute=recompute).expected_seconds
            # The plan for less memory serves too, where it is faster: plans are not proven to be the fastest.
            points.append((limit_bytes, min(seconds, points[-1][1]) if points else seconds))
    return Series(name, color, points)
