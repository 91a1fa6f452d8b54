"""Runs a training script until its first steps have been profiled. `offload plan train.py` and `offload fit` use it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.control.profile_listener import RecordedStep

__all__ = ["exit_status", "profile_script", "run_script"]

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_PROFILES_MAX = 8  # profiled steps before the trial step is over; after these, the trial step is not awaited


def profile_script(
    path: str,
    words: Sequence[str],
    trial_bytes: Callable[[RecordedStep], int | None],
    *,
    quiet: bool,
    goes_on: Callable[[], bool] = lambda: False,
) -> RecordedStep | int | None:
    """Run a script until a step of a model that it enables has been profiled, and the trial step if one is requested.

    Parameters
    ----------
    path
        The script.
    words
        Its arguments.
    trial_bytes
        Called with the first profiled step. Returns the most bytes that a trial step of recomputation may take; None
        for no trial step.
    quiet
        Whether the script's output goes to standard error, so that standard output contains only JSON.
    goes_on
        Called when the step is known. Returns whether the script goes on; other code then ends it.

    Returns
    -------
    RecordedStep, int or None
        The step; after a trial step, with recipes. The script's own exit status if it fails before; None if it ends
        without a training step.
    """
    from offload.control.registry import listen_to_profiles

    found: list[RecordedStep] = []
    waiting: list[RecordedStep] = []  # the step whose trial step is due, and those profiled before that trial step runs

    def listen(step: RecordedStep) -> int | None:
        if found:
            return None  # it goes on
        room = None if waiting else trial_bytes(step)
        if step.may_try:
            if waiting or room is not None:
                waiting.append(step)
            if 1 < len(waiting) <= _PROFILES_MAX or room is not None:
                return room  # go on: the trial step of `waiting[0]` is due
        found.append(waiting[0] if len(waiting) > 1 and step.may_try else step)
        if not goes_on():
            raise SystemExit(0)
        return None

    try:
        with listen_to_profiles(listen):
            run_script(path, words, quiet=quiet)
    except SystemExit as end:
        if not found:
            status = exit_status(end)
            if not waiting:
                return status
    return next(iter([*found, *waiting]), None)  # without `found`, the script has ended before its trial step


def run_script(path: str, words: Sequence[str], *, quiet: bool) -> None:
    """Run a script as `python` does, with its arguments; see `profile_script`. Its `sys.argv[0]` is an absolute path.

    The traceback of an exception that ends the program begins with the script, as that of `python` does.
    """
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [path, *words], str(Path(path).resolve().parent)
    file = str(Path(path).absolute())  # the script may change the folder and use `__file__` afterwards
    try:
        with redirect_stdout(sys.stderr) if quiet else nullcontext():
            runpy.run_path(file, run_name="__main__")
    except BaseException:
        sys.excepthook = partial(_show_from, file, sys.excepthook)
        raise
    finally:
        sys.argv, sys.path[0] = before


def _show_from(
    path: str, show: _ExceptHook, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Show an exception without the frames above the script's first one, which started it."""
    inside = traceback
    while inside is not None and inside.tb_frame.f_code.co_filename != path:
        inside = inside.tb_next
    if inside is None and not isinstance(error, SyntaxError):  # that of the script itself has no frame
        inside = traceback
    show(kind, error.with_traceback(inside), inside)


def exit_status(end: SystemExit) -> int | None:
    """Return the exit status of a script that ended itself, and print its last words, both as `python` does.

    None instead of 0: the script has not failed, as if it had come to its end. For a command, 0 is an answer.
    """
    if isinstance(end.code, int) or end.code is None:
        return end.code or None
    print(end.code, file=sys.stderr)
    return 1
