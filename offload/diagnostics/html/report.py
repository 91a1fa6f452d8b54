"""The report as HTML for a notebook: the verdict with bars, and the details in a folded part.

It needs no scripts and no external resources. The text uses the colour of the surrounding page, and the bars fit light
and dark pages, because a notebook's theme may differ from the system's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from offload.diagnostics.verdict import Verdict
from offload.units import alike_bytes

__all__ = ["render"]

_BAR_PIXELS = 270
_STYLE = """.offload-report { font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; max-width: 60em; }
.offload-report table { border-collapse: collapse; margin: 0; font-size: inherit; }
.offload-report th, .offload-report td { text-align: left; vertical-align: top; padding: 2px 16px 2px 0;
  font-weight: normal; background: transparent; border: 0; white-space: normal; overflow-wrap: anywhere; }
.offload-report th { opacity: .65; white-space: nowrap; }
.offload-report .verdict td { font-weight: 600; }
.offload-report .bars { margin: 6px 0 10px; font-size: 12px; line-height: 1.3; }
.offload-report .bars span { display: inline-block; height: 12px; margin-right: 6px; vertical-align: -2px; }
.offload-report .with { background: #3d85c6; } .offload-report .without { background: rgba(138, 147, 157, .55); }
.offload-report summary { cursor: pointer; }
.offload-report details tr { border-top: 1px solid rgba(128, 128, 128, .3); }
.offload-report td { font-variant-numeric: tabular-nums; }"""


def render(verdict: Verdict, rows: Sequence[tuple[str, str]], notes: Sequence[str]) -> str:
    """Return the report as HTML.

    Parameters
    ----------
    verdict : Verdict
        Shown on top.
    rows : sequence of (name, words)
        The details.
    notes : sequence of str
        Shown below the verdict.

    Returns
    -------
    str
        One element; it loads nothing.
    """
    parts = [f'<table class="verdict">{_rows(verdict.rows())}</table>', *_bars(verdict)]
    if notes:
        parts.append(f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>")
    parts.append(f"<details><summary>Details of all steps</summary><table>{_rows(rows)}</table></details>")
    return f'<div class="offload-report"><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</div>"


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<tr><th>{escape(name)}</th><td>{escape(words)}</td></tr>" for name, words in rows)


def _bars(verdict: Verdict) -> Iterator[str]:
    """Yield a table with two bars, with offload and without, for activations and whole step, if both are known."""
    activations = verdict.activation_bytes
    if activations is None:
        activations = verdict.activation_bytes_planned
    whole = (verdict.step_bytes_planned, verdict.step_bytes_unswapped)
    pairs = [("activations", activations, verdict.activation_bytes_unswapped), ("whole step", *whole)]
    known = [(name, a, b) for name, a, b in pairs if a is not None and b]
    if not known:
        return
    longest = max(max(a, b) for _, a, b in known)
    words = alike_bytes([longest])
    rows = "".join(
        _bar(name, "with", a / longest, f"{words(a)} with offload")
        + _bar("", "without", b / longest, f"{words(b)} without")
        for name, a, b in known
    )
    yield f'<table class="bars" aria-label="Memory at the peak of a step, with offload and without">{rows}</table>'


def _bar(name: str, kind: str, share: float, words: str) -> str:
    bar = f'<span class="{kind}" style="width: {_BAR_PIXELS * share:.0f}px"></span>'
    return f"<tr><th>{escape(name)}</th><td>{bar}{escape(words)}</td></tr>"
