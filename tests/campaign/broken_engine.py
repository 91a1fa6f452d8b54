"""Guards of the package left out, one at a time, under the tests that must notice.

    python -m campaign.broken_engine [--unbroken] '{"guard": ["test id", …], …}'

prints one line of JSON: for each guard, whether its tests fail without it and, if asked, pass with it. Guards in C++
are left out by the extension, where `offload` has that of the mutants; those in Python by the patches below. Each guard
has a forked process of its own, which may die or hang of what it lacks; processes that its tests start lack it too.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, settings

from offload import _core, options
from offload.control.enabled_model import EnabledModel
from offload.runtime import hooks, stores
from offload.runtime.hooks import StepHooks

ROOT = Path(__file__).resolve().parents[2]
SWITCH = "OFFLOAD_BROKEN_EDGE"  # read by the mutants' extension too
HANGS_AFTER_S = 60
Patches = list[Any]


def no_check(module: Any) -> Callable[[], Patches]:
    """A change in place is not an error any more."""
    return lambda: [mock.patch.object(module, "raise_changed")]


def no_groups() -> Patches:
    """Only the machine's memory counts."""
    return [mock.patch.object(options, "control_groups", return_value=())]


def no_end_before_exit() -> Patches:
    """The interpreter ends while copies are under way."""
    atexit.unregister(stores._quiesce_at_exit)
    return []


def writes_parameters() -> Patches:
    """A copy-in that fails has written to a parameter."""
    original, original_failed = StepHooks.unpack_swapped, StepHooks.unpack_failed

    def write() -> None:
        for each in gc.get_objects():
            if isinstance(each, torch.nn.Parameter):
                each.detach().add_(1)

    def unpack_swapped(self: StepHooks, view: Any) -> torch.Tensor:
        try:
            return original(self, view)
        except OSError:
            write()
            raise

    def unpack_failed(self: StepHooks, error: Exception) -> None:
        if isinstance(error, OSError):
            write()
        original_failed(self, error)

    return [
        mock.patch.object(StepHooks, "unpack_swapped", unpack_swapped),
        mock.patch.object(StepHooks, "unpack_failed", unpack_failed),
    ]


def rewritten(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The function with a piece of its source replaced. It counts as the library's: an interrupt may strike in it."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise LookupError(f"{function.__qualname__} has not once: {old}")
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), function.__code__.co_filename, "exec"), function.__globals__, made)
    return made[function.__name__]


def no_second_look_at_hooks() -> Patches:
    """Hooks that an interrupt has left on stay on."""
    broken = rewritten(EnabledModel.step.__wrapped__, "hooks.__exit__()", "pass")  # type: ignore[attr-defined]
    return [mock.patch.object(EnabledModel, "step", broken)]


BROKEN: dict[str, Callable[[], Patches]] = {
    "version of a kept tensor is checked": no_check(hooks),
    "a control group's limit counts": no_groups,
    "copies end before the interpreter does": no_end_before_exit,
    "a failed copy-in writes to no parameter": writes_parameters,
    "an interrupt leaves no hooks on": no_second_look_at_hooks,
}


def break_as_told() -> None:
    """Leave out the guard that the environment names, for good: this process was started to lack it."""
    guard = os.environ.get(SWITCH, "")
    for patch in BROKEN.get(guard, list)():
        patch.start()
    if hasattr(_core, "set_mutant"):
        _core.set_mutant(guard)


class Outcomes:
    """What a run of pytest came to, test by test."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = (crash.message if crash is not None else report.longreprtext).strip() or "failed"
            self.failed.setdefault(report.nodeid, said.splitlines()[0])


def run_tests(tests: list[str], guard: str, answer: int) -> None:
    """In a process of its own: run tests without a guard, and write what they came to."""
    os.setsid()  # whoever ends this process ends those that its tests have started
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.environ[SWITCH] = guard
    break_as_told()
    # The first example that fails is enough: making it smaller takes minutes.
    settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("unshrunk")
    seen = Outcomes()
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    arguments += ["--rootdir", str(ROOT), *(str(ROOT / test) for test in tests)]
    pytest.main(arguments, plugins=[seen])
    with os.fdopen(answer, "w") as pipe:
        json.dump([seen.passed, seen.failed], pipe)


def outcomes(tests: list[str], guard: str = "", patience_s: float = HANGS_AFTER_S) -> tuple[list[str], dict[str, str]]:
    """Ids of tests that pass, and what those say that fail. A process that dies or hangs fails them all."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            run_tests(tests, guard, write)
        finally:
            os._exit(0)
    os.close(write)
    ended = threading.Event()
    watch = threading.Thread(target=lambda: ended.wait(patience_s) or os.killpg(pid, signal.SIGKILL), daemon=True)
    watch.start()
    began = time.monotonic()
    with os.fdopen(read) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended.set()
    watch.join()
    if said:
        passed, failed = json.loads(said)
        return passed, failed
    hung = time.monotonic() - began >= patience_s
    return [], dict.fromkeys(tests, f"hangs: no end after {patience_s} s" if hung else f"dies with status {status}")


def run_all(table: dict[str, list[str]], unbroken: bool) -> list[dict[str, Any]]:
    """Each guard's row."""
    every = sorted({test for tests in table.values() for test in tests})
    sound, unsound = outcomes(every, patience_s=10 * HANGS_AFTER_S) if unbroken else ([], {})
    rows = []
    for guard, tests in table.items():
        _, failed = outcomes(tests, guard)
        noticed = {test: next((text for name, text in failed.items() if belongs(name, test)), "") for test in tests}
        row: dict[str, Any] = {"name": guard, "caught_by": tests, "caught": all(noticed.values())}
        if unbroken:
            row["passes_unbroken"] = all(
                any(belongs(name, test) for name in sound) and not any(belongs(name, test) for name in unsound)
                for test in tests
            )
        rows.append(row | {"first": " | ".join(noticed.values())})
    return rows


def belongs(name: str, test: str) -> bool:
    """Whether a test's id is `test`, or one of its cases."""
    return name == test or name.startswith(f"{test}[")


if __name__ == "__main__":
    print("\n" + json.dumps(run_all(json.loads(sys.argv[-1]), "--unbroken" in sys.argv)))
