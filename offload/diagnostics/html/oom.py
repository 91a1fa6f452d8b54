"""The page that explains an out-of-memory error: a bar of what uses the memory, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from offload.diagnostics.html.chart import Part, bar_chart
from offload.diagnostics.html.page import document, paragraphs, section, table

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

    Returns
    -------
    str
        One HTML document; it loads nothing.
    """
    colors = (*_HELD[: len(parts) - len(_LAST)], *_LAST)
    bar = [Part(name, color, nbytes) for (name, nbytes), color in zip(parts, colors, strict=True)]
    lines = "".join(f"<dt><code>{escape(line)}</code></dt><dd>{escape(why)}</dd>" for line, why in remedies)
    saved = table(saved_rows) if saved_rows else paragraphs("nothing", kind="faint")
    return document(
        "offload: out of memory",
        f"<h1>Out of memory in {escape(where)}</h1>",
        paragraphs(verdict, kind="lead"),
        section("What fills the memory", bar_chart("What fills the memory", bar)),
        section("What to do", f"<dl>{lines}</dl>"),
        section("Memory when the error came", table(memory_rows)),
        section("Saved for backward in this step", saved),
        section("The error", f"<pre>{escape(error)}</pre>"),
    )
