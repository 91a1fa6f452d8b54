"""The guard without a clock: the control path and the planner take no more instructions than was committed.

A figure that is outside on purpose is committed anew by `python bench/instructions.py --update`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
TESTED = ("kept small", "swapped", "planner")
PLANTED = ("kept small", "planner")


@pytest.fixture(scope="module")
def guard() -> Any:
    """The guard as a module."""
    sys.path.insert(0, str(BENCH))
    try:
        import instructions
    finally:
        sys.path.pop(0)
    return instructions


@pytest.fixture(scope="module")
def counted(guard: Any) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Committed, counted now, and counted with a loop planted in `pack` and planning done twice."""
    try:
        kept = guard.committed()
        figures = guard.count([*TESTED, "planted", *PLANTED])
        if any(guard.outside(each, kept[name]) for name, each in zip(TESTED, figures, strict=False)):
            again = guard.count([*TESTED, "planted", *PLANTED])
            # What happens by chance in a run adds to its figures, or, in the run that is subtracted, takes from them. A
            # change of the code is in both counts.
            found = zip([*TESTED, *PLANTED], figures, again, strict=True)
            figures = [min(pair, key=lambda each: abs(each / kept[name] - 1)) for name, *pair in found]
    except guard.Unavailable as reason:
        pytest.skip(str(reason))
    return kept, dict(zip(TESTED, figures, strict=False)), dict(zip(PLANTED, figures[len(TESTED) :], strict=True))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("subject", TESTED)
def test_no_more_instructions_than_committed(counted: Any, guard: Any, subject: str) -> None:
    kept, figures, _ = counted
    words = f"{subject}: {figures[subject]:,.0f} instructions, {kept[subject]:,.0f} committed"
    assert not guard.outside(figures[subject], kept[subject]), words


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("subject", PLANTED)
def test_a_planted_loop_is_found(counted: Any, guard: Any, subject: str) -> None:
    kept, figures, planted = counted
    assert guard.outside(planted[subject], kept[subject])
    assert planted[subject] > 1.2 * figures[subject]


def test_what_is_fixed_cancels_out(guard: Any) -> None:
    labels = [("kept small", f"{n} {who}") for n in ("once", "twice") for who in ("offload", "none")]
    figures = guard.differences(
        [*labels, ("planner", "once"), ("planner", "twice")],
        [1000 + 32 * 50, 300 + 32 * 8, 1000 + 64 * 50, 300 + 64 * 8, 77 + 5000, 77 + 10000],
    )
    assert figures == [42.0, 5000.0]


def test_other_versions_are_not_compared(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "versions", lambda: {"python": "2.7"})
    with pytest.raises(guard.Unavailable, match=r"and this is \{'python': '2.7'\}"):
        guard.committed()


def test_without_valgrind_it_says_so(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(guard.Unavailable, match="apt install valgrind"):
        guard.count(["planner"])
