"""The page that `offload demo` writes: memory curves and the table, in one self-contained file.

This file only computes the HTML text from the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from offload.diagnostics.html.chart import Series, chart
from offload.diagnostics.html.page import document, paragraphs, section, table

__all__ = ["render"]

Curve = Sequence[tuple[float, float]]

_PLAN = "The tensors saved for backward, as the plan keeps them in memory; a swapped or recomputed one is there twice."
_COLORS = ("orange", "blue", "green", "violet", "amber", "slate")


def render(
    rows: Sequence[tuple[str, Sequence[str]]],
    results: Sequence[dict[str, Any]],
    *,
    equal: bool,
    compared: str,
    notes: Sequence[str],
) -> str:
    """Return the page.

    Parameters
    ----------
    rows : sequence of (label, cells)
        The table, one cell for each run.
    results : sequence of dict
        The results of the runs, the baseline first.
    equal : bool
        Whether all losses, and what is `compared` besides, are bit-equal.
    compared : str
        What is compared besides losses, such as "gradients of the last step".
    notes : sequence of str
        Sentences for the foot of the page: the setting, and what the figures exclude.

    Returns
    -------
    str
        A complete HTML document that refers to nothing outside itself.
    """
    first = results[0]
    names = [result["name"] for result in results]
    of_state = "state_bytes" in first
    counted = ", weights and optimizer state included" if of_state else " since the model was loaded"
    memory = "memory allocated on the GPU" if first["gpu"] else f"growth of the resident set{counted}"
    step_memory = memory
    if first["last_step_is_heap"]:
        step_memory = (
            f"heap memory in use{counted if of_state else ', without the model'}. The process keeps freed memory for "
            "the next step, so its resident set, below, stays flat"
        )
    last_steps = [_from_zero(result["last_step_curve"]) for result in results]
    step = _chart("One step", "the start of the step", names, last_steps)
    whole = _chart("The whole run", "the start of the run", names, [result["curve"] for result in results])
    return document(
        "offload demo",
        "<h1>offload demo</h1>",
        paragraphs(_lead(results, equal=equal, compared=compared), kind="lead"),
        section("Comparison", table([(label, *cells) for label, cells in rows], head=("", *names))),
        section("One step", paragraphs(f"The last step of each run: {step_memory}.", kind="faint"), step),
        section("The whole run", paragraphs(f"All steps: {memory}.", kind="faint"), whole),
        *(
            section(f"The plan of the {result['name']} run", paragraphs(_PLAN, kind="faint"), result["plan"])
            for result in results
            if result["plan"]
        ),
        *(
            section(f"Report of the {result['name']} run", f"<pre>{escape(result['report']['text'])}</pre>")
            for result in results
            if result["report"]
        ),
        f"<footer>{paragraphs(*notes)}</footer>",
    )


def _lead(results: Sequence[dict[str, Any]], *, equal: bool, compared: str) -> str:
    """Return the result in a sentence."""
    first = results[0]
    parts = []
    for other in results[1:]:
        memory = other["peak_bytes"] / max(first["peak_bytes"], 1)
        seconds = other["step_seconds_median"] / first["step_seconds_median"]
        parts.append(f"{other['name']}: {memory:.2f}× the memory, {seconds:.2f}× the step time")
    if not parts:
        return f"The {first['name']} run alone."
    bits = "equal to the last bit" if equal else "NOT EQUAL"
    return f"{'; '.join(parts)} of the {first['name']} run. Losses, and {compared}: {bits}."


def _chart(label: str, origin: str, names: Sequence[str], curves: Sequence[Curve]) -> str:
    series = [Series(name, color, curve) for name, color, curve in zip(names, _COLORS, curves, strict=False)]
    end = max((at for curve in curves for at, _ in curve), default=0.0)
    return chart(label, series=series, seconds=end, origin=origin)


def _from_zero(curve: Curve) -> Curve:
    """Shift a curve so that its first point is at 0 seconds."""
    return [(at - curve[0][0], used) for at, used in curve]
