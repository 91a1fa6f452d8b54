"""What every test shares: options, and GPU tests that cannot hide.

A test marked `gpu` is skipped where there is no CUDA device, with that reason; OFFLOAD_REQUIRE_CUDA=1 turns the skip
into a failure. With `--device sim` it runs on the simulated accelerator of tests/twin instead, and so do the tests in
tests/twin/inside: in a process of their own, which tests/twin/test_twin.py starts. `--all-databases` runs
tests/test_databases.py on every case instead of the quick subset.

Tests marked `long` run with `--long` only: CI runs them after the rest. Tests marked `full` run with `--full` only:
further rows of tests that have a row by default or with `--long`. None of either is the one that misses a guard.
The campaigns of docs/reliability.md run in a short form; `--full` runs them in full. What they count (faults injected,
kills survived, …) is written as JSON where `--reliability-json PATH` is given.

The whole suite (`pytest` without a path) runs in three processes, where pytest-xdist is installed; `-n N` asks for
another number, `-n 0` for none. A file's tests stay together: they share what its fixtures build.
"""

import gc
import json
import os
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest

gc.disable()  # while modules are imported and tests collected; on again in pytest_runtestloop
# The tensors here are small: a second thread would only spin, and keep the copies and the next process waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each test's searches begin anew: what one has measured must not change the plans of another.
os.environ["OFFLOAD_SEARCH_ANEW"] = "1"

import torch  # noqa: E402

TALLY = pytest.StashKey[dict]()
PASSED = pytest.StashKey[Counter]()
STARTED = pytest.StashKey[float]()
FIGURES = pytest.StashKey[dict]()
MODULES = pytest.StashKey[int]()
PROCESSES = 3  # of which one often waits: for a child, a lock, a time limit


def pytest_addoption(parser):
    parser.addoption(
        "--all-databases",
        action="store_true",
        default=os.environ.get("OFFLOAD_ALL_DATABASES") == "1",
        help="run PyTorch's whole operator and module databases (also: OFFLOAD_ALL_DATABASES=1)",
    )
    parser.addoption("--long", action="store_true", help="also run tests marked long")
    parser.addoption(
        "--full",
        action="store_true",
        help="also run tests marked long or full; the campaigns and the matrix of torch.compile in full",
    )
    parser.addoption("--reliability-json", metavar="PATH", help="write what the campaigns counted to PATH")
    parser.addoption(
        "--seeds",
        type=int,
        help="how many seeds tests/campaign walks (default: 60; with --long 250 more, with --full 500)",
    )
    parser.addoption("--first-seed", type=int, default=0, help="the first of these seeds (default: 0)")
    parser.addoption("--share", metavar="K/N", help="run the K-th of N shares of what was selected")
    parser.addoption("--device", choices=("cuda", "sim"), default="cuda", help="what tests marked gpu run on")
    parser.addoption("--twin-seed", type=int, default=0, help="the simulated accelerator's delays (default: 0)")
    parser.addoption("--rounds", type=int, default=10, help="how many rounds tests/stress runs (default: 10)")
    parser.addoption("--seed", type=int, help="replay one seed of tests/campaign, under every schedule")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Several processes for the whole suite, unless asked otherwise; for a few files one, which imports torch once."""
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    option = config.option
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    # A GPU's memory is one: what its tests measure of it must not be another process's.
    is_free = not (option.usepdb or option.collectonly or torch.cuda.is_available())
    if option.numprocesses is None and option.dist == "no" and is_whole and is_free:
        option.numprocesses = PROCESSES
    if option.numprocesses and option.dist == "no":
        option.dist = "loadfile"
        option.loadscopereorder = False  # the long files come first as it is, and files of few tests may be long


def pytest_configure(config):
    if config.getoption("--device") == "sim":
        os.environ["OFFLOAD_TEST_DEVICE"] = "sim"
        config.pluginmanager.import_plugin("twin.gate")
    config.stash[TALLY] = {}
    config.stash[PASSED] = Counter()
    config.stash[STARTED] = time.monotonic()
    config.stash[FIGURES] = {}
    config.stash[MODULES] = 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    is_full = config.getoption("--full")
    asked = {"long": is_full or config.getoption("--long"), "full": is_full}
    absent = [name for name, is_asked in asked.items() if not is_asked]
    left_out = {item for item in items if any(map(item.get_closest_marker, absent))}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.parent.name != "twin")  # the longest first: nobody waits for it at the end
    share = config.getoption("--share")
    if share is None:
        return
    number, shares = map(int, share.split("/"))
    if not 1 <= number <= shares:
        raise pytest.UsageError(f"--share: K/N with K from 1 to N, not {share}")
    # By name: every N-th test would have the same value of a parameter with N values.
    chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % shares == number - 1]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_ignore_collect(collection_path, config):
    is_inside = collection_path.name == "inside" and collection_path.parent.name == "twin"
    return True if is_inside and config.getoption("--device") != "sim" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.enable()


def freeze_imports(stash):
    """What imports left behind never dies: the collector need not look at it, nor the interpreter as it ends.

    Before each test, since torch and the frameworks import large parts of themselves when these are first used.
    """
    if len(sys.modules) > stash[MODULES]:
        stash[MODULES] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    freeze_imports(item.config.stash)
    is_there = torch.cuda.is_available() or item.config.getoption("--device") == "sim"
    if item.get_closest_marker("gpu") is None or is_there:
        return
    if os.environ.get("OFFLOAD_REQUIRE_CUDA") == "1":
        pytest.fail("OFFLOAD_REQUIRE_CUDA=1, and torch sees no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def tally(request):
    """Named lists of cases, by database; said at the end of the run."""
    return request.config.stash[TALLY]


@pytest.fixture(scope="session")
def figures(request):
    """What a run counted, by name; said at its end."""
    return request.config.stash[FIGURES]


@pytest.fixture(scope="session")
def is_full(request):
    """Whether `--full` is given."""
    return request.config.getoption("--full")


@pytest.fixture(scope="session")
def campaign_counts(request):
    """What a campaign counts: `campaign_counts["faults injected"] += 1`."""
    return request.config.stash[FIGURES].setdefault("campaigns", Counter())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[PASSED][str(item.path.relative_to(item.config.rootpath))] += 1
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """A process has ended: what it counted is everybody's."""
    counted = json.loads(getattr(node, "workeroutput", {}).get("counted", "{}"))  # nothing where it crashed
    config = node.config
    config.stash[PASSED].update(counted.get("passed", {}))
    for name, found in counted.get("figures", {}).items():
        figures = config.stash[FIGURES].setdefault(name, Counter())
        figures.update(found)
    for database, outcomes in counted.get("tally", {}).items():
        for outcome, cases in outcomes.items():
            config.stash[TALLY].setdefault(database, {}).setdefault(outcome, []).extend(cases)


def pytest_sessionfinish(session, exitstatus):
    stash = session.config.stash
    if hasattr(session.config, "workeroutput"):
        counted = {"passed": stash[PASSED], "figures": stash[FIGURES], "tally": stash[TALLY]}
        session.config.workeroutput["counted"] = json.dumps(counted)
        return
    path = session.config.getoption("--reliability-json")
    if path is None:
        return
    databases = {
        name: {outcome: len(cases) for outcome, cases in outcomes.items()} for name, outcomes in stash[TALLY].items()
    }
    found = {
        "full": session.config.getoption("--full"),
        "figures": stash[FIGURES],
        "passed": dict(stash[PASSED]),
        "failed": session.testsfailed,
        "databases": databases,
        "seconds": round(time.monotonic() - stash[STARTED], 1),
    }
    Path(path).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def pytest_terminal_summary(terminalreporter, config):
    for name, counted in sorted(config.stash[FIGURES].items()):
        terminalreporter.write_line(f"{name}: {counted}")
    for database, outcomes in sorted(config.stash[TALLY].items()):
        terminalreporter.section(f"{database}: what the engine's hooks were tried on")
        for outcome, names in sorted(outcomes.items()):
            listed = "" if outcome == "bit-equal" else ": " + ", ".join(sorted(names))
            terminalreporter.write_line(f"{outcome}: {len(names)}{listed}")
