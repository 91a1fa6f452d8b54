"""The small memory curve of a plan that notebooks show in handle, report and plan.

It is a picture without scripts, because many viewers of notebooks remove scripts. Like those of the report, its colours
fit light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from offload.diagnostics.verdict import Verdict
from offload.plan import Plan, Timing, simulate
from offload.units import format_bytes, format_seconds

__all__ = ["curve", "render_plan"]

_WIDTH, _HEIGHT = 640, 120
_STYLE = """.offload-curve { max-width: 640px; font: 13px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
.offload-curve svg { display: block; width: 100%; height: auto; border-bottom: 1px solid rgba(128, 128, 128, .5); }
.offload-curve .with { --color: #3d85c6; } .offload-curve .without { --color: #8a939d; }
.offload-curve path { fill: var(--color); fill-opacity: .15; stroke: var(--color); stroke-width: 2; }
.offload-curve span { margin-right: 18px; border-left: 14px solid var(--color); padding-left: 6px; }
.offload-curve pre { white-space: pre-wrap; margin: 4px 0; background: transparent; color: inherit; }"""


def curve(plan: Plan, verdict: Verdict | None = None) -> str:
    """Return memory over the step as predicted, with the plan and without offload: one element of HTML.

    With the verdict of a report, the step time without offload is that of measured steps, as the report says it: the
    profiled step, which the plan was made from, may have computed slower or faster.
    """
    without = simulate(plan.trace, (), plan.link)
    rows = [("without", "without offload", without, without.step_seconds)]
    in_words: Callable[[float], str] = format_seconds
    about = ""
    if verdict is not None and verdict.compute_seconds:
        rows = [("without", "without offload", without, verdict.compute_seconds)]
        in_words, about = verdict.seconds_in_words(), "about "
    if plan.swaps or plan.recomputes:
        rows.append(("with", "with this plan", plan.timing, plan.expected_seconds))
    longest = max(seconds for *_, seconds in rows)
    most = max((max(timing.resident, default=0) for _, _, timing, _ in rows), default=0)
    paths = "".join(
        f'<path class="{kind}" d="{_path(timing, _WIDTH * seconds / (longest or 1), most)}"/>'
        for kind, _, timing, seconds in rows
    )
    keys = "".join(
        f'<span class="{kind}">{name}: {format_bytes(max(timing.resident, default=0))} at most, '
        f"{about if kind == 'without' else ''}{in_words(seconds)}</span>"
        for kind, name, timing, seconds in rows
    )
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Memory over the step">{paths}</svg>'
    return f'<div class="offload-curve"><style>{_STYLE}</style>\n{picture}<div>{keys}</div></div>'


def render_plan(plan: Plan) -> str:
    """Return a plan for a notebook: its summary, its curve, and in a folded part a line for each tensor."""
    folded = f"<details><summary>All tensors</summary><pre>{escape(plan.explain())}</pre></details>"
    summary = escape(plan.summary())
    return f'<div class="offload-plan"><pre>{summary}</pre>{curve(plan)}{folded}</div>'


def _path(timing: Timing, width: float, most: int) -> str:
    """Return the area below the bytes resident from each node's beginning to the next one's; the step is `width`."""
    ends: Sequence[float] = [*timing.ready[1:], timing.step_seconds]
    corners = [(0.0, 0)]
    for begin, end, nbytes in zip(timing.ready, ends, timing.resident, strict=True):
        corners += [(begin, nbytes), (end, nbytes)]
    corners.append((corners[-1][0], 0))
    points = (
        f"{width * at / (timing.step_seconds or 1):.1f},{_HEIGHT - (_HEIGHT - 4) * nbytes / (most or 1):.1f}"
        for at, nbytes in corners
    )
    return "M" + "L".join(points) + "Z"


Plan.notebook_page = staticmethod(render_plan)  # set here, because `plan/` does not import this module
