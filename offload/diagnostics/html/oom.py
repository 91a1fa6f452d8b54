"""The page that explains an out-of-memory error: memory up to the failure, or a bar of what uses it, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from offload.diagnostics.html import plan as plan_page
from offload.diagnostics.html.chart import Part, bar_chart
from offload.diagnostics.html.page import document, paragraphs, section, table
from offload.plan import Plan

__all__ = ["render"]

_HELD = ("slate", "blue", "green", "amber", "violet")
_LAST = ("pale", "red")  # free bytes, and missing bytes


def render(
    *,
    where: str,
    error: str,
    parts: Sequence[tuple[str, int]],
    memory_rows: Sequence[tuple[str, str]],
    saved_rows: Sequence[tuple[str, str, str]],
    verdict: str,
    remedies: Sequence[tuple[str, str]],
    running: tuple[Plan, int] | None = None,
    limit_bytes: int | None = None,
) -> str:
    """Return the page.

    Parameters
    ----------
    where, error, verdict : str
        Sentences.
    parts : sequence of (name, bytes)
        Parts of the memory in the order of the bar; the last two are the free and the missing bytes.
    memory_rows : sequence of (name, amount)
        Rows of the first table.
    saved_rows : sequence of (reason, amount, whether it can be swapped)
        Rows of the second table.
    remedies : sequence of (command or action, effect)
        Best first.
    running : (Plan, int), optional
        The plan that the step follows, and the node in which it was. With it, the page shows the memory over time up to
        there; otherwise a bar.
    limit_bytes : int, optional
        The bytes that tensors can have.

    Returns
    -------
    str
        One HTML document; it loads nothing.
    """
    lines = "".join(f"<dt><code>{escape(line)}</code></dt><dd>{escape(why)}</dd>" for line, why in remedies)
    saved = table(saved_rows) if saved_rows else paragraphs("nothing", kind="faint")
    return document(
        "offload: out of memory",
        f"<h1>Out of memory in {escape(where)}</h1>",
        paragraphs(verdict, kind="lead"),
        _bar(parts) if running is None else _memory(*running, limit_bytes),
        section("What to do", f"<dl>{lines}</dl>"),
        section("Memory when the error came", table(memory_rows)),
        section("Saved for backward in this step", saved),
        section("The error", f"<pre>{escape(error)}</pre>"),
    )


def _bar(parts: Sequence[tuple[str, int]]) -> str:
    colors = (*_HELD[: len(parts) - len(_LAST)], *_LAST)
    bar = [Part(name, color, nbytes) for (name, nbytes), color in zip(parts, colors, strict=True)]
    return section("What fills the memory", bar_chart("What fills the memory", bar))


def _memory(plan: Plan, node: int, limit_bytes: int | None) -> str:
    """Return memory over the step until it failed, as it was planned: no step is recorded while it runs."""
    node = min(max(node, 0), len(plan.trace.nodes) - 1)
    words = (
        f"Memory ran out in node {node + 1} of {len(plan.trace.nodes)} ({plan.trace.nodes[node].name}), where this "
        "chart ends. It shows the bytes and times of the plan that the step followed; the tables show what was counted."
    )
    figure = plan_page.figure(plan, limit_bytes=limit_bytes, last_node=node)
    return section("Memory up to the failure", paragraphs(words, kind="faint"), figure)
