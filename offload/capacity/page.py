"""The page that `offload fit --plot` writes: the answer, what less memory costs, and the plan that fits."""

from __future__ import annotations

import warnings
from html import escape

from offload.capacity.answer import RECOMPUTE, SWAP, Fit
from offload.capacity.optimizer_step import MovedState
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
        if choice.moved is not None and link.is_steady:
            least = choice.moved.within(trace)
            series.append(_frontier(least, link, choice.name, "green", choice.moved, recompute=has_recipes(trace)))
    picture = cost_chart("Time of a step by memory", series, limit_bytes=fit.limit_bytes)
    parts.append(section("What less memory costs", paragraphs(_COST, kind="faint"), picture))
    if fit.best is not None and fit.best.plan is not None:
        without = "without offload" if fit.best.moved is None else "state moved, nothing swapped"
        figure = plan_page.figure(fit.best.plan, limit_bytes=fit.limit_bytes, without=without)
        parts.append(section(f"The step within the limit: {fit.best.name}", figure))
    return document(title, *parts, f"<pre>{escape(chr(10).join(fit.remarks()))}</pre>")


def _frontier(
    trace: Trace, link: Link, name: str, color: str, moved: MovedState | None = None, *, recompute: bool
) -> Series:
    """Return peak and time of the fastest plans, from the least memory to that of the step as it is."""
    least, most = least_feasible_limit(trace), max(unswapped_bytes(trace), default=0)
    points: list[tuple[float, float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(_LIMITS if most else 0):
            limit_bytes = least + (most - least) * k // (_LIMITS - 1)
            plan = fastest_plan(trace, link, limit_bytes, recompute=recompute)
            seconds = plan.expected_seconds + (moved.seconds(plan) if moved is not None else 0.0)
            # A plan for a lower limit may be faster, as searches are not exact. It is valid here too.
            points.append((limit_bytes, min(seconds, points[-1][1]) if points else seconds))
    return Series(name, color, points)
